"""Slots of each token's selected states."""

import torch
import triton.language as tl
from torch import Tensor

from dsv41ops.kernels.triton.common import (
    column_block,
    fill_row,
    find_request,
    kernel,
    local_state,
    pack_left,
    search_steps,
    slot_of,
    stripe_of,
    token_position,
)


@kernel
def _topk_to_slots_kernel(
    topk_indices_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    topk_stride: tl.int64,
    num_requests,
    steps,
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
    out_stride: tl.int64,
    out_ptr,
    lens_ptr,
    SHARDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row of the buffer; past the tokens it is padding."""
    token = tl.program_id(0)
    request = find_request(query_start_loc_ptr, num_requests, steps, token, token < num_tokens)
    position = token_position(query_start_loc_ptr, seq_lens_ptr, request, token)
    num_visible = (position + 1) // compress_ratio  # 0 for padding, whose position is -1

    topk_row = topk_indices_ptr + token.to(tl.int64) * topk_stride
    out_row = out_ptr + token.to(tl.int64) * out_stride
    num_read = tl.where(num_visible > 0, width, 0)
    count = 0
    column = 0
    while column < width:
        offs = column + tl.arange(0, BLOCK)
        state = tl.load(topk_row + offs, mask=offs < num_read, other=-1)
        visible = (state >= 0) & (state < num_visible)
        # A visible one fits.
        state = state.to(tl.int32)
        local, owned = local_state(state, stripe, world, rank, interleave, SHARDED)
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
        count = pack_left(slots, out_row, count)
        column += BLOCK
    fill_row(out_row, count, width, BLOCK)
    tl.store(lens_ptr + token, count)


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
        _topk_to_slots_kernel[(out.shape[0],)](
            topk_indices,
            query_start_loc,
            seq_lens,
            block_table,
            topk_indices.stride(0),
            query_start_loc.shape[0] - 1,
            search_steps(query_start_loc),
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
            out.stride(0),
            out,
            lens,
            SHARDED=dcp_world_size > 1,
            BLOCK=block,
            num_warps=num_warps,
        )
    return out, lens
