"""Window slots of each token."""

import torch
import triton.language as tl
from torch import Tensor

from dsv41ops.kernels.triton.common import (
    column_block,
    fill_row,
    find_request,
    kernel,
    pack_left,
    search_steps,
    slot_of,
    token_position,
)


@kernel
def _sliding_window_indices_kernel(
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    replay_start_ptr,
    num_requests,
    steps,
    num_tokens,
    table_stride: tl.int64,
    table_rows,
    table_columns,
    page_size,
    window,
    width,
    out_stride: tl.int64,
    out_ptr,
    lens_ptr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row of the buffer; past the tokens it is padding."""
    token = tl.program_id(0)
    request = find_request(query_start_loc_ptr, num_requests, steps, token, token < num_tokens)
    position = token_position(query_start_loc_ptr, seq_lens_ptr, request, token)
    known = position >= 0
    if CAUSAL:
        newest = position.to(tl.int64)
        oldest = newest - (window - 1)
        if replay_start_ptr is not None:
            oldest = tl.maximum(oldest, tl.load(replay_start_ptr + request, mask=known, other=0))
    else:
        # A draft block: every token sees the window before the block, and the whole block.
        start = tl.load(query_start_loc_ptr + request, mask=known, other=0).to(tl.int64)
        end = tl.load(query_start_loc_ptr + request + 1, mask=known, other=0)
        newest = tl.load(seq_lens_ptr + request, mask=known, other=0).to(tl.int64) - 1
        oldest = newest + 1 - (end - start) - window
    oldest = tl.maximum(tl.maximum(oldest, 0), newest - (width - 1))
    newest = tl.where(known, newest, -1)

    out_row = out_ptr + token.to(tl.int64) * out_stride
    count = 0
    column = 0
    while column < width:
        offs = column + tl.arange(0, BLOCK)
        cached = oldest + offs
        visible = (offs < width) & (cached <= newest)
        slots = slot_of(
            block_table_ptr,
            table_stride,
            table_rows,
            table_columns,
            request,
            cached.to(tl.int32),  # a visible one fits
            visible,
            page_size,
        )
        count = pack_left(slots, out_row, count)
        column += BLOCK
    fill_row(out_row, count, width, BLOCK)
    tl.store(lens_ptr + token, count)


def launch_sliding_window_indices(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_tokens: int,
    page_size: int,
    window: int,
    width: int | None,
    causal: bool,
    replay_start: Tensor | None,
    *,
    out: Tensor | None = None,
    lens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    width = window if width is None else width
    if out is None or lens is None:
        out = query_start_loc.new_empty((num_tokens, width), dtype=torch.int32)
        lens = query_start_loc.new_empty((num_tokens,), dtype=torch.int32)
    if out.shape[0] > 0:
        block, num_warps = column_block(width)
        _sliding_window_indices_kernel[(out.shape[0],)](
            query_start_loc,
            seq_lens,
            block_table,
            replay_start if causal else None,
            query_start_loc.shape[0] - 1,
            search_steps(query_start_loc),
            num_tokens,
            block_table.stride(0),
            block_table.shape[0],
            block_table.shape[1],
            page_size,
            window,
            width,
            out.stride(0),
            out,
            lens,
            CAUSAL=causal,
            BLOCK=block,
            num_warps=num_warps,
        )
    return out, lens
