"""The kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from dsv41ops.kernels.triton.sliding_window_indices import launch_sliding_window_indices
from dsv41ops.reference.index import sliding_window_indices
from tests.kernels.interpreted.batches import BATCHES, CPU, FAR, Batch, assert_padded, guarded
from tests.reference.test_large_strides import far_apart
from tests.support import assert_same_bits, ints


def check(*arguments: object) -> None:
    expected = sliding_window_indices(*arguments)  # type: ignore[arg-type]
    for mine, reference in zip(
        launch_sliding_window_indices(*arguments),  # type: ignore[arg-type]
        expected,
        strict=True,
    ):
        assert_same_bits(mine, reference)


@pytest.mark.parametrize(
    ("window", "width", "causal"),
    [(20, None, True), (1, None, True), (20, 33, True), (20, 64, False), (20, 3, False)],
)
@pytest.mark.parametrize("batch", BATCHES)
def test_windows(batch: Batch, window: int, width: int | None, causal: bool) -> None:
    starts, seq_lens = batch.geometry()
    # With causal=False it has no effect.
    replay_start = torch.randint(-3, 40, seq_lens.shape, dtype=torch.int32)
    check(
        starts, seq_lens, batch.table(), batch.num_tokens, 6,
        window, width, causal, None if width == 33 else replay_start,
    )  # fmt: skip


@pytest.mark.parametrize("width", [128, 129, 192, 513, 1025, 2100])
def test_every_block_of_columns(width: int) -> None:
    """Holes in every block, so that later blocks are packed behind earlier ones."""
    batch = Batch((0, 2, 3), (width + 40, width // 2), 4)
    check(*batch.geometry(), batch.table(width), 4, 3, width, None, True, None)


@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize("columns", [0, 1, 3])
def test_smaller_tables(rows: int, columns: int) -> None:
    batch = Batch((0, 2, 3, 5), (9, 30, 25), 6)
    check(*batch.geometry(), batch.table(columns, rows), 6, 4, 16, None, True, None)


@pytest.mark.parametrize("page_size", [1, 2**29, 2**30, 2**31 - 1, 2**31, 2**40])
@pytest.mark.parametrize("window", [5, 2**40])
def test_slots_past_int32_are_left_out(page_size: int, window: int) -> None:
    table = ints([[1, 3, 0], [0, 2**22, 2]], CPU)
    starts, seq_lens = ints([0, 3, 6], CPU), ints([5, FAR], CPU)
    check(starts, seq_lens, table, 6, page_size, window, 5, False, None)
    check(starts, seq_lens, table, 6, page_size, 5, None, True, None)


@pytest.mark.parametrize("extra", [0, 1, 5])
def test_out(extra: int) -> None:
    batch = Batch((0, 4, 50), (9, 90), 7)  # tokens past num_tokens are padding, though owned
    arguments = (*batch.geometry(), batch.table(), 7, 4, 20, 24, True, None)
    out, lens = guarded(7 + extra, 24), guarded(7 + extra)
    launch_sliding_window_indices(*arguments, out=out, lens=lens)
    slots, counts = sliding_window_indices(*arguments)
    assert_padded(out, slots, -1)
    assert_padded(lens, counts, 0)


def test_far_rows() -> None:
    batch = Batch((0, 1, 2, 3), (40, 33, 8), 3)
    table = batch.table()
    arguments = (3, 6, 20, None, True, None)
    expected, _ = sliding_window_indices(*batch.geometry(), table, *arguments)
    far_table = far_apart(table.contiguous(), 2**30 + 4)
    out = far_apart(torch.full((3, 20), 7, dtype=torch.int32), 2**30 + 4)
    launch_sliding_window_indices(
        *batch.geometry(), far_table, *arguments, out=out, lens=guarded(3)
    )
    assert_same_bits(out, expected)
