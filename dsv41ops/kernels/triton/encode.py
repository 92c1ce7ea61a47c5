"""Encode rows: codes and scales of the block formats, the same bits on every device.

Integer arithmetic, because the interpreter's conversions round wrongly.
"""

import triton
import triton.language as tl

INFINITY_BITS = tl.constexpr(0x7F800000)
MIN_AMAX_BITS = tl.constexpr(0x38D1B717)  # 1e-4
E4M3_NAN = tl.constexpr(0x7F)
E8M0_NAN = tl.constexpr(0xFF)


@triton.jit
def encode_e4m3(values):
    """int32 codes of f32 values of at most 448: nearest, ties to even."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Beside 2^14, f32 keeps multiples of 2^-9, the step below 2^-6; they are its lowest bits.
    shifted = size.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - (141 << 23)
    return tl.where(size < (121 << 23), subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit
def encode_mxfp8(values):
    """``[N, group]`` f32 to uint8 e4m3 codes and ``[N]`` UE8M0 codes."""
    # As an integer, a NaN's size is above infinity's, and that above every number's.
    amax = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = amax < INFINITY_BITS
    bits = tl.maximum(amax, MIN_AMAX_BITS)
    # exponent = ceil(log2(amax / 448)), 448 = 1.75 * 2^8.
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    codes = encode_e4m3(values * inverse[:, None])
    codes = tl.where(finite[:, None], codes, E4M3_NAN)
    return codes.to(tl.uint8), tl.where(finite, exponent, E8M0_NAN).to(tl.uint8)


@triton.jit
def encode_e2m1(values, scale, finite):
    """``[N, group]`` f32 and ``[N]`` scales to ``[N, group // 2]`` uint8, two e2m1 codes each.

    A group that is not ``finite`` gives zeros.
    """
    bits = values.to(tl.int32, bitcast=True)
    # value / scale against the half-way points, without a division: these products are exact.
    size, scale = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), scale[:, None]
    codes = (size > 0.25 * scale).to(tl.int32) + (size >= 0.75 * scale).to(tl.int32)
    codes += (size > 1.25 * scale).to(tl.int32) + (size >= 1.75 * scale).to(tl.int32)
    codes += (size > 2.5 * scale).to(tl.int32) + (size >= 3.5 * scale).to(tl.int32)
    codes += (size > 5.0 * scale).to(tl.int32)
    codes = tl.where(finite[:, None], codes | ((bits >> 28) & 8), 0)
    low, high = tl.split(tl.reshape(codes, [codes.shape[0], codes.shape[1] // 2, 2]))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def encode_nvfp4(values):
    """``[N, 16]`` f32 to ``[N, 8]`` uint8, two e2m1 codes each, and ``[N]`` e4m3 scale codes."""
    bits = values.to(tl.int32, bitcast=True)
    amax = tl.max(bits & 0x7FFFFFFF, 1)
    finite = amax < INFINITY_BITS
    amax = tl.where(finite, amax, 0).to(tl.float32, bitcast=True)
    scale = tl.minimum(tl.maximum(tl.div_rn(amax, 6.0), 2.0**-9), 448.0)
    scale_code = encode_e4m3(scale)
    normal = ((scale_code << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    scale = tl.where(scale_code < 8, scale_code.to(tl.float32) * 2.0**-9, normal)
    return encode_e2m1(values, scale, finite), tl.where(finite, scale_code, E4M3_NAN).to(tl.uint8)


@triton.jit
def encode_mxfp4(values):
    """``[N, group]`` f32 to ``[N, group // 2]`` uint8, two e2m1 codes each, and UE8M0 codes."""
    amax = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = amax < INFINITY_BITS
    bits = tl.maximum(amax, MIN_AMAX_BITS)
    # exponent = ceil(log2(amax / 6)), 6 = 1.5 * 2^2.
    exponent = (bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32)
    exponent = tl.where(finite, exponent, E8M0_NAN)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    return encode_e2m1(values, scale, finite), exponent.to(tl.uint8)
