"""Public functions: latents of the compressor, index keys and the selection of states."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41ops.api.call import call
from dsv41ops.layouts import HEAD_DIM


def compress_kv(
    kv: Tensor,
    score: Tensor | None,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    norm_weight: Tensor,
    ring_slots: Tensor | None,
    ring: Tensor | None,
    compress_ratio: int,
    eps: float = 1e-20,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Latent of the group of tokens that each token closes, across steps.

    Of ratio 1 every token is a group: ``latent = kv * rsqrt(mean(kv^2) + eps) * norm_weight``. Of
    ratio 2 a token at an odd position closes one with the token before it, and the same norm is
    taken of ``sum kv * softmax(score)`` over the two, per column. The token before is in this step
    or in the request's ring, which then gets the newest rows of this step: after rejected drafts
    the next step just begins at an earlier position.

    Args:
        kv: ``[T, 512]`` float32, any row stride.
        score: ``[T, 512]`` float32, any row stride, of ratio 2; None of ratio 1.
        query_start_loc: ``[R + 1]`` int32, as in :func:`token_to_request`.
        seq_lens: ``[R]`` int32, tokens of each request after this step.
        norm_weight: ``[512]`` float32 or bfloat16.
        ring_slots: ``[R]`` int32 or int64, each request's row of the ring, unique among those with
            tokens; None of ratio 1. One below 0 or past the ring is neither read nor written: a
            first token at an odd position is then pooled alone.
        ring: ``[rows, capacity, 2, 512]`` float32, the last three dimensions dense: kv and score of
            the token at ``position % capacity``; None of ratio 1. Written: the newest ``capacity``
            tokens of each request. The capacity is a power of two, at least 2 more than the tokens
            that may be rejected.
        compress_ratio: Tokens per group, 1 or 2.
        eps: Added to the mean of squares.
        out_dtype: ``torch.float32``, or bfloat16, which None stands for.

    Returns:
        ``[T, 512]``; zeros for a token that closes no group: padding, a negative position, or of
        ratio 2 an even one. A NaN stays in its group, and so does what two equal infinite scores
        make.

    Raises:
        ValueError: An argument breaks the shapes, dtypes or strides above, or ``score``,
            ``ring_slots`` and ``ring`` do not go with the ratio.
    """
    if ring is None and compress_ratio == 1 and isinstance(kv, Tensor):
        # Inductor fails where the one argument that an op writes is None and it has a result.
        ring = kv.new_empty((0, 2, 2, HEAD_DIM))
    result: Tensor = call(
        "compress_kv",
        kv,
        score,
        query_start_loc,
        seq_lens,
        norm_weight,
        ring_slots,
        ring,
        compress_ratio,
        eps,
        out_dtype,
    )
    return result


def indexer_k_insert(
    k: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    compress_ratio: int = 1,
    eps: float = 1e-20,
) -> None:
    """Norm, rotate and encode index keys into their paged cache, in place.

    ``key = rope(k * rsqrt(mean(k^2) + eps) * norm_weight)``, with the last 64 columns rotated as in
    :func:`rope_kv_cache_insert`, in float32 up to the record's own codes. :func:`new_index_cache`
    allocates a cache.

    Args:
        k: ``[T, 128]`` float32 or bfloat16, any row stride: the key's projection of a latent.
        norm_weight: ``[128]`` float32 or bfloat16.
        positions: ``[T]`` int32 or int64, of the token that closes the key's group; the key is
            rotated to the group's first token, ``positions // compress_ratio * compress_ratio``.
            Below 0 or without a row in ``cos_sin``: no write.
        cos_sin: ``[num_positions, 64]`` float32, any row stride: 32 cosines, then 32 sines.
        slot_mapping: ``[T]`` int32 or int64 slots ``page * page_size + row``. Below 0 or past the
            cache means no write. Slots of one call are unique; of duplicates one row is left,
            possibly torn.
        cache: ``[pages, page_size, bytes]`` uint8, any page stride, 132 bytes (fp8) or 68 (mxfp4).
            Written: the bytes of the named rows only.
        compress_ratio: Tokens per group, at least 1.
        eps: Added to the mean of squares.

    Raises:
        ValueError: An argument breaks the shapes, dtypes, strides or ranges above.
    """
    call(
        "indexer_k_insert",
        k,
        norm_weight,
        positions,
        cos_sin,
        slot_mapping,
        cache,
        compress_ratio,
        eps,
    )


def indexer_topk(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk: int,
    compress_ratio: int,
    candidate_blocks: Tensor | None = None,
    num_candidate_blocks: int = 0,
    candidate_block_size: int = 8,
    dcp_world_size: int = 1,
    dcp_rank: int = 0,
    cp_interleave: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Score the states that each token may see, and select the best.

    ``score(s) = sum_h weights[h] * relu(q[h] . k[s])`` in float32, for the states
    ``s < (position + 1) // compress_ratio`` that have a page. Of them the ``topk`` of best score
    are selected, of equal scores those of lower number; NaN is never selected.

    Args:
        q: ``[T, H, 128]`` bfloat16, rotated, H from 1 to 64, last dimension contiguous.
        weights: ``[T, H]`` float32, scaled (``128**-0.5 * H**-0.5`` in the release).
        cache: Index keys, see :func:`indexer_k_insert`; ``cache.shape[1]`` states per page.
        query_start_loc: ``[R + 1]`` int32.
        seq_lens: ``[R]`` int32, lengths after this step.
        block_table: ``[rows, P]`` int32, any row stride; -1: no page, its states are absent.
        topk: 1 to 2048.
        compress_ratio: Tokens per state, at least 1.
        candidate_blocks: ``[T, C']`` int32, C' up to 2048, in any order, or None. Only states of
            these blocks are looked at; -1 is none. No block twice in a row.
        num_candidate_blocks: ``C``, 0 to 2048. Above 0 also the best ``C`` blocks are returned: a
            block's score is its best state's; that of the newest visible state's block is +inf.
        candidate_block_size: States of a block, 1 to 128.
        dcp_world_size: DCP ranks. This one looks at the states it owns; numbers stay global.
        dcp_rank: This rank.
        cp_interleave: States in one run of a rank; divides ``cache.shape[1]`` under DCP.

    Returns:
        topk_indices ``[T, topk]`` int32, ascending, -1 beyond; their scores float32, -inf beyond;
        and alike the candidate blocks and their scores, ``[T, C]``. :func:`merge_topk` merges
        those of several ranks.

    Raises:
        ValueError: An argument breaks the shapes, dtypes, strides or ranges above.
    """
    result: tuple[Tensor, Tensor, Tensor, Tensor] = call(
        "indexer_topk",
        q,
        weights,
        cache,
        query_start_loc,
        seq_lens,
        block_table,
        topk,
        compress_ratio,
        candidate_blocks,
        num_candidate_blocks,
        candidate_block_size,
        dcp_world_size,
        dcp_rank,
        cp_interleave,
    )
    return result


def merge_topk(indices: Tensor, scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Merge the selections of several ranks: the best of all, ties to the lower number.

    Ranks' lists of at least ``topk`` states or blocks give what one rank would have selected,
    bit for bit.

    Args:
        indices: ``[N, T, K]`` int32 numbers of states or blocks, any K; -1: no entry. A number of
            several ranks (a block, of which each owns some states) is one entry.
        scores: ``[N, T, K]`` float32; the largest of a number counts. NaN: no entry.
        topk: 1 to 2048.

    Returns:
        indices ``[T, topk]`` int32, ascending, -1 beyond; scores ``[T, topk]`` float32, -inf
        beyond.

    Raises:
        ValueError: An argument breaks the shapes, dtypes, strides or ranges above.
    """
    result: tuple[Tensor, Tensor] = call("merge_topk", indices, scores, topk)
    return result
