"""The kernel against the reference: every bit of a number, of RoPE and of bf16 rows; NaN is NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv41ops.kernels.triton.kv_cache_gather import launch_kv_cache_gather
from dsv41ops.kernels.triton.kv_cache_insert import launch_kv_cache_insert
from dsv41ops.reference.kv_cache import kv_cache_gather
from tests.kernels.interpreted.batches import CPU, FAR
from tests.reference.test_large_strides import untouched
from tests.support import GROUPS, RECORDS, ROW_BYTES, assert_same_bits, empty_cache, ints, record_of

QUANTISED = [record for record in RECORDS if record != "bf16"]


def check(cache: Tensor, slots: Tensor) -> None:
    actual, expected = launch_kv_cache_gather(cache, slots), kv_cache_gather(cache, slots)
    quantised = GROUPS.get(record_of(cache), (0, 0))[1]
    for rows in (actual, expected):
        rows[:, :quantised].masked_fill_(rows[:, :quantised].isnan(), math.nan)
    assert_same_bits(actual, expected)


def random_bytes(record: str, pages: int, page_size: int, *, pad: int = 0) -> Tensor:
    cache, pool = empty_cache(record, pages, page_size, CPU, pad=pad)
    pool.copy_(torch.randint(256, pool.shape, dtype=torch.uint8))
    return cache


@pytest.mark.parametrize("record", QUANTISED)
def test_every_code_under_every_scale(record: str) -> None:
    group, quantised = GROUPS[record]
    per_row = quantised // group
    num_codes = 16 if record == "nvfp4" else 256
    pairs = torch.cartesian_prod(torch.arange(256), torch.arange(num_codes)).view(-1, group, 2)
    pairs = torch.nn.functional.pad(pairs, (0, 0, 0, 0, 0, -len(pairs) % per_row))
    scales, data = pairs[:, 0, 0].view(-1, per_row), pairs[..., 1].reshape(-1, quantised)
    if record == "nvfp4":
        data = data[:, ::2] | data[:, 1::2] << 4
    parts = [data, scales]
    if record == "fp8_ds_mla":
        rope = torch.randint(256, (len(data), 128))  # NaN payloads among them
        parts = [data, rope, scales]
    packed = torch.cat(parts, 1).to(torch.uint8)
    cache, _ = empty_cache(record, len(packed), 1, CPU)
    cache[:, 0, : packed.shape[1]] = packed
    check(cache, torch.arange(len(packed)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("pad", "page_size"), [(0, 1), (0, 4), (16, 3), (6, 3), (1022, 4)])
@pytest.mark.parametrize("record", RECORDS)
def test_rows_and_slots(record: str, pad: int, page_size: int, dtype: torch.dtype) -> None:
    """Repeats, no slot, slots past the cache; aligned pages and others; random bytes."""
    end = 5 * page_size
    slots = [end - 1, -1, 0, end // 2, end, 0, FAR, -(2**31), 1]
    if dtype == torch.int64:
        slots += [2**32, 2**32 + 1, -(2**32), 2**62]
    check(random_bytes(record, 5, page_size, pad=pad), ints(slots, CPU, dtype))


@pytest.mark.parametrize("record", RECORDS)
def test_odd_addresses(record: str) -> None:
    """A byte cache may begin anywhere; the bf16 record too may be held as bytes."""
    row_bytes = ROW_BYTES[record]
    pool = torch.randint(256, (9000,), dtype=torch.uint8)
    cache = pool.as_strided((2, 3, row_bytes), (3 * row_bytes + 5, row_bytes, 1), 7)
    check(cache, ints([5, 2, -1, 0, 6], CPU))


@pytest.mark.parametrize("record", RECORDS)
def test_no_rows_and_no_pages(record: str) -> None:
    check(random_bytes(record, 2, 4), ints([], CPU))
    check(random_bytes(record, 0, 4), ints([0, -1, 9], CPU))


@pytest.mark.parametrize("record", RECORDS)
def test_pages_past_2_31(record: str) -> None:
    """Few pages far apart: insert and gather address them in 64 bits."""
    item, width = (2, 512) if record == "bf16" else (1, ROW_BYTES[record])
    stride = 2**30 + 1152
    memory = untouched((2 * stride + 4 * width) * item, CPU)
    memory = memory.view(torch.bfloat16) if record == "bf16" else memory
    cache = memory.as_strided((3, 4, width), (stride, width, 1))
    rows, slots = torch.randn(3, 512).bfloat16(), ints([1, 6, 11], CPU)
    launch_kv_cache_insert(rows, slots, cache)
    assert bool(launch_kv_cache_gather(cache, slots).any(1).all())
    check(cache, slots)
