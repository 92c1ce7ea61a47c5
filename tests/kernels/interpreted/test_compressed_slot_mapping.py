"""The kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from dsv41ops.kernels.triton.compressed_slot_mapping import launch_compressed_slot_mapping
from dsv41ops.reference.index import compressed_slot_mapping
from tests.kernels.interpreted.batches import BATCHES, CPU, FAR, Batch, assert_padded, guarded
from tests.oracles import Shard
from tests.reference.test_large_strides import far_apart
from tests.support import assert_same_bits, ints

SHARDS = [Shard(), Shard(1, 0, 4), Shard(2, 1, 4), Shard(3, 0, 1), Shard(2**31, 5, 8)]


@pytest.mark.parametrize("ratio", [1, 3])
@pytest.mark.parametrize("batch", BATCHES)
def test_slots(batch: Batch, ratio: int) -> None:
    for shard in SHARDS:
        dtype = torch.int32 if shard.world == 2 else torch.int64
        for own in (None, torch.randint(-2, 9, (batch.num_tokens + 2,), dtype=dtype)):
            arguments = (
                *batch.geometry(), batch.table(), batch.num_tokens, 8, ratio, own,
                shard.world, shard.rank, shard.interleave,
            )  # fmt: skip
            expected = compressed_slot_mapping(*arguments)
            assert_same_bits(launch_compressed_slot_mapping(*arguments), expected)


@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize("columns", [0, 1, 3])
def test_smaller_tables(rows: int, columns: int) -> None:
    batch = Batch((0, 9, 20, 30), (9, 30, 25), 33)
    arguments = (*batch.geometry(), batch.table(columns, rows), 33, 4, 1, None, 1, 0, 1)
    assert_same_bits(
        launch_compressed_slot_mapping(*arguments), compressed_slot_mapping(*arguments)
    )


@pytest.mark.parametrize("states_per_page", [1, 5, 2**31 - 1, 2**31, 2**40])
def test_page_sizes_and_slots_past_int32(states_per_page: int) -> None:
    table = ints([[2**20, 3, 0], [1, 0, 2**22], [7, 8, 9]], CPU)
    starts, seq_lens = ints([0, 3, 6, 9], CPU), ints([3, FAR, -(2**31)], CPU)
    arguments = (starts, seq_lens, table, 9, states_per_page, 1, None, 1, 0, 1)
    assert_same_bits(
        launch_compressed_slot_mapping(*arguments), compressed_slot_mapping(*arguments)
    )


@pytest.mark.parametrize("extra", [0, 1, 140])
def test_out(extra: int) -> None:
    batch = Batch((0, 9, 50), (9, 30), 20)  # tokens past num_tokens are padding, though owned
    arguments = (*batch.geometry(), batch.table(), 20, 4, 1, None, 1, 0, 1)
    out = guarded(20 + extra, dtype=torch.int64)
    launch_compressed_slot_mapping(*arguments, out=out)
    assert_padded(out, compressed_slot_mapping(*arguments), -1)


def test_far_table_rows() -> None:
    table = torch.randint(50, (3, 3), dtype=torch.int32)
    batch = ints([0, 1, 2, 3], CPU), ints([40, 33, 8], CPU)
    far = far_apart(table, 2**30 + 4)
    assert_same_bits(
        launch_compressed_slot_mapping(*batch, far, 3, 16, 1, None, 1, 0, 1),
        compressed_slot_mapping(*batch, table, 3, 16, 1, None, 1, 0, 1),
    )
