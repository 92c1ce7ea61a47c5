"""Rotation and insert in one: exact against the two apart, and which rows are written."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import dsv41ops
from dsv41ops.reference.rope import rotate_last
from tests.contract.inputs import rope_table
from tests.support import (
    HEAD_DIM,
    RECORDS,
    assert_same_bits,
    decode_pool,
    empty_cache,
    encode_row,
    ints,
    rotated,
    row_bytes_at,
)

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.bfloat16, torch.float32]
POSITIONS = 20


def f32_turned(kv: Tensor, positions: list[int], table: Tensor) -> Tensor:
    """Every product and sum in float64, then rounded to f32; exact, as f64 holds both."""
    rows, table = kv.double().cpu(), table.double().cpu()
    for row, position in zip(rows, positions, strict=True):
        cos, sin = table[position].chunk(2)
        even, odd = row[448::2].clone(), row[449::2].clone()

        def product(a: Tensor, b: Tensor) -> Tensor:
            return (a * b).float().double()

        row[448::2] = (product(even, cos) - product(odd, sin)).float().double()
        row[449::2] = (product(even, sin) + product(odd, cos)).float().double()
    return rows.float()


def pools(record: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A cache of 3 pages of 4 guarded rows, its pool, and the pool as it was."""
    cache, pool = empty_cache(record, 3, 4, device, pad=6)
    return cache, pool, pool.clone()


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(9, HEAD_DIM), (9, 3, HEAD_DIM), (9, 128), (0, HEAD_DIM)])
def test_rotation(shape: tuple[int, ...], inverse: bool, device: torch.device) -> None:
    """Of a row, of heads, of an index key; against complex numbers in float64."""
    rows, table = torch.randn(shape, device=device), rope_table(POSITIONS, device)
    positions = ints([0, 19, -1, 20, 7, 7, -(2**31), 2**31 - 1, 1][: shape[0]], device)
    turned = rotate_last(rows, positions, table, inverse)
    expected = rotated(rows, positions, table, back=inverse)
    torch.testing.assert_close(turned.double().cpu(), expected, rtol=0, atol=1e-6)
    assert_same_bits(turned[..., :-64], rows[..., :-64])
    if shape[0]:
        assert_same_bits(turned[[2, 3, 6, 7]], rows[[2, 3, 6, 7]])
    back = rotate_last(turned, positions, table, not inverse)
    torch.testing.assert_close(back, rows, rtol=0, atol=1e-6)
    assert_same_bits(rotate_last(rows, positions, table[:0], inverse), rows)


def test_the_pairs_are_neighbours(device: torch.device) -> None:
    """A quarter turn of pair 1 alone: columns 450 and 451."""
    table = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], 1)
    table[0, 1], table[0, 33] = 0, 1
    cache = dsv41ops.new_kv_cache(1, 1, "bf16", device)
    row = torch.arange(HEAD_DIM, device=device).bfloat16()[None]
    zero = ints([0], device)
    dsv41ops.rope_kv_cache_insert(row, zero, table.to(device), zero, cache)
    expected = row[0].clone()
    expected[450], expected[451] = -row[0, 451], row[0, 450]
    assert torch.equal(cache[0, 0], expected)


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("record", RECORDS)
def test_equals_its_parts(
    record: str, dtype: torch.dtype, ratio: int, device: torch.device
) -> None:
    """bf16: rotated, rounded and inserted, byte for byte. f32: encoded from the f32 values."""
    table = rope_table(POSITIONS, device)
    positions = [3, 0, 19, 10, 7]
    kv = (torch.randn(5, HEAD_DIM, device=device) * 3).to(dtype)
    slots = [2, 11, 0, 5, 6]
    turned = f32_turned(kv, [p // ratio * ratio for p in positions], table)
    cache, pool, expected = pools(record, device)
    dsv41ops.rope_kv_cache_insert(
        kv, ints(positions, device), table, ints(slots, device), cache, ratio
    )
    for row, slot in zip(turned.to(dtype), slots, strict=True):
        data, scales = encode_row(row.bfloat16() if record == "bf16" else row, record)
        if record == "fp8_ds_mla":
            data = data[:448] + bytes(row[448:].bfloat16().view(torch.uint8).tolist())
        where = row_bytes_at(record, 4, slot % 4)
        expected[1 + slot // 4, where] = ints(list(data + scales), device, torch.uint8)
    assert torch.equal(pool, expected)
    if dtype == torch.bfloat16:
        apart, other, _ = pools(record, device)
        dsv41ops.kv_cache_insert(turned.bfloat16().to(device), ints(slots, device), apart)
        assert torch.equal(pool, other)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("record", RECORDS)
def test_rows_that_are_not_written(record: str, dtype: torch.dtype, device: torch.device) -> None:
    """A slot or a position outside; what counts is the position of the group's first token."""
    table = rope_table(9, device)
    positions, slots = [0, -1, -2, 8, 9, 10, 3, 3], [0, 1, 2, 3, 4, 5, -1, 12]
    if dtype == torch.int64:
        positions, slots = [*positions, 2**32, -(2**32), 1], [*slots, 6, 7, 2**32]
    kv = torch.randn(len(slots), HEAD_DIM, device=device)
    for ratio, written in ((1, [0, 3]), (2, [0, 3, 4])):
        cache, pool, before = pools(record, device)
        dsv41ops.rope_kv_cache_insert(
            kv, ints(positions, device, dtype), table, ints(slots, device, dtype), cache, ratio
        )
        unwritten = torch.ones_like(pool, dtype=torch.bool)
        for slot in written:
            unwritten[1 + slot // 4, row_bytes_at(record, 4, slot % 4)] = False
        assert torch.equal(pool[unwritten], before[unwritten])
        if record == "bf16":
            rows = decode_pool(cache)[written]
            firsts = ints([positions[slot] // ratio * ratio for slot in written], device)
            torch.testing.assert_close(
                rows, rotated(kv[written], firsts, table), rtol=2**-8, atol=0
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("record", RECORDS)
def test_non_finite_values_stay_in_their_group(
    record: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Of a rotated pair both; the other groups as if it were not there."""
    kv = torch.randn(4, HEAD_DIM, device=device)
    sick = kv.clone()
    for row, column, value in ((0, 511, math.nan), (1, 460, math.inf), (2, 70, -math.inf)):
        sick[row, column] = value
    numbers, table = torch.arange(4, device=device), rope_table(4, device)
    decoded = []
    for rows in (kv, sick):
        cache = dsv41ops.new_kv_cache(1, 4, record, device)
        dsv41ops.rope_kv_cache_insert(rows.to(dtype), numbers, table, numbers, cache)
        decoded.append(decode_pool(cache))
    clean, poisoned = decoded
    for row, column in ((0, 511), (1, 460), (2, 70), (3, 0)):
        width = {"nvfp4": 16, "mxfp8": 32, "fp8_ds_mla": 64, "bf16": 1}[record]
        if column >= 448 and record in ("fp8_ds_mla", "bf16"):
            width = 2
        group = slice(column // width * width, column // width * width + width)
        rest = torch.ones(HEAD_DIM, dtype=torch.bool)
        if row < 3:
            rest[group] = False
            assert not bool(poisoned[row, group].isfinite().any())
        assert torch.equal(poisoned[row, rest], clean[row, rest])


def test_nothing_to_do(device: torch.device) -> None:
    none, table = ints([], device), rope_table(3, device)
    kv = torch.ones(1, HEAD_DIM, device=device)
    for num_pages in (0, 2):
        cache = dsv41ops.new_kv_cache(num_pages, 4, "nvfp4", device)
        dsv41ops.rope_kv_cache_insert(kv[:0], none, table, none, cache)
        dsv41ops.rope_kv_cache_insert(kv, ints([0], device), table[:0], ints([0], device), cache)
        dsv41ops.rope_kv_cache_insert(kv, ints([0], device), table, ints([9], device), cache)
        assert not bool(cache.any())
