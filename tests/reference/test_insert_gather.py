"""KV insert and gather: which bytes they touch (C06); padded pages, views, both slot types."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dsv41ops
from tests.support import (
    GUARD,
    HEAD_DIM,
    RECORDS,
    assert_same_bits,
    decode_pool,
    empty_cache,
    encode_row,
    ints,
    random_cache,
    row_bytes_at,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SLOT_DTYPES = [torch.int32, torch.int64]


def expected_pool(
    pool: Tensor, record: str, page_size: int, rows: Tensor, slots: list[int]
) -> Tensor:
    """The pool after the insert: the named rows' bytes, everything else as it was."""
    expected = pool.clone()
    pages = pool.shape[0] - 2
    for row, slot in zip(rows, slots, strict=True):
        if 0 <= slot < pages * page_size:
            page, line = divmod(slot, page_size)
            written = list(b"".join(encode_row(row, record)))
            where = row_bytes_at(record, page_size, line)
            expected[1 + page, where] = ints(written, pool.device, torch.uint8)
    return expected


@pytest.mark.parametrize("dtype", SLOT_DTYPES)
@pytest.mark.parametrize("record", RECORDS)
def test_c06_no_slot_means_no_write(record: str, dtype: torch.dtype, device: torch.device) -> None:
    """Slots 5, none, none, one past the end: only the bytes of slot 5 change."""
    cache, pool = empty_cache(record, 2, 4, device)
    before = pool.clone()
    rows = torch.randn(4, HEAD_DIM, device=device).bfloat16()
    dsv41ops.kv_cache_insert(rows, ints([5, -1, -1, 8], device, dtype), cache)
    assert torch.equal(pool, expected_pool(before, record, 4, rows, [5, -1, -1, 8]))
    changed = (pool != GUARD).any(1).nonzero().flatten().tolist()
    assert changed == [2]  # guard page, page 0, page 1


@pytest.mark.parametrize("dtype", SLOT_DTYPES)
@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("pad", [0, 4, 1022])
@pytest.mark.parametrize("record", RECORDS)
def test_insert_into_padded_pages(
    record: str, pad: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    cache, pool = empty_cache(record, 4, page_size, device, pad=pad)
    before = pool.clone()
    end = 4 * page_size
    slots = [end - 1, -7, 0, page_size, end, 2**31 - 1, -(2**31)]
    rows = torch.randn(2 * len(slots), HEAD_DIM, device=device).bfloat16()[::2]  # strided rows
    dsv41ops.kv_cache_insert(rows, ints(slots, device, dtype), cache)
    assert torch.equal(pool, expected_pool(before, record, page_size, rows, slots))

    names = [*slots, page_size, 0, end - 1]
    gathered = dsv41ops.kv_cache_gather(cache, ints(names, device, dtype))
    assert gathered.dtype == torch.bfloat16
    assert gathered.shape == (len(names), HEAD_DIM)
    exact = decode_pool(cache)
    for name, row in zip(names, gathered, strict=True):
        if 0 <= name < end:
            assert torch.equal(row.double().cpu(), exact[name])
        else:
            assert_same_bits(row, torch.zeros_like(row))


@pytest.mark.parametrize("record", RECORDS)
def test_slots_beyond_32_bits(record: str, device: torch.device) -> None:
    """A slot that is small only after truncation is past the cache."""
    cache, pool = empty_cache(record, 2, 4, device)
    before = pool.clone()
    slots = ints([2**32, 2**32 + 5, -(2**32), 2**62], device, torch.int64)
    dsv41ops.kv_cache_insert(torch.ones(4, HEAD_DIM, device=device).bfloat16(), slots, cache)
    assert torch.equal(pool, before)
    assert not bool(dsv41ops.kv_cache_gather(cache, slots).any())


@pytest.mark.parametrize("record", RECORDS)
def test_the_layers_of_one_allocation(record: str, device: torch.device) -> None:
    """Engines cut several layers' caches out of every page; each sees its own bytes only."""
    layers = [empty_cache(record, 3, 2, device)[0] for _ in range(2)]
    page = layers[0].stride(0)
    block = torch.zeros(3, 2 * page, dtype=layers[0].dtype, device=device)
    views = [
        block.as_strided((3, 2, layers[0].shape[2]), (2 * page, layers[0].shape[2], 1), start)
        for start in (0, page)
    ]
    rows = torch.randn(2, 6, HEAD_DIM, device=device).bfloat16()
    for view, layer, values in zip(views, layers, rows, strict=True):
        for target in (view, layer):
            dsv41ops.kv_cache_insert(values, torch.arange(6, device=device), target)
    for view, layer in zip(views, layers, strict=True):
        slots = torch.arange(6, device=device)
        assert_same_bits(
            dsv41ops.kv_cache_gather(view, slots), dsv41ops.kv_cache_gather(layer, slots)
        )


@pytest.mark.parametrize("record", RECORDS)
def test_nothing_to_do(record: str, device: torch.device) -> None:
    none = torch.empty(0, HEAD_DIM, dtype=torch.bfloat16, device=device)
    for num_pages in (0, 2):
        cache = dsv41ops.new_kv_cache(num_pages, 4, record, device)
        dsv41ops.kv_cache_insert(none, ints([], device), cache)
        assert dsv41ops.kv_cache_gather(cache, ints([], device)).shape == (0, HEAD_DIM)
        dsv41ops.kv_cache_insert(
            torch.ones(1, HEAD_DIM, device=device).bfloat16(), ints([-1], device), cache
        )
        assert not bool(dsv41ops.kv_cache_gather(cache, ints([-1, 9], device)).any())


@pytest.mark.parametrize("record", RECORDS)
def test_gather_reads_nothing_else(record: str, device: torch.device) -> None:
    """Repeated slots, all-NaN neighbours, and the cache unchanged by reading it."""
    good = random_cache(record, 2, 4, device)
    cache, pool = empty_cache(record, 2, 4, device, fill=0xFF)
    values = dsv41ops.kv_cache_gather(good, ints([6], device))
    dsv41ops.kv_cache_insert(values, ints([6], device), cache)
    before = pool.clone()
    gathered = dsv41ops.kv_cache_gather(cache, ints([6, -1, 6, 99], device))
    assert bool(torch.isfinite(gathered).all())
    assert_same_bits(gathered[0], gathered[2])
    assert not bool(gathered[1::2].any())
    assert torch.equal(pool, before)
