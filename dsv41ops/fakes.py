"""One ``fake_<op>`` per op that returns tensors: what it returns, without data.

Arguments arrive complete and checked (see ``ops.py``). Nothing branches on a size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41ops.layouts import HEAD_DIM


def fake_token_to_request(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    return query_start_loc.new_empty((num_tokens,), dtype=torch.int32)


def fake_compressed_slot_mapping(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_tokens: int,
    *options: object,
) -> Tensor:
    return query_start_loc.new_empty((num_tokens,), dtype=torch.int64)


def fake_dcp_local_seq_lens(seq_lens: Tensor, *options: object) -> Tensor:
    return seq_lens.new_empty((seq_lens.shape[0],), dtype=torch.int32)


def fake_sliding_window_indices(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_tokens: int,
    page_size: int,
    window: int,
    width: int | None,
    *options: object,
) -> tuple[Tensor, Tensor]:
    return _index_rows(query_start_loc, num_tokens, window if width is None else width)


def fake_topk_to_slots(topk_indices: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    return _index_rows(topk_indices, topk_indices.shape[0], topk_indices.shape[1])


def _index_rows(like: Tensor, num_tokens: int, width: int) -> tuple[Tensor, Tensor]:
    return (
        like.new_empty((num_tokens, width), dtype=torch.int32),
        like.new_empty((num_tokens,), dtype=torch.int32),
    )


def fake_decode_metadata(
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
    *options: object,
) -> tuple[Tensor, ...]:
    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return query_start_loc.new_empty(shape, dtype=dtype)

    tables = (swa_block_table, block_table_c1a, block_table_c2a)
    swa, c1a, c2a = (0 if table is None else num_tokens for table in tables)
    num_requests = seq_lens.shape[0]
    return (
        new(num_tokens),
        new(num_tokens, dtype=torch.int64),
        new(swa, dtype=torch.int64),
        *_index_rows(query_start_loc, swa, window if width is None else width),
        new(c1a, dtype=torch.int64),
        new(c2a, dtype=torch.int64),
        new(0 if block_table_c1a is None else num_requests),
        new(0 if block_table_c2a is None else num_requests),
    )


def fake_compress_kv(kv: Tensor, *options: object) -> Tensor:
    out_dtype = options[-1] if isinstance(options[-1], torch.dtype) else torch.bfloat16
    return kv.new_empty((kv.shape[0], HEAD_DIM), dtype=out_dtype)


def fake_kv_cache_gather(cache: Tensor, slots: Tensor) -> Tensor:
    return cache.new_empty((slots.shape[0], HEAD_DIM), dtype=torch.bfloat16)


def fake_sparse_mla_decode(q: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, head_dim = q.shape
    return (
        q.new_empty((num_tokens, num_heads, head_dim)),
        q.new_empty((num_tokens, num_heads), dtype=torch.float32),
    )


def fake_indexer_topk(
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
    *options: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    selected = _scored_rows(q, q.shape[0], topk)
    return *selected, *_scored_rows(q, q.shape[0], num_candidate_blocks)


def fake_merge_topk(indices: Tensor, scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    return _scored_rows(indices, indices.shape[1], topk)


def _scored_rows(like: Tensor, num_tokens: int, width: int) -> tuple[Tensor, Tensor]:
    return (
        like.new_empty((num_tokens, width), dtype=torch.int32),
        like.new_empty((num_tokens, width), dtype=torch.float32),
    )


def fake_merge_attention_states(
    outs: Tensor, lses: Tensor, attn_sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    _, num_tokens, num_heads, head_dim = outs.shape
    return (
        outs.new_empty((num_tokens, num_heads, head_dim)),
        lses.new_empty((num_tokens, num_heads)),
    )
