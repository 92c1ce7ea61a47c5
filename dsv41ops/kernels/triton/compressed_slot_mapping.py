"""Where each token's compressed state goes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41ops.kernels.triton.common import (
    TOKEN_BLOCK,
    find_requests,
    kernel,
    local_state,
    slot_of,
    stripe_of,
    token_position,
)


@triton.jit
def closed_state_slot(
    block_table_ptr,
    table_stride,
    table_rows,
    table_columns,
    request,
    position,
    kept,
    states_per_page,
    compress_ratio,
    stripe,
    world,
    rank,
    interleave,
    SHARDED: tl.constexpr,
):
    """Slot of the state that a ``kept`` token at ``position`` closes, -1 if it closes none."""
    closes = kept & (position >= 0) & ((position + 1) % compress_ratio == 0)
    state = tl.where(closes, position, 0) // compress_ratio
    local, owned = local_state(state, stripe, world, rank, interleave, SHARDED)
    return slot_of(
        block_table_ptr,
        table_stride,
        table_rows,
        table_columns,
        request,
        local,
        closes & owned,
        states_per_page,
    )


@kernel
def _compressed_slot_mapping_kernel(
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    slot_mapping_ptr,
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
    out_rows,
    out_ptr,
    SHARDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK entries of the buffer; past the tokens they are padding."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = token < num_tokens
    if slot_mapping_ptr is not None:
        # -1: a replayed token, its state is cached already.
        kept = tl.load(slot_mapping_ptr + token, mask=kept, other=-1) >= 0
    request = find_requests(query_start_loc_ptr, num_requests, token, num_tokens)
    position = token_position(query_start_loc_ptr, seq_lens_ptr, request, token)
    slot = closed_state_slot(
        block_table_ptr,
        table_stride,
        table_rows,
        table_columns,
        request,
        position,
        kept,
        states_per_page,
        compress_ratio,
        stripe,
        world,
        rank,
        interleave,
        SHARDED,
    )
    tl.store(out_ptr + token, slot, mask=token < out_rows)


def launch_compressed_slot_mapping(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_tokens: int,
    states_per_page: int,
    compress_ratio: int,
    slot_mapping: Tensor | None,
    dcp_world_size: int,
    dcp_rank: int,
    cp_interleave: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    if out is None:
        out = query_start_loc.new_empty((num_tokens,), dtype=torch.int64)
    out_rows = out.shape[0]
    if out_rows > 0:
        _compressed_slot_mapping_kernel[(triton.cdiv(out_rows, TOKEN_BLOCK),)](
            query_start_loc,
            seq_lens,
            block_table,
            slot_mapping,
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
            out_rows,
            out,
            SHARDED=dcp_world_size > 1,
            BLOCK=TOKEN_BLOCK,
            num_warps=1,
        )
    return out
