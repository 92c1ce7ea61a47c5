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
