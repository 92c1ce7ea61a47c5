"""Sliding-window indices: windows, draft blocks, replay, width and table bounds (C10, C01)."""

from __future__ import annotations

import pytest
import torch

import dsv41ops
from tests import oracles
from tests.support import ints


def check_against_loop(
    query_start_loc: list[int],
    seq_lens: list[int],
    table: list[list[int]],
    num_tokens: int,
    page_size: int,
    device: torch.device,
    **kwargs: object,
) -> None:
    tensors = dict(kwargs)
    if kwargs.get("replay_start") is not None:
        tensors["replay_start"] = ints(kwargs["replay_start"], device)
    rows, lens = dsv41ops.sliding_window_indices(
        ints(query_start_loc, device),
        ints(seq_lens, device),
        ints(table, device),
        num_tokens,
        page_size,
        **tensors,
    )
    expected_rows, expected_lens = oracles.sliding_window_indices(
        query_start_loc, seq_lens, table, num_tokens, page_size, **kwargs
    )
    assert rows.dtype == lens.dtype == torch.int32
    assert rows.tolist() == expected_rows
    assert lens.tolist() == expected_lens


@pytest.mark.parametrize("width", [None, 128, 192])
def test_c10_window_of_each_draft_token(width: int | None, device: torch.device) -> None:
    """Three queries at positions 127, 128, 129; the padding token sees nothing."""
    rows, lens = dsv41ops.sliding_window_indices(
        ints([0, 3], device), ints([130], device), ints([[11, 2, 5]], device), 4, 64, width=width
    )
    pages = [11, 2, 5]
    slots = [pages[position // 64] * 64 + position % 64 for position in range(130)]
    columns = 128 if width is None else width
    tail = [-1] * (columns - 128)
    assert rows.tolist() == [
        slots[:128] + tail,
        slots[1:129] + tail,
        slots[2:130] + tail,
        [-1] * columns,
    ]
    assert (rows[2, 0].item(), rows[2, 127].item()) == (706, 321)
    assert lens.tolist() == [128, 128, 128, 0]


def test_c10_shorter_than_the_window(device: torch.device) -> None:
    rows, lens = dsv41ops.sliding_window_indices(
        ints([0, 1], device), ints([2], device), ints([[11, 2, 5]], device), 1, 64
    )
    assert rows.tolist() == [[704, 705] + [-1] * 126]
    assert lens.tolist() == [2]


@pytest.mark.parametrize("window", [1, 2, 31, 128])
@pytest.mark.parametrize("page_size", [1, 32, 48])
def test_c10_every_window_against_the_loop(
    page_size: int, window: int, device: torch.device
) -> None:
    seq_lens = [5, 140, 33, 1, 0]
    pages = -(-140 // page_size)
    table = [[100 * row + column for column in range(pages)] for row in range(5)]
    check_against_loop(
        [0, 5, 12, 13, 14, 14], seq_lens, table, 16, page_size, device, window=window
    )
    check_against_loop(
        [0, 5, 12, 13, 14, 14], seq_lens, table, 16, page_size, device, window=window, width=131
    )


def test_replay_start_cuts_the_old_end(device: torch.device) -> None:
    """Negative, inside, at the token itself and past it (nothing left to see)."""
    check_against_loop(
        [0, 2, 4, 6, 8],
        [60, 60, 60, 60],
        [[1, 2], [3, 4], [5, 6], [7, 8]],
        9,
        32,
        device,
        window=40,
        replay_start=[-7, 30, 59, 1000],
    )


@pytest.mark.parametrize("width", [1, 7, 128, 192])
def test_draft_block_sees_itself_and_the_window_before_it(width: int, device: torch.device) -> None:
    """Every token of a request sees the same rows; too narrow a width keeps the newest."""
    table = [[10 * row + column for column in range(7)] for row in range(4)]
    check_against_loop(
        [0, 5, 6, 6, 14], [5, 200, 40, 138], table, 16, 32, device, width=width, causal=False
    )


def test_draft_block_ignores_replay_start(device: torch.device) -> None:
    arguments = ints([0, 5], device), ints([60], device), ints([[1, 2]], device), 5, 32
    plain = dsv41ops.sliding_window_indices(*arguments, width=192, causal=False)
    replayed = dsv41ops.sliding_window_indices(
        *arguments, width=192, causal=False, replay_start=ints([50], device)
    )
    assert all(a.equal(b) for a, b in zip(plain, replayed, strict=True))


@pytest.mark.parametrize("causal", [True, False])
def test_c01_holes_in_the_table_are_left_out(causal: bool, device: torch.device) -> None:
    """A page below 0, a position past the columns, a request past the rows."""
    check_against_loop(
        [0, 3, 6, 9],
        [100, 300, 20],
        [[4, -1, 6, 7], [1, 2, -9, 3]],
        10,
        32,
        device,
        width=192,
        causal=causal,
    )


def test_a_slot_that_int32_cannot_hold_is_left_out(device: torch.device) -> None:
    rows, lens = dsv41ops.sliding_window_indices(
        ints([0, 1], device), ints([6], device), ints([[2**31 - 1, 3, 2**30]], device), 1, 2
    )
    assert rows[0, :3].tolist() == [6, 7, -1]
    assert lens.tolist() == [2]


def test_c01_poison_around_the_table_is_not_read(device: torch.device) -> None:
    storage = torch.full((4, 6), 9, dtype=torch.int32, device=device)
    storage[1:3, 2:4] = ints([[5, 7], [2, 3]], device)
    batch = ints([0, 1, 2, 3], device), ints([100, 40, 5], device)
    rows, lens = dsv41ops.sliding_window_indices(*batch, storage[1:3, 2:4], 3, 4, window=12)
    # Positions 88 .. 99 and 28 .. 39 lie past the two columns; request 2 past the two rows.
    assert lens.tolist() == [0, 0, 0]
    assert rows.tolist() == [[-1] * 12] * 3
    batch = batch[0], ints([10, 8, 5], device)
    rows, _ = dsv41ops.sliding_window_indices(*batch, storage[1:3, 2:4], 3, 4, window=12)
    assert rows[0].tolist() == [20, 21, 22, 23, 28, 29, 30, 31, -1, -1, -1, -1]
    assert rows[1].tolist() == [8, 9, 10, 11, 12, 13, 14, 15, -1, -1, -1, -1]
    assert rows[2].tolist() == [-1] * 12


def test_width_must_hold_the_window(device: torch.device) -> None:
    arguments = ints([0, 1], device), ints([1], device), ints([[0]], device), 1, 32
    with pytest.raises(ValueError, match="width"):
        dsv41ops.sliding_window_indices(*arguments, window=128, width=127)
    with pytest.raises(ValueError, match="width"):
        dsv41ops.sliding_window_indices(*arguments, causal=False)
