"""The best of the states that a token may see.

Two kernels: programs that score a share of a token's states and keep the best of it (in
``indexer_scores``), and programs that merge the lists of a token. What lies between is bounded by
the number of programs.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41ops.configs import INDEXER_MAX_SPLITS, INDEXER_MIN_ROWS, IndexerConfig, indexer_config
from dsv41ops.kernels.device import sms_and_capability
from dsv41ops.kernels.triton.common import kernel, stripe_of
from dsv41ops.kernels.triton.indexer_scores import _indexer_scores_kernel
from dsv41ops.kernels.triton.selection import ABSENT, best, to_score


@triton.jit
def _merge(
    lists_ptr,
    list_stride,
    counts_ptr,
    num_lists,
    k,
    kept_ptr,
    numbers_ptr,
    scores_ptr,
    FINAL: tl.constexpr,
    SIZE: tl.constexpr,
    LISTS: tl.constexpr,
):
    """The ``k`` best of some lists, whose numbers ascend from list to list, SIZE entries at a time;
    to memory, where the best so far are kept, or as numbers and scores. Returns how many."""
    which = tl.arange(0, LISTS)
    counts = tl.load(counts_ptr + which, mask=which < num_lists, other=0)
    longest = tl.maximum(tl.max(counts, 0), 1)
    total = tl.max(tl.where(counts > 0, which + 1, 0), 0) * longest
    offs = tl.arange(0, SIZE)
    count = 0
    start = 0
    done = False
    while not done:
        # First those kept, then as many entries as there is room for.
        entry = start + offs - count
        index = entry // longest
        place = entry % longest
        length = tl.load(counts_ptr + index, mask=(entry >= 0) & (entry < total), other=0)
        here = (entry >= 0) & (place < length)
        source = lists_ptr + (index.to(tl.int64) * list_stride + place)
        half = list_stride // 2
        if start > 0:
            is_kept = offs < count
            here = here & (offs >= count)
            kept_keys = tl.load(kept_ptr + offs, mask=is_kept, other=ABSENT)
            kept_numbers = tl.load(kept_ptr + k + offs, mask=is_kept, other=-1)
            keys = tl.where(is_kept, kept_keys, tl.load(source, mask=here, other=ABSENT))
            numbers = tl.where(is_kept, kept_numbers, tl.load(source + half, mask=here, other=-1))
        else:
            keys = tl.load(source, mask=here, other=ABSENT)
            numbers = tl.load(source + half, mask=here, other=-1)
        start += SIZE - count
        present = tl.sum((keys > ABSENT).to(tl.int32), 0)
        keep, _ = best(keys, present, k)
        position = tl.cumsum(keep.to(tl.int32), 0) - 1
        count = tl.minimum(present, k).to(tl.int32)
        done = start >= total
        if FINAL and done:
            tl.store(numbers_ptr + position, numbers, mask=keep)
            tl.store(scores_ptr + position, to_score(keys), mask=keep)
        else:
            tl.debug_barrier()  # all kept ones have been read
            tl.store(kept_ptr + position, keys, mask=keep)
            tl.store(kept_ptr + k + position, numbers, mask=keep)
            tl.debug_barrier()
    return count


@kernel
def _merge_lists_kernel(
    scratch_ptr,
    counts_ptr,
    block_scratch_ptr,
    block_counts_ptr,
    list_stride,
    block_list_stride,
    num_lists,
    lists_per_group,
    topk,
    num_candidate_blocks,
    first_token,
    kept_ptr,
    kept_counts_ptr,
    block_kept_ptr,
    block_kept_counts_ptr,
    indices_ptr,
    scores_ptr,
    blocks_ptr,
    block_scores_ptr,
    FINAL: tl.constexpr,
    SIZE: tl.constexpr,
    LISTS: tl.constexpr,
):
    """One program per token, group of its lists, and kind: states, or candidate blocks."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    program = row * tl.num_programs(1) + group
    if tl.program_id(2) == 0:
        lists, counts, stride, k = scratch_ptr, counts_ptr, list_stride, topk
        kept, kept_counts, numbers, scores = kept_ptr, kept_counts_ptr, indices_ptr, scores_ptr
    else:
        lists, counts, stride = block_scratch_ptr, block_counts_ptr, block_list_stride
        k = num_candidate_blocks
        kept, kept_counts = block_kept_ptr, block_kept_counts_ptr
        numbers, scores = blocks_ptr, block_scores_ptr
    first = group * lists_per_group
    numbers += (first_token + row) * k
    scores += (first_token + row) * k
    count = _merge(
        lists + (row * num_lists + first) * stride,
        stride,
        counts + row * num_lists + first,
        tl.minimum(lists_per_group, num_lists - first),
        k,
        kept + program * (2 * k),
        numbers,
        scores,
        FINAL,
        SIZE,
        LISTS,
    )
    if FINAL:
        while count < k:
            offs = count + tl.arange(0, 128)
            tl.store(numbers + offs, -1, mask=offs < k)
            tl.store(scores + offs, float("-inf"), mask=offs < k)
            count += 128
    else:
        tl.store(kept_counts + program, count)


def variants(
    topk: int, num_candidate_blocks: int, num_candidates: int, candidate_block_size: int
) -> list[dict[str, IndexerConfig]]:
    """Launch options that cover every variant, whatever the tokens and the table's width: a merge
    of each size, in groups and of all."""
    by_block = num_candidate_blocks > 0 or num_candidates > 0
    found = {}
    for splits in range(1, INDEXER_MAX_SPLITS + 1):
        config = indexer_config(
            1,
            splits * INDEXER_MIN_ROWS,
            candidate_block_size if by_block else 0,
            topk,
            num_candidate_blocks,
            num_candidates,
            INDEXER_MAX_SPLITS,
        )
        small = replace(config, splits=2, lists_per_group=1)
        found[config.merge_size] = {"config": small}
    return list(found.values())


def launch_indexer_topk(
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
    config: IndexerConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_heads, _ = q.shape
    indices = q.new_empty((num_tokens, topk), dtype=torch.int32)
    scores = q.new_empty((num_tokens, topk), dtype=torch.float32)
    blocks = q.new_empty((num_tokens, num_candidate_blocks), dtype=torch.int32)
    block_scores = q.new_empty((num_tokens, num_candidate_blocks), dtype=torch.float32)
    if num_tokens == 0:
        return indices, scores, blocks, block_scores
    with_filter, with_blocks = candidate_blocks is not None, num_candidate_blocks > 0
    num_candidates = candidate_blocks.shape[1] if candidate_blocks is not None else 0
    states_per_page = cache.shape[1]
    if config is None:
        in_table = block_table.shape[1] * states_per_page
        config = indexer_config(
            num_tokens,
            num_candidates * candidate_block_size if with_filter else in_table,
            candidate_block_size if with_filter or with_blocks else 0,
            topk,
            num_candidate_blocks,
            num_candidates,
            sms_and_capability(q.device)[0],
        )
    whole = dcp_world_size == 1 or cp_interleave % candidate_block_size == 0
    step, splits = config.tokens, config.splits
    programs = step * splits
    groups = triton.cdiv(splits, config.lists_per_group)

    def scratch(rows: int, width: int) -> Tensor:
        return q.new_empty((rows, width), dtype=torch.int32)

    lists, counts = scratch(programs, 2 * config.size), scratch(programs, 1)
    sums = scratch(programs, 2 * config.chunk_rows).view(torch.float32)
    offsets = q.new_empty((programs, config.chunk_rows), dtype=torch.int64)
    kept, kept_counts = scratch(step * groups, 2 * topk), scratch(step * groups, 1)
    final_kept = scratch(step, 2 * topk) if groups > 1 else kept
    block_lists, block_counts, block_kept, block_kept_counts, final_block_kept = (
        lists,
        counts,
        kept,
        kept_counts,
        final_kept,
    )
    if with_blocks:
        width = 2 * num_candidate_blocks
        block_lists = scratch(programs, 2 * config.block_size)
        block_counts = scratch(programs, 1)
        block_kept, block_kept_counts = scratch(step * groups, width), scratch(step * groups, 1)
        final_block_kept = scratch(step, width) if groups > 1 else block_kept
    in_order = scratch(programs, config.candidates) if with_filter else lists
    outputs = (indices, scores, blocks, block_scores)
    kinds = 2 if with_blocks else 1
    for first in range(0, num_tokens, step):
        rows = min(step, num_tokens - first)
        _indexer_scores_kernel[(rows, splits)](
            q,
            weights,
            cache,
            query_start_loc,
            seq_lens,
            block_table,
            candidate_blocks,
            first,
            num_tokens,
            query_start_loc.shape[0] - 1,
            q.stride(0),
            q.stride(1),
            weights.stride(0),
            cache.stride(0),
            cache.shape[0],
            states_per_page,
            block_table.stride(0),
            block_table.shape[0],
            block_table.shape[1],
            candidate_blocks.stride(0) if candidate_blocks is not None else 0,
            num_candidates,
            compress_ratio,
            candidate_block_size,
            int(whole),
            stripe_of(dcp_world_size, cp_interleave),
            dcp_rank * cp_interleave,
            cp_interleave,
            splits,
            topk,
            num_candidate_blocks,
            lists,
            counts,
            block_lists,
            block_counts,
            offsets,
            sums,
            in_order,
            RECORD=cache.shape[2],
            HEADS=num_heads,
            HEAD_BLOCK=max(16, triton.next_power_of_2(num_heads)),
            SHARDED=dcp_world_size > 1,
            FILTER=with_filter,
            BLOCKS=with_blocks,
            ALIGNED=cache.data_ptr() % 16 == 0 and cache.stride(0) % 16 == 0,
            BN=config.rows,
            LB=config.rows_per_block,
            TILES=config.tiles,
            MIN_TILES=config.min_tiles,
            SIZE=config.size,
            BLOCK_SIZE=config.block_size,
            CANDIDATES=config.candidates,
            STAGES=config.stages,
            num_warps=config.num_warps,
            maxnreg=config.registers,
        )
        if groups > 1:
            _merge_lists_kernel[(rows, groups, kinds)](
                lists,
                counts,
                block_lists,
                block_counts,
                2 * config.size,
                2 * config.block_size,
                splits,
                config.lists_per_group,
                topk,
                num_candidate_blocks,
                first,
                kept,
                kept_counts,
                block_kept,
                block_kept_counts,
                *outputs,
                FINAL=False,
                SIZE=config.merge_size,
                LISTS=config.merge_lists,
                num_warps=config.merge_warps,
            )
            sources = (kept, kept_counts, block_kept, block_kept_counts)
            sizes = (2 * topk, 2 * num_candidate_blocks, groups, groups)
        else:
            sources = (lists, counts, block_lists, block_counts)
            sizes = (2 * config.size, 2 * config.block_size, splits, splits)
        _merge_lists_kernel[(rows, 1, kinds)](
            *sources,
            *sizes,
            topk,
            num_candidate_blocks,
            first,
            final_kept,
            kept_counts,
            final_block_kept,
            block_kept_counts,
            *outputs,
            FINAL=True,
            SIZE=config.merge_size,
            LISTS=config.merge_lists,
            num_warps=config.merge_warps,
        )
    return indices, scores, blocks, block_scores
