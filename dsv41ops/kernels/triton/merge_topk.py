"""Merge several ranks' selections of each token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41ops.kernels.triton.common import kernel
from dsv41ops.kernels.triton.selection import ABSENT, best, to_key, to_score

MAX_ENTRIES = 4096  # sorted at once
NOTHING = tl.constexpr(2**63 - 1)  # sorts behind every entry; its key is ABSENT


@kernel
def _merge_topk_kernel(
    indices_ptr,
    scores_ptr,
    num_entries,
    width,
    indices_rank_stride: tl.int64,
    indices_token_stride: tl.int64,
    scores_rank_stride: tl.int64,
    scores_token_stride: tl.int64,
    topk,
    kept_ptr,
    merged_ptr,
    merged_scores_ptr,
    SIZE: tl.constexpr,
):
    """One program per token. Entries are sorted by number, the best score of one first; the others
    of that number are dropped, and the best chosen. SIZE at a time: the best so far and more.
    """
    token = tl.program_id(0).to(tl.int64)
    indices_row = indices_ptr + token * indices_token_stride
    scores_row = scores_ptr + token * scores_token_stride
    kept_row = kept_ptr + token * topk
    offs = tl.arange(0, SIZE)
    count = 0
    start = 0
    while start < num_entries:
        entry = start + offs - count
        here = (offs >= count) & (entry < num_entries)
        rank = (entry // width).to(tl.int64)
        place = entry % width
        numbers = tl.load(indices_row + rank * indices_rank_stride + place, mask=here, other=-1)
        keys = to_key(tl.load(scores_row + rank * scores_rank_stride + place, mask=here, other=0.0))
        descending = (keys ^ 0x7FFFFFFF).to(tl.int64) & 0xFFFFFFFF
        items = (numbers.to(tl.int64) << 32) | descending
        items = tl.where((numbers < 0) | (keys == ABSENT), NOTHING, items)
        kept = tl.load(kept_row + offs, mask=offs < count, other=NOTHING)
        items = tl.sort(tl.where(offs < count, kept, items))
        numbers = (items >> 32).to(tl.int32)
        keys = items.to(tl.int32) ^ 0x7FFFFFFF
        before = tl.gather(numbers, tl.maximum(offs - 1, 0), 0)
        keys = tl.where((offs > 0) & (before == numbers), ABSENT, keys)
        present = tl.sum((keys != ABSENT).to(tl.int32), 0)
        keep, _ = best(keys, present, topk)
        position = tl.cumsum(keep.to(tl.int32), 0) - 1
        start += SIZE - count
        count = tl.minimum(present, topk).to(tl.int32)
        if start < num_entries:
            tl.debug_barrier()  # all kept ones have been read
            tl.store(kept_row + position, items, mask=keep)
            tl.debug_barrier()
        else:
            tl.store(merged_ptr + token * topk + position, numbers, mask=keep)
            tl.store(merged_scores_ptr + token * topk + position, to_score(keys), mask=keep)
    while count < topk:
        column = count + tl.arange(0, 128)
        tl.store(merged_ptr + token * topk + column, -1, mask=column < topk)
        tl.store(merged_scores_ptr + token * topk + column, float("-inf"), mask=column < topk)
        count += 128


def launch_merge_topk(indices: Tensor, scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    num_ranks, num_tokens, width = indices.shape
    merged = indices.new_empty((num_tokens, topk))
    merged_scores = scores.new_empty((num_tokens, topk))
    if num_tokens == 0:
        return merged, merged_scores
    entries = num_ranks * width
    size = min(MAX_ENTRIES, max(512, triton.next_power_of_2(entries)))
    if entries > size:
        size = MAX_ENTRIES
        kept = indices.new_empty((num_tokens, topk), dtype=torch.int64)
    else:
        kept = indices.new_empty((1,), dtype=torch.int64)
    _merge_topk_kernel[(num_tokens,)](
        indices,
        scores,
        entries,
        width,
        indices.stride(0),
        indices.stride(1),
        scores.stride(0),
        scores.stride(1),
        topk,
        kept,
        merged,
        merged_scores,
        SIZE=size,
        num_warps=max(4, size // 256),
    )
    return merged, merged_scores
