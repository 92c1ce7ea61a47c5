"""Out-forms: caller-owned buffers whose address a captured graph holds (C07a)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dsv41ops
from tests.support import ints

STALE = 77777


def index_buffers(
    rows: int, width: int, stride: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """``out`` cut from wider storage (returned last), and ``lens``, both full of stale ids."""
    storage = torch.full((rows, stride), STALE, dtype=torch.int32, device=device)
    lens = torch.full((rows,), STALE, dtype=torch.int32, device=device)
    return storage[:, :width], lens, storage


@pytest.mark.parametrize("stride", [64, 67])
def test_c07_topk_rows_stay_where_they_are(stride: int, device: torch.device) -> None:
    """64 ids per row, then 8: row 1 still starts one row stride on, with nothing stale left."""
    out, lens, storage = index_buffers(4, 64, stride, device)
    address = out.data_ptr(), lens.data_ptr()
    table = ints([list(range(r * 20 + 16, r * 20 + 36)) for r in range(4)], device)
    for count in (64, 8, 0, 64):
        topk = torch.full((4, 64), -1, dtype=torch.int32, device=device)
        topk[:, :count] = torch.arange(1000, 1000 + count, dtype=torch.int32, device=device)
        arguments = topk, ints(range(5), device), ints([2000] * 4, device), table, 64, 1
        assert dsv41ops.topk_to_slots_out(*arguments, out=out, lens=lens) is None
        expected, expected_lens = dsv41ops.topk_to_slots(*arguments)
        assert torch.equal(out, expected)
        assert torch.equal(lens, expected_lens)
        assert bool((out[:, :count] >= 1000).all())
        assert storage.flatten()[stride].item() == expected[1, 0].item()
        assert bool((storage[:, 64:] == STALE).all())
    assert (out.data_ptr(), lens.data_ptr()) == address


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("stride", [192, 195])
def test_c07_window_rows_stay_where_they_are(
    stride: int, causal: bool, device: torch.device
) -> None:
    out, lens, storage = index_buffers(6, 192, stride, device)
    table = ints([[3, 5, 1, 9, 4, 6, 0, 2]] * 3, device)
    for query_start_loc, seq_lens in (
        ([0, 2, 3, 6], [200, 150, 130]),
        ([0, 1, 1, 2], [1, 9, 3]),
        ([0, 0, 0, 0], [0, 0, 0]),
        ([0, 2, 3, 6], [200, 150, 130]),
    ):
        num_tokens = query_start_loc[-1]
        batch = ints(query_start_loc, device), ints(seq_lens, device)
        options = {"width": 192, "causal": causal}
        dsv41ops.sliding_window_indices_out(
            *batch, table, num_tokens, 32, **options, out=out, lens=lens
        )
        expected, expected_lens = dsv41ops.sliding_window_indices(
            *batch, table, num_tokens, 32, **options
        )
        assert torch.equal(out[:num_tokens], expected)
        assert torch.equal(lens[:num_tokens], expected_lens)
        assert bool((out[num_tokens:] == -1).all())
        assert bool((lens[num_tokens:] == 0).all())
        assert bool((storage[:, 192:] == STALE).all())


@pytest.mark.parametrize("rows", [5, 9])
def test_topk_rows_past_the_tokens(rows: int, device: torch.device) -> None:
    out, lens, _ = index_buffers(rows, 3, 3, device)
    topk = ints([[0, 1, 2]] * 5, device)
    arguments = topk, ints([0, 2, 4], device), ints([3, 2], device), ints([[1], [2]], device), 4, 1
    dsv41ops.topk_to_slots_out(*arguments, out=out, lens=lens)
    expected = [[4, 5, -1], [4, 5, 6], [8, -1, -1], [8, 9, -1]]
    assert out.tolist() == expected + [[-1] * 3] * (rows - 4)
    assert lens.tolist() == [2, 3, 1, 2] + [0] * (rows - 4)


@pytest.mark.parametrize("length", [6, 9])
def test_slot_buffer_is_filled_whole(length: int, device: torch.device) -> None:
    storage = torch.full((length + 2,), STALE, dtype=torch.int64, device=device)
    arguments = ints([0, 2, 5], device), ints([2, 3], device), ints([[1], [2]], device), 6, 4, 1
    written = dsv41ops.compressed_slot_mapping_out(*arguments, out=storage[1:-1])
    assert written is None
    assert storage.tolist() == [STALE, 4, 5, 8, 9, 10, *[-1] * (length - 5), STALE]


def test_inputs_are_never_written(device: torch.device) -> None:
    """The block table above all."""
    tensors = {
        "topk": ints([[0, 1, -1]] * 5, device),
        "query_start_loc": ints([0, 2, 5], device),
        "seq_lens": ints([2, 3], device),
        "table": ints([[1, -1], [2, 5]], device),
        "replay_start": ints([0, 1], device),
        "slot_mapping": ints([-1, 0, 1, 2, 3], device),
    }
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    batch = tensors["query_start_loc"], tensors["seq_lens"], tensors["table"]
    dsv41ops.token_to_request(tensors["query_start_loc"], 5)
    dsv41ops.compressed_slot_mapping(*batch, 5, 4, 1, tensors["slot_mapping"])
    dsv41ops.sliding_window_indices(*batch, 5, 4, replay_start=tensors["replay_start"])
    dsv41ops.topk_to_slots(tensors["topk"], *batch, 4, 1)
    dsv41ops.dcp_local_seq_lens(tensors["seq_lens"], 1, 1, 0)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name]), name
