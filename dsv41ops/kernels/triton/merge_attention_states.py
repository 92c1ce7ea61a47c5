"""Merge partial attention states of several ranks, and apply the sink once."""

import triton
import triton.language as tl
from torch import Tensor

from dsv41ops.kernels.triton.common import bf16_to_f32, kernel
from dsv41ops.kernels.triton.records import to_bf16
from dsv41ops.layouts import HEAD_DIM as _HEAD_DIM

HEAD_DIM = tl.constexpr(_HEAD_DIM)
MINUS_INFINITY = tl.constexpr(float("-inf"))
INFINITY = tl.constexpr(float("inf"))
HEADS = 2


@kernel
def _merge_attention_states_kernel(
    outs_ptr,
    lses_ptr,
    attn_sink_ptr,
    num_heads,
    outs_rank_stride: tl.int64,
    outs_token_stride: tl.int64,
    outs_head_stride: tl.int64,
    lses_rank_stride: tl.int64,
    lses_token_stride: tl.int64,
    out_ptr,
    lse_ptr,
    RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program per token and HEADS heads. ALIGNED: rows begin at multiples of 16 bytes.

    Ranks are added in order, as the reference does: a rank with nothing adds -0.0, which leaves
    every number as it is.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    head_mask = head < num_heads
    column = tl.arange(0, HEAD_DIM)[None, :]

    ranks = tl.arange(0, RANK_BLOCK)
    lses_row = lses_ptr + token * lses_token_stride + head
    lses = tl.load(
        lses_row[None, :] + ranks.to(tl.int64)[:, None] * lses_rank_stride,
        mask=(ranks < RANKS)[:, None] & head_mask[None, :],
        other=MINUS_INFINITY,
    )
    largest = tl.max(lses, 0)
    largest = tl.where(tl.abs(largest) == INFINITY, 0.0, largest)
    total = tl.sum(tl.exp(lses - largest[None, :]), 0)
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, MINUS_INFINITY, tl.log(total) + largest)

    outs_row = outs_ptr + token * outs_token_stride + head.to(tl.int64) * outs_head_stride
    # By its bits: Triton 3.6 takes -0.0 for 0.
    nothing = tl.full([HEADS, HEAD_DIM], -(2**31), tl.int32).to(tl.float32, bitcast=True)
    out = nothing
    lses_rank = lses_rank_stride * 0
    outs_rank = outs_rank_stride * 0
    for _ in tl.range(RANKS, loop_unroll_factor=4):
        rank_lse = tl.load(lses_row + lses_rank, mask=head_mask, other=MINUS_INFINITY)
        weight = tl.div_rn(tl.exp(rank_lse - largest), total)
        values_row = outs_row + outs_rank
        if ALIGNED:
            values_row = tl.multiple_of(values_row, 16)
        values = tl.load(values_row[:, None] + column, mask=head_mask[:, None], other=0.0)
        if values.dtype == tl.bfloat16:
            values = bf16_to_f32(values)
        empty_rank = rank_lse == MINUS_INFINITY
        out += tl.where(empty_rank[:, None], nothing, values * weight[:, None])
        lses_rank += lses_rank_stride
        outs_rank += outs_rank_stride

    if attn_sink_ptr is not None:
        sink = tl.load(attn_sink_ptr + head, mask=head_mask, other=0.0)
        out = out * tl.div_rn(1.0, 1.0 + tl.exp(sink - lse))[:, None]
    out = tl.where(empty[:, None], 0.0, out)
    if out_ptr.dtype.element_ty == tl.bfloat16:
        out = to_bf16(out)
    row = token * num_heads + head
    out_row = tl.multiple_of(out_ptr + row * HEAD_DIM, 16)  # allocated below
    tl.store(out_row[:, None] + column, out, mask=head_mask[:, None])
    tl.store(lse_ptr + row, lse, mask=head_mask)


def launch_merge_attention_states(
    outs: Tensor, lses: Tensor, attn_sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    num_ranks, num_tokens, num_heads, _ = outs.shape
    out = outs.new_empty((num_tokens, num_heads, _HEAD_DIM))
    lse = lses.new_empty((num_tokens, num_heads))
    if num_tokens == 0 or num_heads == 0:
        return out, lse
    item = outs.element_size()
    strides = outs.stride()[:3]
    _merge_attention_states_kernel[(num_tokens, triton.cdiv(num_heads, HEADS))](
        outs,
        lses,
        attn_sink,
        num_heads,
        *strides,
        *lses.stride()[:2],
        out,
        lse,
        RANKS=num_ranks,
        RANK_BLOCK=triton.next_power_of_2(max(num_ranks, 1)),
        HEADS=HEADS,
        ALIGNED=all(a % 16 == 0 for a in (outs.data_ptr(), *(s * item for s in strides))),
    )
    return out, lse
