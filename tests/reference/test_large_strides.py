"""C11: offsets past 2^31, in bytes and in elements, on memory that is reserved, not touched."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import dsv41ops
from tests.support import HEAD_DIM, RECORDS, ROW_BYTES, assert_same_bits, ints

pytestmark = pytest.mark.usefixtures("one_thread")

# Elsewhere memory is reserved lazily anyway; Python names the flag from 3.13 on.
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
PAGE_SIZE = 64


def untouched(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 memory of which the CPU holds only the pages that get written."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)


def far_apart(tensor: Tensor, row_stride: int) -> Tensor:
    """The same rows, ``row_stride`` elements from one to the next."""
    size, item = tensor.shape[0], tensor.element_size()
    row = tensor[0].numel()
    memory = untouched(((size - 1) * row_stride + row) * item, tensor.device).view(tensor.dtype)
    view = memory.as_strided(tensor.shape, (row_stride, *tensor.stride()[1:]))
    view.copy_(tensor)
    return view


def check_far_pages(cache: Tensor, record: str, pages: list[int]) -> None:
    """Insert, gather and decode on far pages as on a small pool with the same rows."""
    device = cache.device
    near = dsv41ops.new_kv_cache(len(pages), PAGE_SIZE, record, device)
    lines = [0, 1, PAGE_SIZE - 1]
    far_slots = [page * PAGE_SIZE + line for page in pages for line in lines]
    near_slots = [page * PAGE_SIZE + line for page in range(len(pages)) for line in lines]
    rows = torch.randn(len(far_slots), HEAD_DIM, device=device).bfloat16()
    q = torch.randn(2, 4, HEAD_DIM, device=device).bfloat16()
    pools = (cache, far_slots), (near, near_slots)
    for target, slots in pools:
        dsv41ops.kv_cache_insert(rows, ints(slots, device, torch.int64), target)
    results = []
    for target, slots in pools:
        lens = ints([len(slots), 2], device)
        indices = ints([slots, slots[::-1]], device)
        results.append(
            [
                dsv41ops.kv_cache_gather(target, ints(slots, device)),
                *dsv41ops.sparse_mla_decode(q, target, indices, lens),
                *dsv41ops.sparse_mla_decode(
                    q, near, ints([[0], [-1]], device), ints([1, 1], device), target, indices, lens
                ),
            ]
        )
    assert bool(results[0][0].any(1).all())
    for far, expected in zip(*results, strict=True):
        assert_same_bits(far, expected)


@pytest.mark.parametrize("record", RECORDS)
def test_c11_page_number_times_page_bytes(record: str, device: torch.device) -> None:
    """The pages on both sides of byte 2^31 of an ordinary, dense pool, and its last page."""
    page = dsv41ops.new_kv_cache(0, PAGE_SIZE, record, device).stride(0)
    page *= 2 if record == "bf16" else 1
    across = 2**31 // page
    num_pages = across + 3
    memory = untouched(num_pages * page, device)
    if record == "bf16":
        memory = memory.view(torch.bfloat16)
    item = memory.element_size()
    width = ROW_BYTES[record] // item
    cache = memory.as_strided((num_pages, PAGE_SIZE, width), (page // item, width, 1))
    if record == "mxfp8":
        assert across == 63_550
    check_far_pages(cache, record, [0, across - 1, across, across + 1, num_pages - 1])


@pytest.mark.parametrize("record", RECORDS)
def test_c11_few_pages_far_apart(record: str, device: torch.device) -> None:
    """Three pages whose stride alone brings the last one past 2^31 elements."""
    item = 2 if record == "bf16" else 1
    stride = 2**30 + 1152
    width = ROW_BYTES[record] // item
    memory = untouched((2 * stride + PAGE_SIZE * ROW_BYTES[record]) * item, device)
    if record == "bf16":
        memory = memory.view(torch.bfloat16)
    cache = memory.as_strided((3, PAGE_SIZE, width), (stride, width, 1))
    check_far_pages(cache, record, [0, 1, 2])


FAR = 2**30 + 4  # elements: the third row lies past 2^31


def window(table: Tensor, q: Tensor, indices: Tensor, lens: Tensor) -> list[Tensor]:
    batch = ints([0, 1, 2, 3], q.device), ints([40, 33, 8], q.device)
    return list(dsv41ops.sliding_window_indices(*batch, table, 3, 16, window=20))


def slots(table: Tensor, q: Tensor, indices: Tensor, lens: Tensor) -> list[Tensor]:
    batch = ints([0, 1, 2, 3], q.device), ints([40, 33, 8], q.device)
    topk = dsv41ops.topk_to_slots(indices, *batch, table, 16, 1)
    return [dsv41ops.compressed_slot_mapping(*batch, table, 3, 16, 1), *topk]


def decode(table: Tensor, q: Tensor, indices: Tensor, lens: Tensor) -> list[Tensor]:
    cache = dsv41ops.new_kv_cache(2, 16, "mxfp8", q.device)
    rows = torch.linspace(-1, 1, 32 * HEAD_DIM, device=q.device).view(32, HEAD_DIM).bfloat16()
    dsv41ops.kv_cache_insert(rows, torch.arange(32, device=q.device), cache)
    return list(dsv41ops.sparse_mla_decode(q, cache, indices, lens))


def insert(table: Tensor, q: Tensor, indices: Tensor, lens: Tensor) -> list[Tensor]:
    cache = dsv41ops.new_kv_cache(1, 4, "mxfp8", q.device)
    dsv41ops.kv_cache_insert(q[:, 0], ints([2, 0, 3], q.device), cache)
    return [cache]


@pytest.mark.parametrize("name", ["table", "indices", "q"])
@pytest.mark.parametrize("call", [window, slots, decode, insert])
def test_c11_row_number_times_row_stride(
    call: Callable[..., list[Tensor]], name: str, device: torch.device
) -> None:
    """Index buffers, block tables, q and kv: a row stride that passes 2^31 at the third row."""
    tensors = {
        "table": torch.randint(50, (3, 3), dtype=torch.int32, device=device),
        "q": torch.randn(3, 4, HEAD_DIM, device=device).bfloat16(),
        "indices": torch.randint(-1, 32, (3, 9), dtype=torch.int32, device=device),
        "lens": ints([9, 4, 9], device),
    }
    expected = call(**tensors)
    tensors[name] = far_apart(tensors[name], FAR)
    for far, near in zip(call(**tensors), expected, strict=True):
        assert_same_bits(far, near)


def test_c11_out_buffers(device: torch.device) -> None:
    """Written through a far row stride, the padding row included."""
    topk = torch.randint(-1, 40, (2, 9), dtype=torch.int32, device=device)
    batch = ints([0, 1, 2], device), ints([40, 33], device)
    table = ints([[1, 2, 3], [4, 5, 6]], device)
    expected, _ = dsv41ops.topk_to_slots(topk, *batch, table, 16, 1)
    out = far_apart(torch.full((3, 9), 7, dtype=torch.int32, device=device), FAR)
    lens = torch.empty(3, dtype=torch.int32, device=device)
    dsv41ops.topk_to_slots_out(topk, *batch, table, 16, 1, out=out, lens=lens)
    assert torch.equal(out[:2], expected)
    assert bool((out[2] == -1).all())
