"""Token -> request, and absent requests in every metadata op (C04)."""

from __future__ import annotations

import pytest
import torch

import dsv41ops
from tests import oracles
from tests.support import ints

# C04: the middle request is empty; then the same batch with two more padded requests.
C04 = {
    "exact": ([0, 1, 1, 4], [5, 0, 9]),
    "padded_requests": ([0, 1, 1, 4, 4, 4], [5, 0, 9, 0, 0]),
    "padded_requests_stale_lengths": ([0, 1, 1, 4, 4, 4], [5, 77, 9, 123, 7]),
}
TABLE = [[3, 1], [4, 2], [7, 5], [6, 8], [9, 10]]


@pytest.mark.parametrize("name", C04)
def test_c04_token_to_request(name: str, device: torch.device) -> None:
    query_start_loc, _ = C04[name]
    owners = dsv41ops.token_to_request(ints(query_start_loc, device), 6)
    assert owners.dtype == torch.int32
    assert owners.tolist() == [0, 2, 2, 2, -1, -1]


@pytest.mark.parametrize("name", C04)
def test_c04_every_metadata_op(name: str, device: torch.device) -> None:
    query_start_loc, seq_lens = C04[name]
    batch = ints(query_start_loc, device), ints(seq_lens, device)
    table = ints(TABLE[: len(seq_lens)], device)
    # Positions 4, 6, 7, 8 at ratio 4: one state closes (position 7), and 1, 1, 2, 2 are visible.
    topk = ints([list(range(5))] * 6, device)
    _, visible = dsv41ops.topk_to_slots(topk, *batch, table, 4, 4)
    assert visible.tolist() == [1, 1, 2, 2, 0, 0]
    slots = dsv41ops.compressed_slot_mapping(*batch, table, 6, 4, 4)
    assert slots.tolist() == [-1, -1, 7 * 4 + 1, -1, -1, -1]
    _, window = dsv41ops.sliding_window_indices(*batch, table, 6, 32)
    assert window.tolist() == [5, 7, 8, 9, 0, 0]


def test_c04_uniform_queries_of_an_absent_request(device: torch.device) -> None:
    """seq_len 0 with three query tokens: positions -3 .. -1, lengths 0, never negative."""
    batch = ints([0, 3, 6], device), ints([0, 2], device)
    table = ints(TABLE[:2], device)
    topk = ints([[0, 1, -1]] * 6, device)
    slots, lens = dsv41ops.topk_to_slots(topk, *batch, table, 4, 1)
    assert lens.tolist() == [0, 0, 0, 0, 1, 2]  # positions -1, 0, 1 of the second request
    assert slots[:4].tolist() == [[-1, -1, -1]] * 4
    _, window = dsv41ops.sliding_window_indices(*batch, table, 6, 32)
    assert window.tolist() == [0, 0, 0, 0, 1, 2]
    _, block = dsv41ops.sliding_window_indices(*batch, table, 6, 32, width=192, causal=False)
    assert block.tolist() == [0, 0, 0, 0, 2, 2]
    states = dsv41ops.compressed_slot_mapping(*batch, table, 6, 4, 1)
    assert states.tolist() == [-1, -1, -1, -1, 16, 17]


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("query_start_loc", [[0], [0, 0], [0, 0, 0, 0]])
def test_c04_nothing_but_padding(
    query_start_loc: list[int], num_tokens: int, device: torch.device
) -> None:
    batch = ints(query_start_loc, device), ints([0] * (len(query_start_loc) - 1), device)
    table = torch.zeros(len(query_start_loc) - 1, 2, dtype=torch.int32, device=device)
    assert dsv41ops.token_to_request(batch[0], num_tokens).tolist() == [-1] * num_tokens
    slots = dsv41ops.compressed_slot_mapping(*batch, table, num_tokens, 4, 2)
    assert slots.tolist() == [-1] * num_tokens
    for rows, lens in (
        dsv41ops.sliding_window_indices(*batch, table, num_tokens, 32, window=8),
        dsv41ops.topk_to_slots(
            torch.zeros(num_tokens, 8, dtype=torch.int32, device=device), *batch, table, 4, 2
        ),
    ):
        assert rows.shape == (num_tokens, 8)
        assert rows.tolist() == [[-1] * 8] * num_tokens
        assert lens.tolist() == [0] * num_tokens
    assert dsv41ops.dcp_local_seq_lens(batch[1], 2, 2, 1).tolist() == [0] * len(batch[1])


@pytest.mark.parametrize("num_tokens", [1, 4, 7, 40])
def test_matches_the_loop(num_tokens: int, device: torch.device) -> None:
    """T below, at and above the batch's own tokens; runs of empty requests at both ends."""
    query_start_loc = [0, 0, 0, 3, 3, 4, 7, 7, 7]
    owners = dsv41ops.token_to_request(ints(query_start_loc, device), num_tokens)
    assert owners.tolist() == oracles.token_to_request(query_start_loc, num_tokens)
