"""The kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from dsv41ops.kernels.triton.topk_to_slots import launch_topk_to_slots
from dsv41ops.reference.index import topk_to_slots
from tests.kernels.interpreted.batches import BATCHES, CPU, FAR, Batch, assert_padded, guarded
from tests.oracles import Shard
from tests.reference.test_large_strides import far_apart
from tests.support import assert_same_bits, ints

CONFIGS = [(Shard(), 1), (Shard(1, 0, 4), 2), (Shard(2, 1, 4), 2), (Shard(3, 0, 1), 1)]


def check(*arguments: object) -> None:
    expected = topk_to_slots(*arguments)  # type: ignore[arg-type]
    for mine, reference in zip(launch_topk_to_slots(*arguments), expected, strict=True):  # type: ignore[arg-type]
        assert_same_bits(mine, reference)


@pytest.mark.parametrize(("shard", "ratio"), CONFIGS)
@pytest.mark.parametrize("batch", BATCHES)
def test_slots(batch: Batch, shard: Shard, ratio: int) -> None:
    dtype = torch.int32 if ratio == 1 else torch.int64
    topk = torch.randint(-2, 60, (batch.num_tokens, 45), dtype=dtype)[:, 2:]
    check(
        topk, *batch.geometry(), batch.table(), 8, ratio,
        shard.world, shard.rank, shard.interleave,
    )  # fmt: skip


@pytest.mark.parametrize("interleave", [1, 8, 2**22])
@pytest.mark.parametrize("world", [2, 2**31 - 1, 2**31, 2**40])
def test_huge_shards(world: int, interleave: int) -> None:
    """32-bit numbers in the kernel, wherever these do not need more."""
    topk, table = ints([[0, 7, 8, 40, 47, FAR - 1]], CPU), torch.arange(20, dtype=torch.int32)[None]
    for rank in (0, 1, world // 3, world - 1):
        check(topk, ints([0, 1], CPU), ints([FAR], CPU), table, 4, 1, world, rank, interleave)


@pytest.mark.parametrize("width", [0, 1, 128, 129, 512, 513, 1152, 2048, 2500])
def test_any_width(width: int) -> None:
    """Holes in every block of columns, so that later ones are packed behind earlier ones."""
    batch = Batch((0, 2, 3), (900, 400), 4)
    topk = torch.randint(-200, 1000, (4, width), dtype=torch.int32)
    check(topk, *batch.geometry(), batch.table(120), 8, 1, 1, 0, 1)
    check(topk.abs() % 900, *batch.geometry(), batch.table(120).abs(), 8, 1, 1, 0, 1)


@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize("columns", [0, 1, 3])
def test_smaller_tables(rows: int, columns: int) -> None:
    batch = Batch((0, 2, 3, 5), (9, 30, 25), 6)
    topk = torch.randint(-1, 30, (6, 20), dtype=torch.int32)
    check(topk, *batch.geometry(), batch.table(columns, rows), 4, 1, 1, 0, 1)


def test_ids_beyond_32_bits() -> None:
    batch = ints([0, 1], CPU), ints([FAR], CPU)
    ids = ints([[2**32, 2**32 + 1, 1, -(2**32) + 2, 2**62, -(2**63), FAR - 1]], CPU, torch.int64)
    check(ids, *batch, ints([[5, 7]], CPU), 4, 1, 1, 0, 1)
    check(ids.to(torch.int32), *batch, ints([[5, 7]], CPU), 4, 1, 1, 0, 1)


@pytest.mark.parametrize("states_per_page", [1, 4, 2**31 - 1, 2**31, 2**40])
def test_slots_past_int32_are_left_out(states_per_page: int) -> None:
    table = ints([[2**30, 3, 2**29, 2**29 - 1, 0, 1]], CPU)
    topk = ints([[0, 4, 8, 12, 5, 1, 2, 3, FAR - 1, 16, 20]], CPU)
    check(topk, ints([0, 1], CPU), ints([FAR], CPU), table, states_per_page, 1, 1, 0, 1)


@pytest.mark.parametrize("extra", [0, 1, 5])
def test_out(extra: int) -> None:
    batch = Batch((0, 4, 50), (9, 90), 7)  # rows past the tokens are padding, though owned
    topk = torch.randint(-1, 60, (7, 31), dtype=torch.int32)
    arguments = (topk, *batch.geometry(), batch.table(), 4, 1, 1, 0, 1)
    out, lens = guarded(7 + extra, 31), guarded(7 + extra)
    launch_topk_to_slots(*arguments, out=out, lens=lens)
    slots, counts = topk_to_slots(*arguments)
    assert_padded(out, slots, -1)
    assert_padded(lens, counts, 0)


def test_far_rows() -> None:
    batch = Batch((0, 1, 2, 3), (40, 33, 8), 3)
    table, topk = batch.table(), torch.randint(-1, 32, (3, 9), dtype=torch.int32)
    expected, _ = topk_to_slots(topk, *batch.geometry(), table, 6, 1, 1, 0, 1)
    far_table, far_topk = (far_apart(t.contiguous(), 2**30 + 4) for t in (table, topk))
    out = far_apart(torch.full((3, 9), 7, dtype=torch.int32), 2**30 + 4)
    launch_topk_to_slots(
        far_topk, *batch.geometry(), far_table, 6, 1, 1, 0, 1, out=out, lens=guarded(3)
    )
    assert_same_bits(out, expected)
