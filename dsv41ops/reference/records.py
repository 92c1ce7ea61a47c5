"""Encode and decode the four KV records; read and write rows of a paged cache of any record.

Scales are powers of two built from exponent bits, or e4m3: no ``log2`` or reciprocal whose
rounding could differ between devices. A group with a non-finite input gets a NaN scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41ops.layouts import (
    BF16,
    FP8_DS_MLA,
    HEAD_DIM,
    NVFP4,
    ROPE_DIM,
    IndexRecord,
    KVRecord,
)

Record = KVRecord | IndexRecord

E4M3_NAN = 0x7F
E8M0_NAN = 0xFF
MIN_AMAX = 1e-4  # keeps the scale of an all-zero group finite
E2M1_MAX = 6.0


def encode(rows: Tensor, record: KVRecord) -> Tensor:
    """``[N, 512]`` bf16 or f32 rows to ``[N, row_bytes]`` uint8; what is bf16 there is rounded."""
    if record is BF16:
        return to_bf16(rows).contiguous().view(torch.uint8)
    if record is NVFP4:
        return torch.cat(_encode_nvfp4(rows, record.scale_group), 1)
    if record is FP8_DS_MLA:
        nope, rope = rows.split([HEAD_DIM - ROPE_DIM, ROPE_DIM], 1)
        codes, scales = encode_mxfp8(nope, record.scale_group)
        pad = scales.new_zeros(len(rows), record.scale_bytes - scales.shape[1])
        return torch.cat([codes, to_bf16(rope).contiguous().view(torch.uint8), scales, pad], 1)
    return torch.cat(encode_mxfp8(rows, record.scale_group), 1)


def to_bf16(values: Tensor) -> Tensor:
    """bf16 as it is; f32 rounded, a NaN to the plain one (torch's own differs between devices)."""
    if values.dtype == torch.bfloat16:
        return values
    return values.to(torch.bfloat16).masked_fill(values.isnan(), torch.nan)


def decode(row_bytes: Tensor, record: KVRecord) -> Tensor:
    """``[N, row_bytes]`` uint8 to ``[N, 512]``, f32 or bf16, in either case exact in bf16.

    Zero bytes give zeros.
    """
    if record is BF16:
        return row_bytes.contiguous().view(torch.bfloat16)
    data, scales = row_bytes.split([record.data_bytes, record.scale_bytes], 1)
    if record is NVFP4:
        return apply_scales(decode_e2m1(data), decode_e4m3(scales), record.scale_group)
    if record is FP8_DS_MLA:
        width = HEAD_DIM - ROPE_DIM
        scales = scales[:, : width // record.scale_group]
        nope = apply_scales(decode_e4m3(data[:, :width]), decode_e8m0(scales), record.scale_group)
        rope = data[:, width:].contiguous().view(torch.bfloat16)
        return torch.cat([nope.to(torch.bfloat16), rope], 1)
    return apply_scales(decode_e4m3(data), decode_e8m0(scales), record.scale_group)


def encode_mxfp8(values: Tensor, group: int) -> tuple[Tensor, Tensor]:
    grouped = values.float().unflatten(1, (-1, group))
    amax = grouped.abs().amax(2)
    # exponent = ceil(log2(amax / 448)), 448 = 1.75 * 2^8: from the bits of amax.
    bits = amax.clamp(min=MIN_AMAX).view(torch.int32)
    code = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()
    inverse = ((254 - code) << 23).view(torch.float32)
    scaled = (grouped * inverse[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    finite = amax.isfinite()
    data = torch.where(finite[:, :, None], scaled.view(torch.uint8), E4M3_NAN)
    return data.flatten(1), torch.where(finite, code, E8M0_NAN).to(torch.uint8)


def _encode_nvfp4(values: Tensor, group: int) -> tuple[Tensor, Tensor]:
    grouped = values.float().unflatten(1, (-1, group))
    amax = grouped.abs().amax(2)
    # Divide by a tensor: CUDA multiplies by the reciprocal of a Python scalar, which rounds.
    scale = (amax / torch.full_like(amax, E2M1_MAX)).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    quotient = (grouped / scale.float()[:, :, None]).flatten(1)
    finite = amax.isfinite()
    codes = torch.where(finite.repeat_interleave(group, 1), encode_e2m1(quotient), 0)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed, torch.where(finite, scale.view(torch.uint8), E4M3_NAN)


def encode_e2m1(values: Tensor) -> Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with its sign; a tie goes to the even code."""
    size = values.abs()
    code = values.signbit().to(torch.uint8) << 3
    # Half-way points; the code above one is even exactly where a tie rounds up.
    for upper, half_way in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), 1):
        code += size >= half_way if upper % 2 == 0 else size > half_way
    return code


def decode_e2m1(packed: Tensor) -> Tensor:
    codes = torch.stack([packed & 0xF, packed >> 4], 2).flatten(1)
    size, sign = codes & 7, codes & 8
    # The e4m3 code of the same value: exponent bias 7 instead of 1, mantissa moved up.
    normal = (size << 2) + (6 << 3)
    e4m3 = torch.where(size > 1, normal, size * (6 << 3))
    # Code 8, a negative zero, decodes to +0, as published decoders have it.
    return decode_e4m3(torch.where(size > 0, e4m3 | (sign << 4), 0))


def decode_e4m3(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float()


def decode_e8m0(codes: Tensor) -> Tensor:
    """2^(code - 127); code 0 is the subnormal 2^-127, code 255 NaN."""
    bits = codes.to(torch.int32) << 23
    bits = torch.where(codes == 0, 1 << 22, bits)
    bits = torch.where(codes == E8M0_NAN, 0x7FC00000, bits)
    return bits.view(torch.float32)


def apply_scales(values: Tensor, scales: Tensor, group: int) -> Tensor:
    grouped: Tensor = values.unflatten(1, (-1, group)) * scales[:, :, None]
    return grouped.flatten(1)


def _row_parts(cache: Tensor, record: Record) -> list[Tensor]:
    """Byte views ``[pages, page_size, n]`` that, side by side, hold one row each."""
    pages = cache if cache.dtype == torch.uint8 else cache.view(torch.uint8)
    if not record.split_page:
        return [pages]
    num_pages, page_size, _ = pages.shape
    scales_offset = pages.storage_offset() + page_size * record.data_bytes
    shapes = ((record.data_bytes, pages.storage_offset()), (record.scale_bytes, scales_offset))
    return [
        pages.as_strided((num_pages, page_size, n), (pages.stride(0), n, 1), offset)
        for n, offset in shapes
    ]


def read_rows(cache: Tensor, record: Record, slots: Tensor) -> Tensor:
    """``[N, row_bytes]`` of slots that are all inside the cache."""
    page_size = cache.shape[1]
    page, row = slots // page_size, slots % page_size
    parts = [part[page, row] for part in _row_parts(cache, record)]
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def write_rows(cache: Tensor, record: Record, slots: Tensor, row_bytes: Tensor) -> None:
    """Write ``[N, row_bytes]`` to slots that are all inside the cache."""
    page_size = cache.shape[1]
    page, row = slots // page_size, slots % page_size
    parts = _row_parts(cache, record)
    for part, values in zip(
        parts, row_bytes.split([part.shape[2] for part in parts], 1), strict=True
    ):
        part.index_put_((page, row), values)
