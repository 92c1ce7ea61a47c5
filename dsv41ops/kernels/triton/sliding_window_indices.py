"""Window slots of each token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41ops.kernels.triton.common import (
    FILL_ROWS,
    column_block,
    end_row,
    fill_rows,
    kernel,
    locate_token,
    pack_left,
    row_programs,
    slot_of,
)


@triton.jit
def window_rows(
    program,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    replay_start_ptr,
    num_requests,
    num_tokens,
    num_replay,
    table_stride,
    table_rows,
    table_columns,
    page_size,
    window,
    width,
    causal,
    out_rows,
    out_stride,
    out_ptr,
    lens_ptr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token's row; from the ``num_tokens``-th program on, ROWS rows of padding.

    ``num_replay`` requests have a ``replay_start``: all or none.
    """
    if program < num_tokens:
        token = program
        request, position, first_query, seq_len = locate_token(
            query_start_loc_ptr, seq_lens_ptr, num_requests, token
        )
        replayed = (request >= 0) & (request < num_replay)
        replay_start = tl.load(replay_start_ptr + request, mask=replayed, other=0)
        # A token of a draft block sees the window before the block, and the whole block.
        newest = tl.where(causal != 0, position, seq_len - 1)
        newest = tl.where(position >= 0, newest, -1)
        oldest = tl.where(
            causal != 0,
            tl.maximum(position - (window - 1), replay_start),
            first_query - window,
        )
        oldest = tl.maximum(oldest, 0).to(tl.int32)

        out_row = out_ptr + token.to(tl.int64) * out_stride
        count = 0
        column = 0
        while column < width:
            offs = column + tl.arange(0, BLOCK)
            # Counted from the newest: which pages to read does not wait for replay_start.
            cached = newest - (width - 1) + offs
            slots = slot_of(
                block_table_ptr,
                table_stride,
                table_rows,
                table_columns,
                request,
                cached,
                (offs < width) & (cached >= 0),
                page_size,
            )
            start = tl.maximum(oldest - newest + (width - 1) - column, 0)
            count = pack_left(tl.where(cached >= oldest, slots, -1), start, out_row, count)
            column += BLOCK
        end_row(out_row, lens_ptr + token, count, width, BLOCK)
    else:
        first = num_tokens + (program - num_tokens) * ROWS
        fill_rows(first, out_rows, out_stride, width, out_ptr, lens_ptr, ROWS, BLOCK)


@kernel
def _sliding_window_indices_kernel(
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    replay_start_ptr,
    num_requests,
    num_tokens,
    num_replay,
    table_stride: tl.int64,
    table_rows,
    table_columns,
    page_size,
    window,
    width,
    causal,
    out_rows,
    out_stride: tl.int64,
    out_ptr,
    lens_ptr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token, then one per ROWS rows of padding."""
    window_rows(
        tl.program_id(0),
        query_start_loc_ptr,
        seq_lens_ptr,
        block_table_ptr,
        replay_start_ptr,
        num_requests,
        num_tokens,
        num_replay,
        table_stride,
        table_rows,
        table_columns,
        page_size,
        window,
        width,
        causal,
        out_rows,
        out_stride,
        out_ptr,
        lens_ptr,
        ROWS,
        BLOCK,
    )


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
        # Without replay_start its place is taken by a tensor that is not read: one variant less.
        replay = replay_start is not None and causal
        num_requests = query_start_loc.shape[0] - 1
        _sliding_window_indices_kernel[(row_programs(num_tokens, out.shape[0]),)](
            query_start_loc,
            seq_lens,
            block_table,
            replay_start if replay else seq_lens,
            num_requests,
            num_tokens,
            num_requests if replay else 0,
            block_table.stride(0),
            block_table.shape[0],
            block_table.shape[1],
            page_size,
            window,
            width,
            int(causal),
            out.shape[0],
            out.stride(0),
            out,
            lens,
            ROWS=FILL_ROWS,
            BLOCK=block,
            num_warps=num_warps,
        )
    return out, lens
