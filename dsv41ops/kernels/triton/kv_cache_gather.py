"""Read rows of a paged cache of any record as bf16."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41ops.kernels.triton.common import kernel
from dsv41ops.kernels.triton.records import FP8_DS_MLA, load_columns
from dsv41ops.layouts import HEAD_DIM as _HEAD_DIM
from dsv41ops.layouts import record_of

HEAD_DIM = tl.constexpr(_HEAD_DIM)
ROWS = 4


@triton.jit
def _copy_columns(
    cache_ptr,
    slots,
    valid,
    page_stride,
    page_size,
    out_rows,
    out_mask,
    RECORD: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    values = load_columns(
        cache_ptr, slots, valid, page_stride, page_size, RECORD, START, WIDTH, ALIGNED
    )
    column = START + tl.arange(0, WIDTH)[None, :]
    tl.store(out_rows[:, None] + column, values, mask=out_mask[:, None])


@kernel
def _kv_cache_gather_kernel(
    cache_ptr,
    slots_ptr,
    page_stride: tl.int64,
    page_size,
    num_slots: tl.int64,
    num_rows,
    out_ptr,
    RECORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program per ROWS slots. ALIGNED: cache rows begin at multiples of 16 bytes."""
    cache_ptr = cache_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    offs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs_mask = offs < num_rows
    slots = tl.load(slots_ptr + offs, mask=offs_mask, other=-1).to(tl.int64)
    valid = (slots >= 0) & (slots < num_slots)
    slots = tl.where(valid, slots, 0)
    out_rows = tl.multiple_of(out_ptr + offs.to(tl.int64) * HEAD_DIM, 16)  # allocated below
    if RECORD == FP8_DS_MLA:
        _copy_columns(
            cache_ptr, slots, valid, page_stride, page_size, out_rows, offs_mask,
            RECORD, 0, 256, ALIGNED,
        )  # fmt: skip
        _copy_columns(
            cache_ptr, slots, valid, page_stride, page_size, out_rows, offs_mask,
            RECORD, 256, 128, ALIGNED,
        )  # fmt: skip
        _copy_columns(
            cache_ptr, slots, valid, page_stride, page_size, out_rows, offs_mask,
            RECORD, 384, 64, ALIGNED,
        )  # fmt: skip
        _copy_columns(
            cache_ptr, slots, valid, page_stride, page_size, out_rows, offs_mask,
            RECORD, 448, 64, ALIGNED,
        )  # fmt: skip
    else:
        _copy_columns(
            cache_ptr, slots, valid, page_stride, page_size, out_rows, offs_mask,
            RECORD, 0, HEAD_DIM, ALIGNED,
        )  # fmt: skip


def launch_kv_cache_gather(cache: Tensor, slots: Tensor) -> Tensor:
    num_rows = slots.shape[0]
    out = cache.new_empty((num_rows, _HEAD_DIM), dtype=torch.bfloat16)
    if num_rows > 0:
        page_stride = cache.stride(0) * cache.element_size()
        _kv_cache_gather_kernel[(triton.cdiv(num_rows, ROWS),)](
            cache,
            slots,
            page_stride,
            cache.shape[1],
            cache.shape[0] * cache.shape[1],
            num_rows,
            out,
            RECORD=record_of(cache).row_bytes,
            ALIGNED=cache.data_ptr() % 16 == 0 and page_stride % 16 == 0,
            ROWS=ROWS,
        )
    return out
