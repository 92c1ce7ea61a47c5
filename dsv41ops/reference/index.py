"""Index ops: from batch geometry and block tables to requests, slots and lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41ops.reference.geometry import (
    local_state,
    pack_left,
    per_request,
    request_of,
    slot_of,
    token_positions,
)


def token_to_request(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    return request_of(query_start_loc, num_tokens).to(torch.int32)


def compressed_slot_mapping(
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
) -> Tensor:
    request, position, _ = token_positions(query_start_loc, seq_lens, num_tokens)
    closes = (position >= 0) & ((position + 1) % compress_ratio == 0)
    if slot_mapping is not None:
        closes &= slot_mapping[:num_tokens] >= 0  # -1: replayed, its state is cached already
    state = torch.where(closes, position // compress_ratio, -1)
    local = local_state(state, dcp_world_size, dcp_rank, cp_interleave)
    return slot_of(block_table, request, local, states_per_page)


def dcp_local_seq_lens(
    seq_lens: Tensor, compress_ratio: int, dcp_world_size: int, dcp_rank: int, cp_interleave: int
) -> Tensor:
    states = seq_lens.to(torch.int64).clamp(min=0) // compress_ratio
    stripe = cp_interleave * dcp_world_size
    rest = (states % stripe - dcp_rank * cp_interleave).clamp(0, cp_interleave)
    return (states // stripe * cp_interleave + rest).to(torch.int32)


def sliding_window_indices(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_tokens: int,
    page_size: int,
    window: int,
    width: int | None,
    causal: bool,
    replay_start: Tensor | None,
) -> tuple[Tensor, Tensor]:
    width = window if width is None else width
    request, position, first_query = token_positions(query_start_loc, seq_lens, num_tokens)
    if causal:
        oldest, newest = position - (window - 1), position
        if replay_start is not None:
            oldest = torch.maximum(oldest, per_request(replay_start, request))
    else:
        # A draft block: every token sees the window before the block, and the whole block.
        oldest, newest = first_query - window, per_request(seq_lens, request) - 1
    oldest = torch.maximum(oldest.clamp(min=0), newest - (width - 1))
    column = torch.arange(width, device=seq_lens.device)
    token = oldest[:, None] + column
    visible = (position >= 0)[:, None] & (token <= newest[:, None])
    token = torch.where(visible, token, -1)
    return pack_left(slot_of(block_table, request[:, None], token, page_size))


def topk_to_slots(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    states_per_page: int,
    compress_ratio: int,
    dcp_world_size: int,
    dcp_rank: int,
    cp_interleave: int,
) -> tuple[Tensor, Tensor]:
    num_tokens = topk_indices.shape[0]
    request, position, _ = token_positions(query_start_loc, seq_lens, num_tokens)
    state = topk_indices.to(torch.int64)
    visible = (position + 1) // compress_ratio  # 0 for padding, whose position is -1
    state = torch.where(state < visible[:, None], state, -1)
    local = local_state(state, dcp_world_size, dcp_rank, cp_interleave)
    return pack_left(slot_of(block_table, request[:, None], local, states_per_page))


def decode_metadata(
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
) -> tuple[Tensor, ...]:
    batch = (query_start_loc, seq_lens)
    request = token_to_request(query_start_loc, num_tokens)
    _, position, _ = token_positions(*batch, num_tokens)
    swa_slots = seq_lens.new_empty((0,), dtype=torch.int64)
    swa_rows = seq_lens.new_empty((0, window if width is None else width)), seq_lens.new_empty(0)
    if swa_block_table is not None and swa_page_size is not None:
        swa = (*batch, swa_block_table, num_tokens, swa_page_size)
        # To its slots the window cache is one of ratio 1, whole on every rank.
        swa_slots = compressed_slot_mapping(*swa, 1, None, 1, 0, 1)
        swa_rows = sliding_window_indices(*swa, window, width, causal, replay_start)
    slots, lens = [], []
    for ratio, table, cp_interleave in (
        (1, block_table_c1a, cp_interleave_c1a),
        (2, block_table_c2a, cp_interleave_c2a),
    ):
        if table is None or block_size is None:
            slots.append(seq_lens.new_empty((0,), dtype=torch.int64))
            lens.append(seq_lens.new_empty(0))
            continue
        dcp = (dcp_world_size, dcp_rank, cp_interleave)
        states = block_size // ratio
        slots.append(
            compressed_slot_mapping(*batch, table, num_tokens, states, ratio, slot_mapping, *dcp)
        )
        lens.append(dcp_local_seq_lens(seq_lens, ratio, *dcp))
    return request, position, swa_slots, *swa_rows, *slots, *lens
