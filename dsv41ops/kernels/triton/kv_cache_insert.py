"""Encode latent rows into a paged cache of any record, with RoPE or without."""

import triton
import triton.language as tl
from torch import Tensor

from dsv41ops.kernels.triton.common import bf16_to_f32, f32_to_bf16, kernel, to_f32
from dsv41ops.kernels.triton.encode import encode_mxfp8, encode_nvfp4
from dsv41ops.kernels.triton.records import BF16, FP8_DS_MLA, MXFP8, ROPE_START
from dsv41ops.kernels.triton.rope import find_row, group_start, rotate
from dsv41ops.layouts import HEAD_DIM as _HEAD_DIM
from dsv41ops.layouts import record_of

HEAD_DIM = tl.constexpr(_HEAD_DIM)


@triton.jit
def _load_row(row_ptr, START: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Columns START .. START + WIDTH by groups, ``[WIDTH // GROUP, GROUP]``."""
    group = tl.arange(0, WIDTH // GROUP)[:, None]
    return tl.load(row_ptr + START + group * GROUP + tl.arange(0, GROUP)[None, :])


@triton.jit
def _rotated(values, cos_sin_row, known, START: tl.constexpr):
    """f32 of columns from START on, ``[N, M]`` one row after the other."""
    half: tl.constexpr = values.shape[1] // 2
    place = tl.arange(0, values.shape[0])[:, None] * half + tl.arange(0, half)[None, :]
    return rotate(to_f32(values), place + (START - ROPE_START) // 2, cos_sin_row, known, False)


@triton.jit
def _load_f32(row_ptr, cos_sin_row, known, GROUP: tl.constexpr):
    """The row by groups; where rotated, in the precision of its dtype."""
    values = _load_row(row_ptr, 0, HEAD_DIM, GROUP)
    if cos_sin_row is None:
        rows = to_f32(values)
    else:
        rows = _rotated(values, cos_sin_row, known, 0)
        if values.dtype == tl.bfloat16:
            rows = bf16_to_f32(f32_to_bf16(rows))
    return rows


@triton.jit
def _load_bf16(row_ptr, cos_sin_row, known, START: tl.constexpr, WIDTH: tl.constexpr):
    """``[1, WIDTH]``; what is not rotated keeps its bits, a NaN's too."""
    values = _load_row(row_ptr, START, WIDTH, WIDTH)
    if cos_sin_row is not None:
        rows = f32_to_bf16(_rotated(values, cos_sin_row, known, START))
        if values.dtype == tl.bfloat16:
            column = START + tl.arange(0, WIDTH)[None, :]
            rows = tl.where(column < ROPE_START, values, rows)
        values = rows
    return values


@triton.jit
def _store_codes(row_ptr, codes, GROUPS: tl.constexpr):
    """The first GROUPS of ``[N, M]`` bytes, one after the other."""
    group = tl.arange(0, codes.shape[0])[:, None]
    column = tl.arange(0, codes.shape[1])[None, :]
    tl.store(row_ptr + group * codes.shape[1] + column, codes, mask=group < GROUPS)


@triton.jit
def _store_plain(row_ptr, values, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """``[1, WIDTH]`` bf16 as they are."""
    column = tl.arange(0, WIDTH)[None, :]
    bits = values.to(tl.uint16, bitcast=True)
    if ALIGNED:
        words = tl.multiple_of(row_ptr.to(tl.pointer_type(tl.uint16), bitcast=True), 16)
        tl.store(words + column, bits)
    else:
        tl.store(row_ptr + 2 * column, (bits & 0xFF).to(tl.uint8))
        tl.store(row_ptr + 2 * column + 1, (bits >> 8).to(tl.uint8))


@kernel
def _kv_cache_insert_kernel(
    kv_ptr,
    slot_mapping_ptr,
    positions_ptr,
    cos_sin_ptr,
    kv_stride: tl.int64,
    num_slots: tl.int64,
    page_size,
    page_stride: tl.int64,
    compress_ratio: tl.int64,
    num_positions: tl.int64,
    cos_sin_stride: tl.int64,
    cache_ptr,
    RECORD: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program per token; with ``cos_sin``, the last 64 columns are rotated first.

    ALIGNED: kv rows and cache rows begin at multiples of 16 bytes.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    write = (slot >= 0) & (slot < num_slots)
    cos_sin_row, known = None, True
    if cos_sin_ptr is not None:
        position = group_start(tl.load(positions_ptr + token).to(tl.int64), compress_ratio)
        cos_sin_row, known = find_row(cos_sin_ptr, cos_sin_stride, num_positions, position)
        write = write & known
    kv_row = kv_ptr + token * kv_stride
    cache_ptr = cache_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    page = cache_ptr + slot // page_size * page_stride
    line = slot % page_size
    row_bytes: tl.constexpr = 576 if RECORD == FP8_DS_MLA else RECORD
    row = page + line * row_bytes
    if ALIGNED:
        kv_row = tl.multiple_of(kv_row, 16)
        row = tl.multiple_of(row, 16)

    # Every row is read and encoded, so that this does not wait for the slot.
    if RECORD == BF16:
        values = _load_bf16(kv_row, cos_sin_row, known, 0, HEAD_DIM)
        if write:
            _store_plain(row, values, HEAD_DIM, ALIGNED)
    elif RECORD == FP8_DS_MLA:
        codes, scales = encode_mxfp8(_load_f32(kv_row, None, known, 64))
        rope = _load_bf16(kv_row, cos_sin_row, known, 448, 64)
        if write:
            # The eighth group is RoPE: stored as bf16, and its scale byte is padding.
            _store_codes(row, codes, 7)
            _store_plain(row + 448, rope, 64, ALIGNED)
            group = tl.arange(0, 8)
            scale_row = page + page_size.to(tl.int64) * row_bytes + line * 8
            tl.store(scale_row + group, tl.where(group < 7, scales, 0))
    else:
        if RECORD == MXFP8:
            codes, scales = encode_mxfp8(_load_f32(kv_row, cos_sin_row, known, 32))
        else:
            codes, scales = encode_nvfp4(_load_f32(kv_row, cos_sin_row, known, 16))
        if write:
            _store_codes(row, codes, codes.shape[0])
            group = tl.arange(0, codes.shape[0])
            tl.store(row + codes.shape[0] * codes.shape[1] + group, scales)


def launch_kv_cache_insert(kv: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
    insert_rows(kv, slot_mapping, cache)


def insert_rows(
    kv: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    compress_ratio: int = 1,
) -> None:
    num_tokens, num_slots = kv.shape[0], cache.shape[0] * cache.shape[1]
    if num_tokens == 0 or num_slots == 0:
        return
    item = cache.element_size()
    kv_bytes = kv.stride(0) * kv.element_size()
    addresses = (kv.data_ptr(), kv_bytes, cache.data_ptr(), cache.stride(0) * item)
    _kv_cache_insert_kernel[(num_tokens,)](
        kv,
        slot_mapping,
        positions,
        cos_sin,
        kv.stride(0),
        num_slots,
        cache.shape[1],
        cache.stride(0) * item,
        compress_ratio,
        *((0, 0) if cos_sin is None else (cos_sin.shape[0], cos_sin.stride(0))),
        cache,
        RECORD=record_of(cache).row_bytes,
        ALIGNED=all(address % 16 == 0 for address in addresses),
        enable_fp_fusion=False,  # see rope.py
    )
