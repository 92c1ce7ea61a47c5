"""The indexer's keys: encode and decode their records, and insert them into a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41ops.layouts import INDEX_FP8, INDEX_HEAD_DIM, INDEX_RECORDS, IndexRecord
from dsv41ops.reference.norm import rms_norm
from dsv41ops.reference.records import (
    E8M0_NAN,
    MIN_AMAX,
    apply_scales,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_mxfp8,
    read_rows,
    write_rows,
)
from dsv41ops.reference.rope import group_start, has_position, rotate_last


def encode_index_keys(keys: Tensor, record: IndexRecord) -> Tensor:
    """``[N, 128]`` float32 to ``[N, row_bytes]`` uint8."""
    if record is INDEX_FP8:
        codes, exponents = encode_mxfp8(keys, record.scale_group)
        scales = decode_e8m0(exponents).flatten().view(torch.uint8)
        return torch.cat([codes, scales.view(len(keys), record.scale_bytes)], 1)
    return torch.cat(_encode_mxfp4(keys, record.scale_group), 1)


def _encode_mxfp4(values: Tensor, group: int) -> tuple[Tensor, Tensor]:
    grouped = values.float().unflatten(1, (-1, group))
    amax = grouped.abs().amax(2)
    # exponent = ceil(log2(amax / 6)), 6 = 1.5 * 2^2: from the bits of amax.
    bits = amax.clamp(min=MIN_AMAX).view(torch.int32)
    exponent = (bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).int()
    inverse = ((254 - exponent) << 23).view(torch.float32)
    finite = amax.isfinite()
    codes = encode_e2m1((grouped * inverse[:, :, None]).flatten(1))
    codes = torch.where(finite.repeat_interleave(group, 1), codes, 0)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed, torch.where(finite, exponent, E8M0_NAN).to(torch.uint8)


def decode_index_keys(cache: Tensor, slots: Tensor) -> Tensor:
    """``[N, 128]`` float32 keys of the slots, exact; zeros for a slot outside the cache."""
    num_slots = cache.shape[0] * cache.shape[1]
    if num_slots == 0:
        return cache.new_zeros((slots.shape[0], INDEX_HEAD_DIM), dtype=torch.float32)
    record = INDEX_RECORDS[int(cache.shape[2])]
    valid = (slots >= 0) & (slots < num_slots)
    rows = read_rows(cache, record, torch.where(valid, slots, 0).to(torch.int64))
    rows = rows.masked_fill(~valid[:, None], 0)
    data, scales = rows.split([record.data_bytes, record.scale_bytes], 1)
    if record is INDEX_FP8:
        scale = scales.contiguous().view(torch.float32)
        return apply_scales(decode_e4m3(data), scale, record.scale_group)
    return apply_scales(decode_e2m1(data), decode_e8m0(scales), record.scale_group)


def indexer_k_insert(
    k: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    compress_ratio: int,
    eps: float,
) -> None:
    record = INDEX_RECORDS[int(cache.shape[2])]
    starts = group_start(positions, compress_ratio)
    written = (slot_mapping >= 0) & (slot_mapping < cache.shape[0] * cache.shape[1])
    written &= has_position(starts, cos_sin)
    keys = rms_norm(k[written].float(), norm_weight, eps)
    keys = rotate_last(keys, starts[written], cos_sin)
    rows = encode_index_keys(keys, record)
    write_rows(cache, record, slot_mapping[written].to(torch.int64), rows)
