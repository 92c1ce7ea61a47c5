"""Checks of the index ops."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41ops.checks.common import (
    INT32,
    SLOT_DTYPES,
    check_at_least,
    check_batch,
    check_dcp,
    check_holds,
    check_size,
    check_states,
    check_tensor,
    expect,
)


def check_token_to_request(query_start_loc: Tensor, num_tokens: int) -> None:
    check_tensor("query_start_loc", query_start_loc, INT32, 1, query_start_loc.device)
    check_at_least("query_start_loc's length", query_start_loc.shape[0], 1)
    check_at_least("num_tokens", num_tokens, 0)


def check_compressed_slot_mapping(
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
) -> None:
    check_batch(query_start_loc, seq_lens)
    check_tensor("block_table", block_table, INT32, 2, query_start_loc.device)
    check_at_least("num_tokens", num_tokens, 0)
    check_states(states_per_page, compress_ratio, dcp_world_size, dcp_rank, cp_interleave)
    if slot_mapping is not None:
        check_tensor("slot_mapping", slot_mapping, SLOT_DTYPES, 1, query_start_loc.device)
        check_holds("slot_mapping", slot_mapping, num_tokens)


def check_compressed_slot_mapping_out(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_tokens: int,
    *options: object,
    out: Tensor,
) -> None:
    check_compressed_slot_mapping(query_start_loc, seq_lens, block_table, num_tokens, *options)  # type: ignore[arg-type]
    check_tensor("out", out, (torch.int64,), 1, query_start_loc.device)
    check_holds("out", out, num_tokens)


def check_dcp_local_seq_lens(
    seq_lens: Tensor, compress_ratio: int, dcp_world_size: int, dcp_rank: int, cp_interleave: int
) -> None:
    check_tensor("seq_lens", seq_lens, INT32, 1, seq_lens.device)
    check_at_least("compress_ratio", compress_ratio, 1)
    check_dcp(dcp_world_size, dcp_rank, cp_interleave)


def check_sliding_window_indices(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_tokens: int,
    page_size: int,
    window: int,
    width: int | None,
    causal: bool,
    replay_start: Tensor | None,
) -> None:
    check_batch(query_start_loc, seq_lens)
    check_tensor("block_table", block_table, INT32, 2, query_start_loc.device)
    check_at_least("num_tokens", num_tokens, 0)
    check_at_least("page_size", page_size, 1)
    check_window(window, width, causal)
    check_replay_start(replay_start, seq_lens)


def check_window(window: int, width: int | None, causal: bool) -> None:
    check_at_least("window", window, 1)
    if causal:
        holds = width is None or width >= window
        expect(holds, "width", lambda: f"at least window = {window}, or None, got {width}")
    else:
        # The least that is right depends on the longest query, which is not known here.
        holds = width is not None and width >= 1
        accepted = "window plus the draft block, rounded up to 64, when causal=False"
        expect(holds, "width", lambda: f"{accepted}, got {width}")


def check_replay_start(replay_start: Tensor | None, seq_lens: Tensor) -> None:
    if replay_start is not None:
        check_tensor("replay_start", replay_start, INT32, 1, seq_lens.device)
        check_size("replay_start", replay_start, 0, seq_lens.shape[0], "len(seq_lens)")


def check_sliding_window_indices_out(
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
    out: Tensor,
    lens: Tensor,
) -> None:
    check_sliding_window_indices(
        query_start_loc,
        seq_lens,
        block_table,
        num_tokens,
        page_size,
        window,
        width,
        causal,
        replay_start,
    )
    _check_index_out(out, lens, num_tokens, window if width is None else width, seq_lens.device)


def _check_index_out(
    out: Tensor, lens: Tensor, num_tokens: int, width: int, device: torch.device
) -> None:
    check_tensor("out", out, INT32, 2, device)
    check_holds("out", out, num_tokens)
    check_size("out", out, 1, width, "index width")
    check_tensor("lens", lens, INT32, 1, device)
    check_size("lens", lens, 0, out.shape[0], "rows of out")


def check_topk_to_slots(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    states_per_page: int,
    compress_ratio: int,
    dcp_world_size: int,
    dcp_rank: int,
    cp_interleave: int,
) -> None:
    check_tensor("topk_indices", topk_indices, SLOT_DTYPES, 2, query_start_loc.device)
    check_batch(query_start_loc, seq_lens)
    check_tensor("block_table", block_table, INT32, 2, query_start_loc.device)
    check_states(states_per_page, compress_ratio, dcp_world_size, dcp_rank, cp_interleave)


def check_topk_to_slots_out(
    topk_indices: Tensor, *options: object, out: Tensor, lens: Tensor
) -> None:
    check_topk_to_slots(topk_indices, *options)  # type: ignore[arg-type]
    num_tokens, width = topk_indices.shape
    _check_index_out(out, lens, num_tokens, width, topk_indices.device)
