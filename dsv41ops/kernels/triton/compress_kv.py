"""Pool groups of tokens to latents, and keep each request's newest rows in a ring."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41ops.kernels.triton.common import kernel, locate_token, to_f32
from dsv41ops.kernels.triton.norm import inverse_rms
from dsv41ops.kernels.triton.records import to_bf16
from dsv41ops.layouts import HEAD_DIM as _HEAD_DIM

HEAD_DIM = tl.constexpr(_HEAD_DIM)


@triton.jit
def _weight(lead):
    """Of two scores' softmax, that of the one which is larger by ``lead``."""
    return tl.div_rn(1.0, 1.0 + tl.exp(-lead))


@triton.jit
def _store_ring_row(kv, score, ring_row, position, capacity, mask):
    column = tl.arange(0, HEAD_DIM)
    place = ring_row + (position & (capacity - 1)) * (2 * HEAD_DIM)
    tl.store(place + column, kv, mask=mask)
    tl.store(place + HEAD_DIM + column, score, mask=mask)


@kernel
def _compress_kv_kernel(
    kv_ptr,
    score_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    norm_weight_ptr,
    ring_slots_ptr,
    num_requests,
    num_tokens,
    kv_stride: tl.int64,
    score_stride: tl.int64,
    ring_rows: tl.int64,
    ring_stride: tl.int64,
    capacity,
    eps,
    ring_ptr,
    out_ptr,
):
    """One program per token; without scores, every token is a group.

    A program writes its own row into the ring, unless that replaces the row which the request's
    first program reads: that one writes it then, afterwards.
    """
    token = tl.program_id(0)
    column = tl.arange(0, HEAD_DIM)
    kv_row = kv_ptr + token.to(tl.int64) * kv_stride
    kv = tl.load(kv_row + column)
    weight = to_f32(tl.load(norm_weight_ptr + column))
    request, position, first_query, seq_len = locate_token(
        query_start_loc_ptr, seq_lens_ptr, num_requests, token
    )
    pooled = kv
    closes = position >= 0
    if score_ptr is not None:
        closes = closes & (position % 2 == 1)
        score_row = score_ptr + token.to(tl.int64) * score_stride
        score = tl.load(score_row + column)
        slot = tl.load(ring_slots_ptr + request, mask=request >= 0, other=-1).to(tl.int64)
        slot = tl.where((position >= 0) & (slot < ring_rows), slot, -1)
        ring_row = ring_ptr + tl.maximum(slot, 0) * ring_stride
        # The first token's position: of this step, and not below 0.
        first = tl.maximum(tl.maximum(first_query, 0), position - token).to(tl.int32)
        opens = position == first
        before = ring_row + ((position - 1) & (capacity - 1)) * (2 * HEAD_DIM)
        previous_kv_row = tl.where(opens, before, kv_row - kv_stride)
        previous_score_row = tl.where(opens, before + HEAD_DIM, score_row - score_stride)
        has_previous = closes & ((slot >= 0) | (position > first))
        mask = column < tl.where(has_previous, HEAD_DIM, 0)
        previous_kv = tl.load(previous_kv_row + column, mask=mask, other=0.0)
        previous_score = tl.load(previous_score_row + column, mask=mask, other=0.0)
        lead = score - previous_score
        pooled = previous_kv * _weight(-lead) + kv * _weight(lead)
        pooled = tl.where(mask, pooled, kv)

        since_read = position - first + 1
        kept = (slot >= 0) & (seq_len - position <= capacity)
        own = kept & ((since_read & (capacity - 1)) != 0)
        own_mask = column < tl.where(own, HEAD_DIM, 0)
        _store_ring_row(kv, score, ring_row, position, capacity, own_mask)
        replacing = (seq_len - first) // capacity * capacity  # tokens after the row that is read
        source = token + (replacing - 1)
        if opens & (slot >= 0) & (replacing > 0) & (source < num_tokens):
            tl.debug_barrier()  # another warp may have read the row
            kv = tl.load(kv_ptr + source.to(tl.int64) * kv_stride + column)
            score = tl.load(score_ptr + source.to(tl.int64) * score_stride + column)
            _store_ring_row(kv, score, ring_row, position + (replacing - 1), capacity, column >= 0)
    latent = pooled * inverse_rms(pooled, eps, HEAD_DIM) * weight
    latent = tl.where(column < tl.where(closes, HEAD_DIM, 0), latent, 0.0)
    if out_ptr.dtype.element_ty == tl.bfloat16:
        latent = to_bf16(latent)
    tl.store(out_ptr + token.to(tl.int64) * HEAD_DIM + column, latent)


def launch_compress_kv(
    kv: Tensor,
    score: Tensor | None,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    norm_weight: Tensor,
    ring_slots: Tensor | None,
    ring: Tensor | None,
    compress_ratio: int,
    eps: float,
    out_dtype: torch.dtype | None,
) -> Tensor:
    out = kv.new_empty(kv.shape, dtype=torch.bfloat16 if out_dtype is None else out_dtype)
    if kv.shape[0] > 0:
        _compress_kv_kernel[(kv.shape[0],)](
            kv,
            score,
            query_start_loc,
            seq_lens,
            norm_weight,
            ring_slots,
            query_start_loc.shape[0] - 1,
            kv.shape[0],
            kv.stride(0),
            0 if score is None else score.stride(0),
            0 if ring is None else ring.shape[0],
            0 if ring is None else ring.stride(0),
            1 if ring is None else ring.shape[1],
            eps,
            None if score is None else ring,
            out,
        )
    return out
