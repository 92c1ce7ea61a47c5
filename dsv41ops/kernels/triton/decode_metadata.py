"""Everything that a step's layers share, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41ops.kernels.triton.common import (
    FILL_ROWS,
    TOKEN_BLOCK,
    column_block,
    find_requests,
    kernel,
    row_programs,
    stripe_of,
    token_position,
)
from dsv41ops.kernels.triton.compressed_slot_mapping import closed_state_slot
from dsv41ops.kernels.triton.dcp_local_seq_lens import owned_states
from dsv41ops.kernels.triton.sliding_window_indices import window_rows

REQUEST_BLOCK = 128
OUTPUTS = (
    "req_id_per_token",
    "positions",
    "swa_slot_mapping",
    "swa_indices",
    "swa_lens",
    "compressed_slot_mapping_c1a",
    "compressed_slot_mapping_c2a",
    "dcp_local_seq_lens_c1a",
    "dcp_local_seq_lens_c2a",
)


@kernel
def _decode_metadata_kernel(
    query_start_loc_ptr,
    seq_lens_ptr,
    swa_table_ptr,
    c1a_table_ptr,
    c2a_table_ptr,
    replay_start_ptr,
    slot_mapping_ptr,
    num_requests,
    num_tokens,
    num_window_tokens,
    num_replay,
    num_mapped,
    window_programs,
    token_programs,
    swa_stride: tl.int64,
    swa_rows,
    swa_columns,
    swa_page_size,
    c1a_stride: tl.int64,
    c1a_rows,
    c1a_columns,
    c1a_states_per_page,
    c2a_stride: tl.int64,
    c2a_rows,
    c2a_columns,
    c2a_states_per_page,
    window,
    width,
    causal,
    world,
    rank,
    c1a_stripe,
    c1a_first_owned,
    c1a_interleave,
    c2a_stripe,
    c2a_first_owned,
    c2a_interleave,
    num_c1a_requests,
    num_c2a_requests,
    num_req_ids,
    num_positions,
    num_swa_slots,
    num_swa_rows,
    swa_out_stride: tl.int64,
    num_c1a_slots,
    num_c2a_slots,
    num_c1a_lens,
    num_c2a_lens,
    req_id_per_token_ptr,
    positions_ptr,
    swa_slot_mapping_ptr,
    swa_indices_ptr,
    swa_lens_ptr,
    c1a_slot_mapping_ptr,
    c2a_slot_mapping_ptr,
    c1a_lens_ptr,
    c2a_lens_ptr,
    SHARDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Programs of three kinds that share nothing, so that no output waits for another: one per
    window row (ROWS of padding), one per TOKENS entries of the other buffers of tokens, one per
    REQUESTS lengths. What is absent has no rows: its loads and stores are masked.
    """
    program = tl.program_id(0)
    if program < window_programs:
        window_rows(
            program,
            query_start_loc_ptr,
            seq_lens_ptr,
            swa_table_ptr,
            replay_start_ptr,
            num_requests,
            num_window_tokens,
            num_replay,
            swa_stride,
            swa_rows,
            swa_columns,
            swa_page_size,
            window,
            width,
            causal,
            num_swa_rows,
            swa_out_stride,
            swa_indices_ptr,
            swa_lens_ptr,
            ROWS,
            BLOCK,
        )
    elif program < window_programs + token_programs:
        token = (program - window_programs) * TOKENS + tl.arange(0, TOKENS)
        # -1: a replayed token, its state is cached already.
        kept = tl.load(slot_mapping_ptr + token, mask=token < num_mapped, other=0) >= 0
        request = find_requests(query_start_loc_ptr, num_requests, token, num_tokens)
        position = token_position(query_start_loc_ptr, seq_lens_ptr, request, token)
        swa_slot = closed_state_slot(
            swa_table_ptr,
            swa_stride,
            swa_rows,
            swa_columns,
            request,
            position,
            token < num_tokens,
            swa_page_size,
            1,
            1,
            1,
            0,
            1,
            False,
        )
        c1a_slot = closed_state_slot(
            c1a_table_ptr,
            c1a_stride,
            c1a_rows,
            c1a_columns,
            request,
            position,
            kept,
            c1a_states_per_page,
            1,
            c1a_stripe,
            world,
            rank,
            c1a_interleave,
            SHARDED,
        )
        c2a_slot = closed_state_slot(
            c2a_table_ptr,
            c2a_stride,
            c2a_rows,
            c2a_columns,
            request,
            position,
            kept,
            c2a_states_per_page,
            2,
            c2a_stripe,
            world,
            rank,
            c2a_interleave,
            SHARDED,
        )
        tl.store(req_id_per_token_ptr + token, request, mask=token < num_req_ids)
        tl.store(positions_ptr + token, position.to(tl.int64), mask=token < num_positions)
        tl.store(swa_slot_mapping_ptr + token, swa_slot, mask=token < num_swa_slots)
        tl.store(c1a_slot_mapping_ptr + token, c1a_slot, mask=token < num_c1a_slots)
        tl.store(c2a_slot_mapping_ptr + token, c2a_slot, mask=token < num_c2a_slots)
    else:
        block = program - window_programs - token_programs
        row = block * REQUESTS + tl.arange(0, REQUESTS)
        seq_len = tl.load(seq_lens_ptr + row, mask=row < num_requests, other=0)
        c1a_len = owned_states(
            tl.where(row < num_c1a_requests, seq_len, 0),
            1,
            c1a_stripe,
            c1a_first_owned,
            c1a_interleave,
        )
        c2a_len = owned_states(
            tl.where(row < num_c2a_requests, seq_len, 0),
            2,
            c2a_stripe,
            c2a_first_owned,
            c2a_interleave,
        )
        tl.store(c1a_lens_ptr + row, c1a_len, mask=row < num_c1a_lens)
        tl.store(c2a_lens_ptr + row, c2a_len, mask=row < num_c2a_lens)


def launch_decode_metadata(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    swa_block_table: Tensor | None,
    swa_page_size: int | None,
    block_table_c1a: Tensor | None,
    block_table_c2a: Tensor | None,
    block_size: int | None,
    window: int,
    width: int | None,
    causal: bool,
    replay_start: Tensor | None,
    slot_mapping: Tensor | None,
    dcp_world_size: int,
    dcp_rank: int,
    cp_interleave_c1a: int,
    cp_interleave_c2a: int,
    **buffers: Tensor,
) -> tuple[Tensor, ...]:
    num_requests = query_start_loc.shape[0] - 1
    width = window if width is None else width
    tables = (swa_block_table, block_table_c1a, block_table_c2a)
    present = [table is not None for table in tables]
    if buffers:
        outputs = tuple(buffers[name] for name in OUTPUTS)
    else:
        outputs = _new_outputs(query_start_loc, num_tokens, width, present)
    (
        req_id_per_token,
        positions,
        swa_slot_mapping,
        swa_indices,
        _,  # swa_lens, as long as swa_indices
        c1a_slot_mapping,
        c2a_slot_mapping,
        c1a_lens,
        c2a_lens,
    ) = outputs

    num_window_tokens = min(num_tokens, swa_indices.shape[0]) if present[0] else 0
    per_token = (req_id_per_token, positions, swa_slot_mapping, c1a_slot_mapping, c2a_slot_mapping)
    num_entries = max(buffer.shape[0] for buffer in per_token)
    num_lens = max(c1a_lens.shape[0], c2a_lens.shape[0])
    window_programs = row_programs(num_window_tokens, swa_indices.shape[0])
    token_programs = triton.cdiv(num_entries, TOKEN_BLOCK)
    grid = (window_programs + token_programs + triton.cdiv(num_lens, REQUEST_BLOCK),)
    if grid[0] == 0:
        return outputs

    # In the place of an absent tensor stands one that is not read, so that it makes no variant.
    swa, c1a, c2a = (_table_arguments(table, seq_lens) for table in tables)
    replay = replay_start is not None and causal
    shards = [
        (stripe_of(dcp_world_size, each), stripe_of(dcp_rank, each), each)
        for each in (cp_interleave_c1a, cp_interleave_c2a)
    ]
    block, num_warps = column_block(width if window_programs else 1)
    _decode_metadata_kernel[grid](
        query_start_loc,
        seq_lens,
        swa[0],
        c1a[0],
        c2a[0],
        replay_start if replay else seq_lens,
        seq_lens if slot_mapping is None else slot_mapping,
        num_requests,
        num_tokens,
        num_window_tokens,
        num_requests if replay else 0,
        0 if slot_mapping is None else num_tokens,
        window_programs,
        token_programs,
        *swa[1:],
        swa_page_size or 1,
        *c1a[1:],
        block_size or 1,
        *c2a[1:],
        (block_size or 2) // 2 or 1,
        window,
        width,
        int(causal),
        dcp_world_size,
        dcp_rank,
        *shards[0],
        *shards[1],
        num_requests if present[1] else 0,
        num_requests if present[2] else 0,
        req_id_per_token.shape[0],
        positions.shape[0],
        swa_slot_mapping.shape[0],
        swa_indices.shape[0],
        swa_indices.stride(0),
        c1a_slot_mapping.shape[0],
        c2a_slot_mapping.shape[0],
        c1a_lens.shape[0],
        c2a_lens.shape[0],
        *outputs,
        SHARDED=dcp_world_size > 1,
        ROWS=FILL_ROWS,
        BLOCK=block,
        TOKENS=TOKEN_BLOCK,
        REQUESTS=REQUEST_BLOCK,
        num_warps=num_warps,
    )
    return outputs


def _table_arguments(table: Tensor | None, stand_in: Tensor) -> tuple[Tensor, int, int, int]:
    """A table's pointer, row stride, rows and columns."""
    if table is None:
        return stand_in, 0, 0, 0
    return table, table.stride(0), *table.shape


def _new_outputs(
    like: Tensor, num_tokens: int, width: int, present: list[bool]
) -> tuple[Tensor, ...]:
    swa, c1a, c2a = (num_tokens if given else 0 for given in present)
    num_requests = like.shape[0] - 1

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return like.new_empty(shape, dtype=dtype)

    return (
        new(num_tokens),
        new(num_tokens, dtype=torch.int64),
        new(swa, dtype=torch.int64),
        new(swa, width),
        new(swa),
        new(c1a, dtype=torch.int64),
        new(c2a, dtype=torch.int64),
        new(num_requests if present[1] else 0),
        new(num_requests if present[2] else 0),
    )
