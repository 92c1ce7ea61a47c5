"""Compressed slot mapping: units and replayed tokens (C08), table bounds (C01), owners (C18)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dsv41ops
from tests import oracles
from tests.oracles import Shard
from tests.support import ints

POISON = 9


def windowed(rows: list[list[int]], device: torch.device) -> Tensor:
    """A block table cut out of a bigger one full of a number that must never be used."""
    height, width = len(rows), len(rows[0])
    storage = torch.full((height + 2, width + 3), POISON, dtype=torch.int32, device=device)
    storage[1:-1, 1 : width + 1] = ints(rows, device)
    return storage[1:-1, 1 : width + 1]


def one_request(
    seq_len: int, queries: int, table: list[int], states_per_page: int, ratio: int,
    device: torch.device, **kwargs: object,
) -> list[int]:  # fmt: skip
    return dsv41ops.compressed_slot_mapping(
        ints([0, queries], device),
        ints([seq_len], device),
        windowed([table], device),
        queries,
        states_per_page,
        ratio,
        **kwargs,
    ).tolist()


def test_c08_states_per_page_is_not_tokens_per_page(device: torch.device) -> None:
    """Blocks of 256 tokens at ratio 128: two states per page."""
    slots = one_request(520, 520, [7, 3, 9], 2, 128, device)
    closed = {position: slot for position, slot in enumerate(slots) if slot != -1}
    assert closed == {127: 14, 255: 15, 383: 6, 511: 7}
    assert one_request(512, 1, [7, 3, 9], 2, 128, device) == [7]
    assert one_request(513, 1, [7, 3, 9], 2, 128, device) == [-1]
    assert one_request(127, 1, [7, 3, 9], 2, 128, device) == [-1]


def test_c08_ratio_one_closes_a_state_at_every_position(device: torch.device) -> None:
    assert one_request(131, 1, [5, 8, 6], 64, 1, device) == [6 * 64 + 2]
    assert one_request(4, 4, [5], 4, 1, device) == [20, 21, 22, 23]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_c08_replayed_tokens_write_nothing(dtype: torch.dtype, device: torch.device) -> None:
    own = ints([40, -1, 41, -1, 42, 0, 99, 99], device, dtype)  # longer than the step
    slots = one_request(6, 6, [5], 4, 1, device, slot_mapping=own[:6])
    assert slots == [20, -1, 22, -1, -1, -1]  # positions 4 and 5 need a second page
    assert one_request(6, 6, [5, 3], 4, 1, device, slot_mapping=own) == [20, -1, 22, -1, 12, 13]


@pytest.mark.parametrize("ratio", [1, 2, 3, 128])
@pytest.mark.parametrize("states_per_page", [1, 2, 7, 64])
def test_c01_beyond_the_table(states_per_page: int, ratio: int, device: torch.device) -> None:
    """Positions past the two columns of the table give -1, not the poison beyond it."""
    length = 3 * states_per_page * ratio + 1
    slots = one_request(length, length, [1, 2], states_per_page, ratio, device)
    valid = [slot for slot in slots if slot != -1]
    assert valid == list(range(states_per_page, 3 * states_per_page))
    assert slots == oracles.compressed_slot_mapping(
        [0, length], [length], [[1, 2]], length, states_per_page, ratio
    )


def test_c01_negative_page_and_missing_rows(device: torch.device) -> None:
    """A page below 0, a request past the table's rows and a table without columns give -1."""
    batch = ints([0, 4, 6, 8], device), ints([4, 2, 2], device)
    slots = dsv41ops.compressed_slot_mapping(*batch, windowed([[-1, 3], [2, -5]], device), 8, 2, 1)
    assert slots.tolist() == [-1, -1, 6, 7, 4, 5, -1, -1]
    for shape in ((3, 0), (0, 2), (0, 0)):
        table = torch.empty(shape, dtype=torch.int32, device=device)
        assert dsv41ops.compressed_slot_mapping(*batch, table, 8, 2, 1).tolist() == [-1] * 8


def test_a_large_page_number_keeps_all_its_bits(device: torch.device) -> None:
    page = 2**31 - 1
    assert one_request(64, 1, [page], 64, 1, device) == [page * 64 + 63]


@pytest.mark.parametrize("interleave", [1, 2, 4])
@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("ratio", [1, 2])
def test_c18_each_state_has_one_owner(
    ratio: int, world: int, interleave: int, device: torch.device
) -> None:
    query_start_loc, seq_lens = [0, 61, 61, 65, 66], [61, 9, 40, 77]
    table = [[10 * row + column for column in range(10)] for row in range(4)]
    arguments = (ints(query_start_loc, device), ints(seq_lens, device), windowed(table, device))
    shards = Shard(world, 0, interleave).ranks()
    by_rank = [
        dsv41ops.compressed_slot_mapping(*arguments, 70, 8, ratio, **shard.kwargs()).tolist()
        for shard in shards
    ]
    for shard, slots in zip(shards, by_rank, strict=True):
        assert slots == oracles.compressed_slot_mapping(
            query_start_loc, seq_lens, table, 70, 8, ratio, shard=shard
        )
    for token, place in enumerate(oracles.positions(query_start_loc, seq_lens, 70)):
        owners = [rank for rank, slots in enumerate(by_rank) if slots[token] != -1]
        closes = place is not None and (place[1] + 1) % ratio == 0
        assert len(owners) == closes


def test_c18_page_must_hold_whole_stripes(device: torch.device) -> None:
    batch = ints([0, 1], device), ints([1], device)
    table = ints([[0]], device)
    topk = ints([[0]], device)
    with pytest.raises(ValueError, match="states_per_page"):
        dsv41ops.compressed_slot_mapping(*batch, table, 1, 4, 1, None, 2, 0, 3)
    with pytest.raises(ValueError, match="states_per_page"):
        dsv41ops.topk_to_slots(topk, *batch, table, 4, 1, 2, 0, 3)


@pytest.mark.parametrize("interleave", [1, 3, 64])
def test_one_rank_ignores_the_interleave(interleave: int, device: torch.device) -> None:
    batch = ints([0, 20], device), ints([20], device)
    table = ints([[2, 5, 1, 7, 3]], device)
    plain = dsv41ops.compressed_slot_mapping(*batch, table, 20, 4, 1)
    assert dsv41ops.compressed_slot_mapping(
        *batch, table, 20, 4, 1, cp_interleave=interleave
    ).equal(plain)
    topk = ints([list(range(20))] * 20, device)
    expected = dsv41ops.topk_to_slots(topk, *batch, table, 4, 1)
    found = dsv41ops.topk_to_slots(topk, *batch, table, 4, 1, cp_interleave=interleave)
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
    seq_lens = ints([0, 1, 20, 129], device)
    local = dsv41ops.dcp_local_seq_lens(seq_lens, 1, 1, 0, interleave)
    assert local.tolist() == seq_lens.tolist()


@pytest.mark.parametrize(
    ("world", "rank", "interleave", "argument"),
    [
        (0, 0, 1, "dcp_world_size"),
        (2, 2, 1, "dcp_rank"),
        (2, -1, 1, "dcp_rank"),
        (1, 1, 1, "dcp_rank"),
        (2, 0, 0, "cp_interleave"),
        (2, 0, -4, "cp_interleave"),
    ],
)
def test_impossible_ranks_are_refused_by_every_op(
    world: int, rank: int, interleave: int, argument: str, device: torch.device
) -> None:
    batch = ints([0, 1], device), ints([1], device)
    table, topk = ints([[0]], device), ints([[0]], device)
    dcp = {"dcp_world_size": world, "dcp_rank": rank, "cp_interleave": interleave}
    with pytest.raises(ValueError, match=argument):
        dsv41ops.compressed_slot_mapping(*batch, table, 1, 4, 1, **dcp)
    with pytest.raises(ValueError, match=argument):
        dsv41ops.topk_to_slots(topk, *batch, table, 4, 1, **dcp)
    with pytest.raises(ValueError, match=argument):
        dsv41ops.dcp_local_seq_lens(batch[1], 1, **dcp)


@pytest.mark.parametrize("ratio", [0, -2])
def test_ratio_below_one_is_refused_by_every_op(ratio: int, device: torch.device) -> None:
    batch = ints([0, 1], device), ints([1], device)
    table, topk = ints([[0]], device), ints([[0]], device)
    for call in (
        lambda: dsv41ops.compressed_slot_mapping(*batch, table, 1, 4, ratio),
        lambda: dsv41ops.topk_to_slots(topk, *batch, table, 4, ratio),
        lambda: dsv41ops.dcp_local_seq_lens(batch[1], ratio, 1, 0),
    ):
        with pytest.raises(ValueError, match="compress_ratio"):
            call()
