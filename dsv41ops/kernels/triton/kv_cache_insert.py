"""Encode latent rows into a paged cache of any record."""

import triton
import triton.language as tl
from torch import Tensor

from dsv41ops.kernels.triton.common import bf16_to_f32, kernel
from dsv41ops.kernels.triton.records import BF16, FP8_DS_MLA, MXFP8
from dsv41ops.layouts import HEAD_DIM as _HEAD_DIM
from dsv41ops.layouts import record_of

HEAD_DIM = tl.constexpr(_HEAD_DIM)
INFINITY_BITS = tl.constexpr(0x7F800000)
MIN_AMAX_BITS = tl.constexpr(0x38D1B717)  # 1e-4
E4M3_NAN = tl.constexpr(0x7F)
E8M0_NAN = tl.constexpr(0xFF)


@triton.jit
def _encode_e4m3(values):
    """int32 codes of f32 values of at most 448: nearest, ties to even."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Beside 2^14, f32 keeps multiples of 2^-9, the step below 2^-6; they are its lowest bits.
    shifted = size.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - (141 << 23)
    return tl.where(size < (121 << 23), subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _encode_mxfp8(values):
    """``[N, group]`` f32 to uint8 e4m3 codes and ``[N]`` UE8M0 codes."""
    # As an integer, a NaN's size is above infinity's, and that above every number's.
    amax = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = amax < INFINITY_BITS
    bits = tl.maximum(amax, MIN_AMAX_BITS)
    # exponent = ceil(log2(amax / 448)), 448 = 1.75 * 2^8.
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    codes = _encode_e4m3(values * inverse[:, None])
    codes = tl.where(finite[:, None], codes, E4M3_NAN)
    return codes.to(tl.uint8), tl.where(finite, exponent, E8M0_NAN).to(tl.uint8)


@triton.jit
def _encode_nvfp4(values):
    """``[N, 16]`` f32 to ``[N, 8]`` uint8, two e2m1 codes each, and ``[N]`` e4m3 scale codes."""
    bits = values.to(tl.int32, bitcast=True)
    amax = tl.max(bits & 0x7FFFFFFF, 1)
    finite = amax < INFINITY_BITS
    amax = tl.where(finite, amax, 0).to(tl.float32, bitcast=True)
    scale = tl.minimum(tl.maximum(tl.div_rn(amax, 6.0), 2.0**-9), 448.0)
    scale_code = _encode_e4m3(scale)
    normal = ((scale_code << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    scale = tl.where(scale_code < 8, scale_code.to(tl.float32) * 2.0**-9, normal)[:, None]
    # value / scale against the half-way points, without a division: these products are exact.
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    codes = (size > 0.25 * scale).to(tl.int32) + (size >= 0.75 * scale).to(tl.int32)
    codes += (size > 1.25 * scale).to(tl.int32) + (size >= 1.75 * scale).to(tl.int32)
    codes += (size > 2.5 * scale).to(tl.int32) + (size >= 3.5 * scale).to(tl.int32)
    codes += (size > 5.0 * scale).to(tl.int32)
    codes = tl.where(finite[:, None], codes | ((bits >> 28) & 8), 0)
    low, high = tl.split(tl.reshape(codes, [codes.shape[0], codes.shape[1] // 2, 2]))
    packed = (low | (high << 4)).to(tl.uint8)
    return packed, tl.where(finite, scale_code, E4M3_NAN).to(tl.uint8)


@triton.jit
def _load_row(row_ptr, START: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Columns START .. START + WIDTH by groups, ``[WIDTH // GROUP, GROUP]`` bf16."""
    group = tl.arange(0, WIDTH // GROUP)[:, None]
    return tl.load(row_ptr + START + group * GROUP + tl.arange(0, GROUP)[None, :])


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
    kv_stride: tl.int64,
    num_slots: tl.int64,
    page_size,
    page_stride: tl.int64,
    cache_ptr,
    RECORD: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program per token. ALIGNED: kv rows and cache rows begin at multiples of 16 bytes."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    write = (slot >= 0) & (slot < num_slots)
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
        values = _load_row(kv_row, 0, HEAD_DIM, HEAD_DIM)
        if write:
            _store_plain(row, values, HEAD_DIM, ALIGNED)
    elif RECORD == FP8_DS_MLA:
        codes, scales = _encode_mxfp8(bf16_to_f32(_load_row(kv_row, 0, HEAD_DIM, 64)))
        rope = _load_row(kv_row, 448, 64, 64)
        if write:
            # The eighth group is RoPE: stored as it came, and its scale byte is padding.
            _store_codes(row, codes, 7)
            _store_plain(row + 448, rope, 64, ALIGNED)
            group = tl.arange(0, 8)
            scale_row = page + page_size.to(tl.int64) * row_bytes + line * 8
            tl.store(scale_row + group, tl.where(group < 7, scales, 0))
    else:
        if RECORD == MXFP8:
            codes, scales = _encode_mxfp8(bf16_to_f32(_load_row(kv_row, 0, HEAD_DIM, 32)))
        else:
            codes, scales = _encode_nvfp4(bf16_to_f32(_load_row(kv_row, 0, HEAD_DIM, 16)))
        if write:
            _store_codes(row, codes, codes.shape[0])
            group = tl.arange(0, codes.shape[0])
            tl.store(row + codes.shape[0] * codes.shape[1] + group, scales)


def launch_kv_cache_insert(kv: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
    num_tokens, num_slots = kv.shape[0], cache.shape[0] * cache.shape[1]
    if num_tokens == 0 or num_slots == 0:
        return
    item = cache.element_size()
    addresses = (kv.data_ptr(), kv.stride(0) * 2, cache.data_ptr(), cache.stride(0) * item)
    _kv_cache_insert_kernel[(num_tokens,)](
        kv,
        slot_mapping,
        kv.stride(0),
        num_slots,
        cache.shape[1],
        cache.stride(0) * item,
        cache,
        RECORD=record_of(cache).row_bytes,
        ALIGNED=all(address % 16 == 0 for address in addresses),
    )
