"""The kernel against the reference: every byte of the pool."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv41ops.kernels.triton.rope_kv_cache_insert import launch_rope_kv_cache_insert
from dsv41ops.reference.kv_cache import rope_kv_cache_insert
from tests.contract.inputs import rope_table
from tests.kernels.interpreted.batches import CPU, FAR
from tests.support import HEAD_DIM, RECORDS, empty_cache, ints

DTYPES = [torch.bfloat16, torch.float32]


def check(
    kv: Tensor,
    positions: Tensor,
    slots: Tensor,
    record: str,
    *,
    table: Tensor | None = None,
    ratio: int = 1,
    pages: int = 4,
    pad: int = 0,
) -> None:
    """The same insert by both, into two pools of guard bytes."""
    table = rope_table(40, CPU) if table is None else table
    pools = []
    for insert in (launch_rope_kv_cache_insert, rope_kv_cache_insert):
        cache, pool = empty_cache(record, pages, 5, CPU, pad=pad)
        insert(kv, positions, table, slots, cache, ratio)
        pools.append(pool)
    assert torch.equal(*pools)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("record", RECORDS)
def test_random_rows(record: str, dtype: torch.dtype) -> None:
    """Of every size, and with both zeros: signs and roundings are the reference's."""
    rows = torch.randn(12, HEAD_DIM) * torch.logspace(-38, 38, 12)[:, None]
    check(rows.to(dtype), torch.arange(12), torch.arange(12), record)
    spread = torch.randn(20, HEAD_DIM) * torch.exp2(torch.randint(-12, 12, (20, HEAD_DIM)))
    spread[:, ::7], spread[:, 1::9] = 0.0, -0.0
    check(spread.to(dtype), torch.arange(20), torch.arange(20), record, ratio=2)
    turns = torch.randint(-1, 2, (40, 64)).float()
    check(spread.to(dtype), torch.arange(20), torch.arange(20), record, table=turns)


@pytest.mark.parametrize("record", RECORDS)
def test_f32_ties(record: str) -> None:
    """Half-way points of two bf16 numbers and their f32 neighbours."""
    bits = torch.randint(0x3F00, 0x4100, (18, HEAD_DIM), dtype=torch.int32) << 16
    middle = bits + 0x8000 + torch.arange(-1, 2, dtype=torch.int32).repeat(6)[:, None]
    rows = middle.view(torch.float32) * torch.randint(0, 2, (18, HEAD_DIM)).mul(2).sub(1)
    turns = torch.cat([torch.ones(20, 32), torch.zeros(20, 32)], 1)
    check(rows, torch.arange(18), torch.arange(18), record, table=turns)
    check(rows, torch.arange(18), torch.arange(18), record)


@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("record", RECORDS)
def test_non_finite_values(record: str, dtype: torch.dtype, poison: float) -> None:
    rows = torch.randn(5, HEAD_DIM)
    for row, column in enumerate((0, 300, 447, 448, 511)):
        rows[row, column] = poison
    check(rows.to(dtype), torch.arange(5), torch.arange(5), record)
    table = rope_table(5, CPU)
    table[2, 3] = table[4, 40] = poison
    check(rows.to(dtype), torch.arange(5), torch.arange(5), record, table=table)


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("record", RECORDS)
def test_only_the_named_rows(record: str, dtype: torch.dtype, ratio: int) -> None:
    """Slots and positions outside, the last group of the table; strided rows at odd addresses."""
    slots = [11, -7, 0, 3, 12, FAR, 5, 6, 7, 8, 9, 10]
    positions = [0, 1, -1, -2, 39, 3, 40, 41, 37, 38, FAR, -(2**31)]
    if dtype == torch.int64:
        slots += [2**32, 2**32 + 5, 1, 2, 4]
        positions += [3, 4, 2**32, -(2**32), 2**62]
    numbers = (ints(positions, CPU, dtype), ints(slots, CPU, dtype))
    kv = torch.randn(len(slots), 2 * HEAD_DIM + 1)
    for pad, values in ((6, kv.bfloat16()), (16, kv)):
        check(values[:, 1 : HEAD_DIM + 1], *numbers, record, ratio=ratio, pad=pad)
        check(values[:, :HEAD_DIM], *numbers, record, table=rope_table(38, CPU), ratio=ratio)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("record", RECORDS)
def test_nothing_to_do(record: str, dtype: torch.dtype) -> None:
    kv, numbers = torch.ones(2, HEAD_DIM, dtype=dtype), ints([0, 1], CPU)
    check(kv[:0], numbers[:0], numbers[:0], record)
    check(kv, numbers, numbers, record, pages=0)
    check(kv, numbers, numbers, record, table=rope_table(3, CPU)[:0])
