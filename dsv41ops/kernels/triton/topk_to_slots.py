"""Slots of each token's selected states."""

import torch
import triton.language as tl
from torch import Tensor

from dsv41ops.kernels.triton.common import (
    FILL_ROWS,
    column_block,
    end_row,
    fill_rows,
    kernel,
    local_state,
    locate_token,
    pack_left,
    row_programs,
    slot_of,
    stripe_of,
)


@kernel
def _topk_to_slots_kernel(
    topk_indices_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    topk_stride: tl.int64,
    num_requests,
    num_tokens,
    table_stride: tl.int64,
    table_rows,
    table_columns,
    states_per_page,
    compress_ratio,
    stripe,
    world,
    rank,
    interleave,
    width,
    out_rows,
    out_stride: tl.int64,
    out_ptr,
    lens_ptr,
    SHARDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token, then one per ROWS rows of padding."""
    program = tl.program_id(0)
    if program < num_tokens:
        token = program
        topk_row = topk_indices_ptr + token.to(tl.int64) * topk_stride
        out_row = out_ptr + token.to(tl.int64) * out_stride
        # Read before the token is found, and each next block before it is needed.
        offs = tl.arange(0, BLOCK)
        state = tl.load(topk_row + offs, mask=offs < width, other=-1)
        request, position, _, _ = locate_token(
            query_start_loc_ptr, seq_lens_ptr, num_requests, token
        )
        num_visible = (position + 1) // compress_ratio  # 0 for padding, whose position is -1
        count = 0
        column = 0
        while column < width:
            visible = (state >= 0) & (state < num_visible)
            local, owned = local_state(
                state.to(tl.int32),  # a visible one fits
                stripe,
                world,
                rank,
                interleave,
                SHARDED,
            )
            slots = slot_of(
                block_table_ptr,
                table_stride,
                table_rows,
                table_columns,
                request,
                local,
                visible & owned,
                states_per_page,
            )
            column += BLOCK
            offs = column + tl.arange(0, BLOCK)
            state = tl.load(topk_row + offs, mask=offs < width, other=-1)
            count = pack_left(slots, 0, out_row, count)
        end_row(out_row, lens_ptr + token, count, width, BLOCK)
    else:
        first = num_tokens + (program - num_tokens) * ROWS
        fill_rows(first, out_rows, out_stride, width, out_ptr, lens_ptr, ROWS, BLOCK)


def launch_topk_to_slots(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    states_per_page: int,
    compress_ratio: int,
    dcp_world_size: int,
    dcp_rank: int,
    cp_interleave: int,
    *,
    out: Tensor | None = None,
    lens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    num_tokens, width = topk_indices.shape
    if out is None or lens is None:
        out = topk_indices.new_empty((num_tokens, width), dtype=torch.int32)
        lens = topk_indices.new_empty((num_tokens,), dtype=torch.int32)
    if out.shape[0] > 0:
        block, num_warps = column_block(width)
        _topk_to_slots_kernel[(row_programs(num_tokens, out.shape[0]),)](
            topk_indices,
            query_start_loc,
            seq_lens,
            block_table,
            topk_indices.stride(0),
            query_start_loc.shape[0] - 1,
            num_tokens,
            block_table.stride(0),
            block_table.shape[0],
            block_table.shape[1],
            states_per_page,
            compress_ratio,
            stripe_of(dcp_world_size, cp_interleave),
            dcp_world_size,
            dcp_rank,
            cp_interleave,
            width,
            out.shape[0],
            out.stride(0),
            out,
            lens,
            SHARDED=dcp_world_size > 1,
            ROWS=FILL_ROWS,
            BLOCK=block,
            num_warps=num_warps,
        )
    return out, lens
