"""Checks of the compressor's and the indexer's ops."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41ops.checks.common import (
    INT32,
    SLOT_DTYPES,
    check_at_least,
    check_batch,
    check_dcp,
    check_pages,
    check_rope,
    check_size,
    check_tensor,
    check_whole_blocks,
    expect,
    expect_stride,
    shape_of,
)
from dsv41ops.layouts import HEAD_DIM, INDEX_HEAD_DIM, INDEX_RECORDS

F32 = (torch.float32,)
F32_OR_BF16 = (torch.float32, torch.bfloat16)
MAX_INDEX_HEADS = 64
MAX_SELECTED = 2048  # states or blocks
MAX_BLOCK_SIZE = 128


def check_compress_kv(
    kv: Tensor,
    score: Tensor | None,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    norm_weight: Tensor,
    ring_slots: Tensor | None,
    ring: Tensor | None,
    compress_ratio: int,
    eps: float,
    out_dtype: torch.dtype | None,
) -> None:
    check_batch(query_start_loc, seq_lens)
    device = query_start_loc.device
    check_tensor("kv", kv, F32, 2, device)
    check_size("kv", kv, 1, HEAD_DIM, "head_dim")
    check_tensor("norm_weight", norm_weight, F32_OR_BF16, 1, device)
    check_size("norm_weight", norm_weight, 0, HEAD_DIM, "head_dim")
    expect(compress_ratio in (1, 2), "compress_ratio", lambda: f"1 or 2, got {compress_ratio}")
    _check_given("score", score, compress_ratio)
    _check_given("ring_slots", ring_slots, compress_ratio)
    if ring is None or compress_ratio == 2:
        _check_given("ring", ring, compress_ratio)
    else:  # see api.compress_kv
        no_rows = ring.shape[0] == 0
        expect(no_rows, "ring", lambda: f"None with compress_ratio = 1, got {shape_of(ring)}")
    if score is not None and ring_slots is not None and ring is not None:
        check_tensor("score", score, F32, 2, device)
        for dim, what in enumerate(("rows of kv", "head_dim")):
            check_size("score", score, dim, kv.shape[dim], what)
        check_tensor("ring_slots", ring_slots, SLOT_DTYPES, 1, device)
        check_size("ring_slots", ring_slots, 0, seq_lens.shape[0], "len(seq_lens)")
        _check_ring(ring, device)
    expect(
        out_dtype in (None, *F32_OR_BF16),
        "out_dtype",
        lambda: f"torch.float32, torch.bfloat16 or None, got {out_dtype}",
    )


def _check_given(name: str, tensor: Tensor | None, compress_ratio: int) -> None:
    accepted = "a tensor" if compress_ratio == 2 else "None"
    came = "None" if tensor is None else shape_of(tensor)
    given = (tensor is not None) == (compress_ratio == 2)
    expect(given, name, lambda: f"{accepted} with compress_ratio = {compress_ratio}, got {came}")


def _check_ring(ring: Tensor, device: torch.device) -> None:
    check_tensor("ring", ring, F32, 4, device)
    check_size("ring", ring, 2, 2, "kv and score")
    check_size("ring", ring, 3, HEAD_DIM, "head_dim")
    rows, capacity = ring.shape[0], int(ring.shape[1])
    expect(
        capacity >= 2 and capacity.bit_count() == 1,
        "ring",
        lambda: f"a capacity (dimension 1) of a power of two, 2 or more, got {shape_of(ring)}",
    )
    apart = 2 * HEAD_DIM
    dense = ring.stride(1) == apart and ring.stride(2) == HEAD_DIM
    expect_stride("ring", dense, 2, lambda: "the last three dimensions dense", ring)
    size = capacity * apart
    rows_apart = ring.stride(0) >= size
    expect_stride("ring", rows_apart, rows, lambda: f"rows at least {size} elements apart", ring)


def check_indexer_k_insert(
    k: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    compress_ratio: int,
    eps: float,
) -> None:
    device = cache.device
    check_tensor("k", k, F32_OR_BF16, 2, device)
    check_size("k", k, 1, INDEX_HEAD_DIM, "index_head_dim")
    check_tensor("norm_weight", norm_weight, F32_OR_BF16, 1, device)
    check_size("norm_weight", norm_weight, 0, INDEX_HEAD_DIM, "index_head_dim")
    check_rope(positions, cos_sin, k.shape[0], "rows of k", device)
    check_tensor("slot_mapping", slot_mapping, SLOT_DTYPES, 1, device)
    check_size("slot_mapping", slot_mapping, 0, k.shape[0], "rows of k")
    check_index_cache("cache", cache, device)
    check_at_least("compress_ratio", compress_ratio, 1)


def check_index_cache(name: str, cache: Tensor, device: torch.device) -> None:
    """A paged cache of index keys, of either record."""
    check_tensor(name, cache, (torch.uint8,), 3, device)
    accepted = " or ".join(f"{width} ({record.name})" for width, record in INDEX_RECORDS.items())
    width = int(cache.shape[2])
    expect(
        width in INDEX_RECORDS,
        name,
        lambda: f"a last dimension of {accepted}, got {shape_of(cache)}",
    )
    check_pages(name, cache, width)


def check_indexer_topk(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk: int,
    compress_ratio: int,
    candidate_blocks: Tensor | None,
    num_candidate_blocks: int,
    candidate_block_size: int,
    dcp_world_size: int,
    dcp_rank: int,
    cp_interleave: int,
) -> None:
    check_batch(query_start_loc, seq_lens)
    device = query_start_loc.device
    check_tensor("q", q, (torch.bfloat16,), 3, device)
    num_tokens, num_heads, _ = q.shape
    check_size("q", q, 2, INDEX_HEAD_DIM, "index_head_dim")
    _check_range("q's number of heads", num_heads, 1, MAX_INDEX_HEADS)
    check_tensor("weights", weights, F32, 2, device)
    check_size("weights", weights, 0, num_tokens, "tokens")
    check_size("weights", weights, 1, num_heads, "heads")
    check_index_cache("cache", cache, device)
    check_tensor("block_table", block_table, INT32, 2, device)
    _check_range("topk", topk, 1, MAX_SELECTED)
    check_at_least("compress_ratio", compress_ratio, 1)
    if candidate_blocks is not None:
        check_tensor("candidate_blocks", candidate_blocks, INT32, 2, device)
        check_size("candidate_blocks", candidate_blocks, 0, num_tokens, "tokens")
        _check_range("candidate_blocks' width", candidate_blocks.shape[1], 0, MAX_SELECTED)
    _check_range("num_candidate_blocks", num_candidate_blocks, 0, MAX_SELECTED)
    _check_range("candidate_block_size", candidate_block_size, 1, MAX_BLOCK_SIZE)
    check_dcp(dcp_world_size, dcp_rank, cp_interleave)
    check_whole_blocks("cache", cache.shape[1], dcp_world_size, cp_interleave, "pages of {} rows")


def _check_range(name: str, value: int | torch.SymInt, least: int, most: int) -> None:
    expect(value >= least, name, lambda: f"{least} to {most}, got {value}")
    expect(value <= most, name, lambda: f"{least} to {most}, got {value}")


def check_merge_topk(indices: Tensor, scores: Tensor, topk: int) -> None:
    check_tensor("indices", indices, INT32, 3, indices.device)
    check_tensor("scores", scores, F32, 3, indices.device)
    for dim, what in enumerate(("ranks", "tokens", "columns")):
        check_size("scores", scores, dim, indices.shape[dim], what)
    _check_range("topk", topk, 1, MAX_SELECTED)
