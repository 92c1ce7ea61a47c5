"""Read rows of a paged KV cache, any record, and decode them exactly.

A cache is a uint8 pointer, its page stride in bytes and its page size; a constexpr RECORD, the
bytes of one row, names the layout (see ``layouts.py``). A row is read by columns: ``START`` and
``WIDTH`` (a power of two, a multiple of 64) must not straddle column 448, where ``fp8_ds_mla``
changes from e4m3 to bf16. ``(0, 256), (256, 128), (384, 64), (448, 64)`` suit every record.

ALIGNED promises that base pointer and page stride are multiples of 16 bytes, which makes 16-byte
loads possible; without it every load is one byte.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv41ops.kernels.triton.common import f32_to_bf16

FP8_DS_MLA = tl.constexpr(584)
MXFP8 = tl.constexpr(528)
NVFP4 = tl.constexpr(288)
BF16 = tl.constexpr(1024)
ROPE_START = tl.constexpr(448)

# The interpreter decodes an e4m3 NaN as 480 and truncates where it should round to bf16.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def decode_e4m3(codes):
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if INTERPRETED:
        values = tl.where((codes & 0x7F) == 0x7F, float("nan"), values)
    return values


@triton.jit
def decode_e8m0(codes):
    """2^(code - 127); code 0 is the subnormal 2^-127, code 255 NaN."""
    bits = codes.to(tl.int32) << 23
    bits = tl.where(codes == 0, 1 << 22, bits)
    bits = tl.where(codes == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decode_e2m1(codes):
    """Low four bits of each code; code 8, a negative zero, gives +0."""
    codes = codes.to(tl.int32)
    # The three bits of exponent and mantissa, moved to the top of f32's, are the value · 2^-126.
    bits = ((codes & 8) << 28) | ((codes & 7) << 22)
    return tl.fma(bits.to(tl.float32, bitcast=True), 2.0**126, 0.0)


@triton.jit
def to_bf16(values):
    """f32 rounded to the nearest bf16."""
    return f32_to_bf16(values) if INTERPRETED else values.to(tl.bfloat16)


@triton.jit
def _load_plain(row_ptrs, mask, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """``[N, WIDTH]`` bf16 from the rows' first bytes."""
    column = tl.arange(0, WIDTH)[None, :]
    if ALIGNED:
        word_ptrs = tl.multiple_of(row_ptrs.to(tl.pointer_type(tl.uint16), bitcast=True), 16)
        bits = tl.load(word_ptrs[:, None] + column, mask=mask[:, None], other=0)
    else:
        low = tl.load(row_ptrs[:, None] + 2 * column, mask=mask[:, None], other=0)
        high = tl.load(row_ptrs[:, None] + 2 * column + 1, mask=mask[:, None], other=0)
        bits = low.to(tl.uint16) | (high.to(tl.uint16) << 8)
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def _load_scaled(
    row_ptrs,
    scale_ptrs,
    mask,
    RECORD: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """``[N, WIDTH]`` f32: codes times the scale of their group."""
    N: tl.constexpr = mask.shape[0]
    if RECORD == NVFP4:
        GROUP: tl.constexpr = 16
        GROUP_BYTES: tl.constexpr = 8
        DATA_START: tl.constexpr = START // 2
    else:
        GROUP: tl.constexpr = 64 if RECORD == FP8_DS_MLA else 32
        GROUP_BYTES: tl.constexpr = GROUP
        DATA_START: tl.constexpr = START
    group = tl.arange(0, WIDTH // GROUP)
    scale_codes = tl.load(
        scale_ptrs[:, None] + (START // GROUP + group)[None, :], mask=mask[:, None], other=0
    )
    offsets = DATA_START + group[:, None] * GROUP_BYTES + tl.arange(0, GROUP_BYTES)[None, :]
    codes = tl.load(
        row_ptrs[:, None, None] + offsets[None, :, :], mask=mask[:, None, None], other=0
    )
    if RECORD == NVFP4:
        scales = decode_e4m3(scale_codes)[:, :, None]
        low, high = decode_e2m1(codes) * scales, decode_e2m1(codes >> 4) * scales
        values = tl.reshape(tl.join(low, high), [N, WIDTH])
    else:
        scales = decode_e8m0(scale_codes)[:, :, None]
        values = tl.reshape(decode_e4m3(codes) * scales, [N, WIDTH])
    return values


@triton.jit
def load_columns(
    cache_ptr,
    slots,
    mask,
    page_stride,
    page_size,
    RECORD: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """``[N, WIDTH]`` bf16 of the slots' rows, from column START; zeros where ``mask`` is false."""
    page = (slots // page_size).to(tl.int64)
    row = (slots % page_size).to(tl.int64)
    page_ptrs = cache_ptr + page * page_stride
    if RECORD == FP8_DS_MLA:
        row_ptrs = page_ptrs + row * 576
        scale_ptrs = page_ptrs + page_size.to(tl.int64) * 576 + row * 8
    else:
        row_ptrs = page_ptrs + row * RECORD
        scale_ptrs = row_ptrs + (256 if RECORD == NVFP4 else 512)
    if ALIGNED:  # the hint has to stand beside the addition: it is lost on a function's argument
        row_ptrs = tl.multiple_of(row_ptrs, 16)
        scale_ptrs = tl.multiple_of(scale_ptrs, 8)
    if RECORD == BF16:
        values = _load_plain(row_ptrs + 2 * START, mask, WIDTH, ALIGNED)
    elif RECORD == FP8_DS_MLA and START >= ROPE_START:
        values = _load_plain(row_ptrs + (2 * START - ROPE_START), mask, WIDTH, ALIGNED)
    else:
        tl.static_assert(RECORD != FP8_DS_MLA or START + WIDTH <= ROPE_START)
        values = to_bf16(_load_scaled(row_ptrs, scale_ptrs, mask, RECORD, START, WIDTH))
    return values
