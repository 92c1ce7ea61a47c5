"""Top-k state numbers -> slots: bounds (C01), holes (C03), visibility, DCP ownership (C18)."""

from __future__ import annotations

import pytest
import torch

import dsv41ops
from tests import oracles
from tests.oracles import Shard
from tests.support import ints

FAR = 2**31 - 1
DTYPES = [torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_c01_rows_and_columns_of_the_table(dtype: torch.dtype, device: torch.device) -> None:
    storage = torch.full((3, 4), 9, dtype=torch.int32, device=device)
    storage[:2, :2] = ints([[5, 7], [2, 3]], device)
    ids = ints([[6, 9, -1, 1], [0, 5, -1, FAR], [0, 1, 2, 3]], device, dtype)
    slots, lens = dsv41ops.topk_to_slots(
        ids, ints([0, 1, 2, 3], device), ints([FAR] * 3, device), storage[:2, :2], 4, 1
    )
    assert slots.dtype == lens.dtype == torch.int32
    assert slots.tolist() == [[30, 21, -1, -1], [8, 13, -1, -1], [-1, -1, -1, -1]]
    assert lens.tolist() == [2, 2, 0]
    assert bool((storage[:, 2:] == 9).all())
    assert bool((storage[2] == 9).all())


def test_c01_ids_beyond_32_bits(device: torch.device) -> None:
    """An id that is small only after truncation, or whose column is, stays invalid."""
    ids = ints([[2**32, 2**32 + 1, 1, -(2**32) + 2, 2**62]], device, torch.int64)
    slots, lens = dsv41ops.topk_to_slots(
        ids, ints([0, 1], device), ints([FAR], device), ints([[5, 7]], device), 4, 1
    )
    assert slots.tolist() == [[21, -1, -1, -1, -1]]
    assert lens.tolist() == [1]


def test_c01_negative_pages(device: torch.device) -> None:
    slots, lens = dsv41ops.topk_to_slots(
        ints([[0, 4, 8, 5]], device), ints([0, 1], device), ints([FAR], device),
        ints([[3, -1, 2]], device), 4, 1,
    )  # fmt: skip
    assert slots.tolist() == [[12, 8, -1, -1]]
    assert lens.tolist() == [2]


def test_a_slot_that_int32_cannot_hold_is_left_out(device: torch.device) -> None:
    """Not wrapped around: page 2^30 of 4 states would be slot 0, page 2^29 a negative one."""
    slots, lens = dsv41ops.topk_to_slots(
        ints([[0, 4, 8, 12, 5]], device), ints([0, 1], device), ints([FAR], device),
        ints([[2**30, 3, 2**29, 2**29 - 1]], device), 4, 1,
    )  # fmt: skip
    assert slots.tolist() == [[12, 2**31 - 4, 13, -1, -1]]
    assert lens.tolist() == [3]


def test_c03_holes_are_skipped_and_entry_0_is_kept_once(device: torch.device) -> None:
    slots, lens = dsv41ops.topk_to_slots(
        ints([[0, -1, -1, 2]], device), ints([0, 1], device), ints([4], device),
        ints([[3]], device), 4, 1,
    )  # fmt: skip
    assert slots.tolist() == [[12, 14, -1, -1]]
    assert lens.tolist() == [2]


@pytest.mark.parametrize("ratio", [1, 2, 3, 128])
def test_only_states_that_the_token_may_see(ratio: int, device: torch.device) -> None:
    """(p + 1) // ratio states, though the table has pages for more."""
    queries, seq_len, width = 5, 3 * ratio + 1, 9
    topk = [list(range(width))] * queries
    table = [[7, 3, 5]]
    arguments = [0, queries], [seq_len], table, 4, ratio
    slots, lens = dsv41ops.topk_to_slots(
        ints(topk, device), *(ints(a, device) for a in arguments[:3]), *arguments[3:]
    )
    expected = oracles.topk_to_slots(topk, *arguments)
    assert (slots.tolist(), lens.tolist()) == expected
    first = seq_len - queries
    assert lens.tolist() == [max(p + 1, 0) // ratio for p in range(first, seq_len)]


def test_order_and_repeats_are_kept(device: torch.device) -> None:
    topk = [[5, 5, -1, 0, 7, 0, -3, 2]]
    slots, lens = dsv41ops.topk_to_slots(
        ints(topk, device), ints([0, 1], device), ints([8], device), ints([[1, 0]], device), 4, 1
    )
    assert slots.tolist() == [[1, 1, 4, 3, 4, 6, -1, -1]]
    assert lens.tolist() == [6]


@pytest.mark.parametrize(
    ("interleave", "expected"), [(1, [[20, 22, 35], [21, 32]]), (4, [[20, 23, 33], [20, 34]])]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_c18_only_owned_ids_and_as_local_slots(
    interleave: int, expected: list[list[int]], dtype: torch.dtype, device: torch.device
) -> None:
    """The list stands for sets in the case; here packed in the ids' own order."""
    ids = [0, 3, 4, 9, 14]
    for shard in Shard(2, 0, interleave).ranks():
        slots, lens = dsv41ops.topk_to_slots(
            ints([ids], device, dtype), ints([0, 1], device), ints([100], device),
            ints([[5, 8]], device), 4, 1, **shard.kwargs(),
        )  # fmt: skip
        mine = [slot for slot in slots[0].tolist() if slot != -1]
        assert sorted(mine) == sorted(expected[shard.rank])
        assert lens.tolist() == [len(expected[shard.rank])]
        assert (slots.tolist(), lens.tolist()) == oracles.topk_to_slots(
            [ids], [0, 1], [100], [[5, 8]], 4, 1, shard
        )


@pytest.mark.parametrize("num_tokens", [0, 1, 37])
@pytest.mark.parametrize("width", [0, 1, 65])
def test_shapes(num_tokens: int, width: int, device: torch.device) -> None:
    topk = torch.randint(-1, 40, (num_tokens, width), dtype=torch.int32, device=device)
    table = [[2, 0, 1]]
    slots, lens = dsv41ops.topk_to_slots(
        topk, ints([0, num_tokens], device), ints([num_tokens], device), ints(table, device), 16, 1
    )
    expected = oracles.topk_to_slots(topk.tolist(), [0, num_tokens], [num_tokens], table, 16, 1)
    assert slots.shape == (num_tokens, width)
    assert (slots.tolist(), lens.tolist()) == expected
