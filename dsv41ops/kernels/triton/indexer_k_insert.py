"""Norm, rotate and encode index keys into their paged cache."""

import triton.language as tl
from torch import Tensor

from dsv41ops.kernels.triton.common import kernel, to_f32
from dsv41ops.kernels.triton.encode import encode_mxfp4, encode_mxfp8
from dsv41ops.kernels.triton.norm import inverse_rms
from dsv41ops.kernels.triton.records import decode_e8m0
from dsv41ops.kernels.triton.rope import NUM_PAIRS, find_row, group_start, rotate
from dsv41ops.layouts import INDEX_FP8, INDEX_HEAD_DIM, INDEX_RECORDS

WIDTH = tl.constexpr(INDEX_HEAD_DIM)
SCALE_BYTES = tl.constexpr(INDEX_FP8.scale_bytes)


@kernel
def _indexer_k_insert_kernel(
    k_ptr,
    norm_weight_ptr,
    positions_ptr,
    cos_sin_ptr,
    slot_mapping_ptr,
    k_stride: tl.int64,
    num_positions: tl.int64,
    cos_sin_stride: tl.int64,
    num_slots: tl.int64,
    page_size,
    page_stride: tl.int64,
    compress_ratio: tl.int64,
    eps,
    cache_ptr,
    DATA_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program, of one warp, per key."""
    token = tl.program_id(0).to(tl.int64)
    GROUPS: tl.constexpr = WIDTH // GROUP
    group = tl.arange(0, GROUPS)[:, None]
    column = group * GROUP + tl.arange(0, GROUP)[None, :]
    k = to_f32(tl.load(k_ptr + token * k_stride + column))
    weight = to_f32(tl.load(norm_weight_ptr + column))
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    position = group_start(tl.load(positions_ptr + token).to(tl.int64), compress_ratio)
    cos_sin_row, known = find_row(cos_sin_ptr, cos_sin_stride, num_positions, position)
    key = k * inverse_rms(k, eps, WIDTH) * weight
    pair = group * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :] - (WIDTH // 2 - NUM_PAIRS)
    key = rotate(key, pair, cos_sin_row, known, False)

    page = cache_ptr + slot // page_size * page_stride
    row = page + slot % page_size * DATA_BYTES
    scale_row = page + page_size.to(tl.int64) * DATA_BYTES + slot % page_size * SCALE_BYTES
    if DATA_BYTES == WIDTH:
        codes, exponents = encode_mxfp8(key)
        # The f32 2^exponent, lowest byte first; the cache may begin anywhere.
        bits = decode_e8m0(exponents).to(tl.int32, bitcast=True)[:, None]
        scales = (bits >> (8 * tl.arange(0, SCALE_BYTES)[None, :])).to(tl.uint8)
    else:
        codes, scales = encode_mxfp4(key)
        scales = scales[None, :]
    if (slot >= 0) & (slot < num_slots) & known:
        code_bytes: tl.constexpr = DATA_BYTES // GROUPS
        tl.store(row + group * code_bytes + tl.arange(0, code_bytes)[None, :], codes)
        tl.store(scale_row + tl.arange(0, SCALE_BYTES)[None, :], scales)


def launch_indexer_k_insert(
    k: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    compress_ratio: int,
    eps: float,
) -> None:
    num_tokens, num_slots = k.shape[0], cache.shape[0] * cache.shape[1]
    if num_tokens == 0 or num_slots == 0 or cos_sin.shape[0] == 0:
        return
    record = INDEX_RECORDS[cache.shape[2]]
    _indexer_k_insert_kernel[(num_tokens,)](
        k,
        norm_weight,
        positions,
        cos_sin,
        slot_mapping,
        k.stride(0),
        cos_sin.shape[0],
        cos_sin.stride(0),
        num_slots,
        cache.shape[1],
        cache.stride(0),
        compress_ratio,
        eps,
        cache,
        DATA_BYTES=record.data_bytes,
        GROUP=record.scale_group,
        num_warps=1,
        enable_fp_fusion=False,  # see rope.py
    )
