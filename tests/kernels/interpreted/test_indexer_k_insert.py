"""The kernel against the reference: every byte of the pool."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41ops.kernels.triton.indexer_k_insert import launch_indexer_k_insert
from dsv41ops.reference.index_keys import indexer_k_insert
from tests.kernels.interpreted.batches import CPU, FAR
from tests.reference.test_indexer_k_insert import (
    DTYPES,
    GROUP,
    LARGEST,
    WIDTH,
    guarded_cache,
    rope_table,
)
from tests.reference.test_large_strides import far_apart, untouched
from tests.support import E2M1, E4M3, assert_same_bits, ints

STILL = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], 1)


def check(
    k: Tensor,
    dtype: str,
    *,
    weight: Tensor | None = None,
    positions: Tensor | None = None,
    table: Tensor | None = None,
    slots: Tensor | None = None,
    pages: int | None = None,
    page_size: int = 3,
    pad: int = 0,
    ratio: int = 1,
    eps: float = 1e-20,
) -> None:
    """The same insert by both, into two pools of guard bytes."""
    count = len(k)
    weight = torch.randn(WIDTH) if weight is None else weight
    positions = torch.arange(count) if positions is None else positions
    table = rope_table(count, CPU) if table is None else table
    slots = torch.randperm(count) if slots is None else slots
    pages = -(-count // page_size) if pages is None else pages
    pools = []
    for insert in (launch_indexer_k_insert, indexer_k_insert):
        cache, pool = guarded_cache(dtype, pages, page_size, CPU, pad)
        insert(k, weight, positions, table, slots, cache, ratio, eps)
        pools.append(pool)
    assert torch.equal(*pools)


def check_keys(keys: Tensor, dtype: str) -> None:
    """Keys as they are: of a row of ones the norm and a rotation by 0 leave the weight."""
    one, number = torch.ones(1, WIDTH), torch.zeros(1, dtype=torch.int64)
    for key in keys.float():
        check(one, dtype, weight=key, positions=number, table=STILL, slots=number, page_size=1)


@pytest.mark.parametrize("k_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_keys(dtype: str, k_dtype: torch.dtype) -> None:
    k = torch.randn(20, WIDTH) * torch.logspace(-18, 18, 20)[:, None]
    spread = torch.randn(20, WIDTH) * torch.exp2(torch.randint(-12, 12, (20, WIDTH)))
    for rows in (k, spread):
        check(rows.to(k_dtype), dtype, weight=torch.randn(WIDTH))
        check(rows.to(k_dtype), dtype, weight=torch.randn(WIDTH).bfloat16(), ratio=3, eps=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_and_scale_boundaries(dtype: str) -> None:
    codes = (E4M3[:127] if dtype == "fp8" else E2M1[:8]).float()
    middle = (codes[1:] + codes[:-1]) / 2
    keys = torch.zeros(6, WIDTH)
    keys[:, :: GROUP[dtype]] = LARGEST[dtype]
    free = [c for c in range(WIDTH) if c % GROUP[dtype]][: len(middle)]
    for row, to in enumerate((0, 1, 2)):
        near = middle.nextafter(middle * to) if to != 1 else middle
        keys[row, free], keys[row + 3, free] = near[: len(free)], -near[: len(free)]
    check_keys(keys, dtype)
    largest = torch.tensor(LARGEST[dtype])
    amax = torch.stack([largest, largest.nextafter(largest * 2), largest.nextafter(largest * 0)])
    exponents = torch.tensor([-23, -22, -19, -16, -8, 0, 30, 119])
    keys = (torch.exp2(exponents)[:, None] * amax).view(-1, 1) * torch.linspace(-1, 1, WIDTH)
    check_keys(keys, dtype)
    special = torch.tensor([0.0, -0.0, 1e-45, 1e-30, 1e-4, 3.4e38])
    check_keys(special[:, None].repeat(1, WIDTH), dtype)


@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_values(dtype: str, poison: float) -> None:
    """In the key, where they poison their group, and in ``k``, where the norm sees them first."""
    keys = torch.randn(4, WIDTH)
    for row, column in enumerate((0, 40, 70, 127)):
        keys[row, column] = poison
    check_keys(keys, dtype)
    check(keys, dtype)
    check(keys * 1e30, dtype)  # squares past f32


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pad", [0, 1, 6, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_named_rows(dtype: str, pad: int, slot_dtype: torch.dtype) -> None:
    slots = [11, -7, 0, 3, 12, FAR, -(2**31), -1]
    if slot_dtype == torch.int64:
        slots += [2**32, 2**32 + 5, -(2**32), 2**62]
    k = torch.randn(len(slots), 2 * WIDTH + 1)[:, 1 : WIDTH + 1]
    check(k, dtype, slots=ints(slots, CPU, slot_dtype), pages=4, pad=pad)


@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ratio", [1, 2, 2**40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_positions(dtype: str, ratio: int, position_dtype: torch.dtype) -> None:
    positions = [-1, 3, 4, 5, 6, 0, -(2**31), FAR]
    if position_dtype == torch.int64:
        positions += [2**32, -(2**40), 2**62]
    storage = torch.cat([rope_table(5, CPU), torch.full((5, 7), math.nan)], 1)
    arguments: dict[str, Any] = {
        "positions": ints(positions, CPU, position_dtype),
        "ratio": ratio,
        "page_size": 4,
    }
    for table in (storage[:, :64], storage[:0, :64]):
        check(torch.randn(len(positions), WIDTH), dtype, table=table, **arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_do(dtype: str) -> None:
    check(torch.empty(0, WIDTH), dtype, pages=2)
    check(torch.ones(2, WIDTH), dtype, pages=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_far_pages_and_rows(dtype: str) -> None:
    k, table, numbers = torch.randn(3, WIDTH), rope_table(3, CPU), torch.arange(3)
    slots, weight = ints([0, 3, 5], CPU), torch.ones(WIDTH)
    near = guarded_cache(dtype, 3, 2, CPU)[0].zero_()
    launch_indexer_k_insert(k, weight, numbers, table, slots, near, 1, 1e-20)
    memory = untouched(2 * (2**30 + 1152) + near[0].numel(), CPU)
    far = memory.as_strided(near.shape, (2**30 + 1152, near.shape[2], 1))
    rows = far_apart(k, 2**30 + 4), weight, numbers, far_apart(table, 2**30 + 4)
    launch_indexer_k_insert(*rows, slots, far, 1, 1e-20)
    assert_same_bits(far, near)
