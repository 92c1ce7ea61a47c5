"""The indexer: scores of a token's compressed states, the best of them, and merged selections."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41ops.reference.geometry import slot_of, token_positions
from dsv41ops.reference.index_keys import decode_index_keys


def indexer_topk(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, size = q.shape[0], candidate_block_size
    request, position, _ = token_positions(query_start_loc, seq_lens, num_tokens)
    num_visible = (position + 1) // compress_ratio  # 0 for padding, whose position is -1
    num_slots = cache.shape[0] * cache.shape[1]
    local = torch.arange(block_table.shape[1] * cache.shape[1], device=q.device)
    state = _global_state(local, dcp_world_size, dcp_rank, cp_interleave)
    block = state // size
    selected = _empty_rows(q, num_tokens, topk)
    candidates = _empty_rows(q, num_tokens, num_candidate_blocks)
    for t in range(num_tokens):
        slots = slot_of(block_table, request[t], local, cache.shape[1])
        cached = (state < num_visible[t]) & (slots >= 0) & (slots < num_slots)
        if candidate_blocks is not None:
            cached &= torch.isin(block, candidate_blocks[t])
        scores = _scores(q[t], weights[t], decode_index_keys(cache, slots))
        present = cached & ~scores.isnan()
        _put(selected, t, *_best(torch.where(present, state, -1), scores, topk))
        newest = block == (num_visible[t] - 1) // size
        of_blocks = torch.where(newest, torch.inf, scores)
        kept = torch.where(newest, cached, present)
        blocks = _distinct(torch.where(kept, block, -1), of_blocks)
        _put(candidates, t, *_best(*blocks, num_candidate_blocks))
    return *selected, *candidates


def merge_topk(indices: Tensor, scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    num_tokens = indices.shape[1]
    merged = _empty_rows(scores, num_tokens, topk)
    for t in range(num_tokens):
        numbers, of_numbers = indices[:, t].flatten().to(torch.int64), scores[:, t].flatten()
        numbers = torch.where(of_numbers.isnan(), -1, numbers)
        _put(merged, t, *_best(*_distinct(numbers, of_numbers + 0.0), topk))
    return merged


def _scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """``sum_h weights[h] * relu(q[h] . k)`` of every key: the exact sum, rounded once.

    In float64 it does not depend on where a key lies among the others. 0 has no sign.
    """
    products = (keys.double() @ q.double().T).relu()
    return (products @ weights.double()).float() + 0.0


def _global_state(local: Tensor, world: int, rank: int, interleave: int) -> Tensor:
    if world == 1:
        return local
    return (local // interleave * world + rank) * interleave + local % interleave


def _best(numbers: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` of best score among those ``>= 0``, ties to the lower; ascending."""
    order = numbers.argsort(stable=True)
    order = order[scores[order].argsort(stable=True, descending=True)]
    order = order[(numbers[order] < 0).to(torch.int8).argsort(stable=True)][:count]
    order = order[numbers[order].argsort(stable=True)]
    # Whatever is below 0 now comes first; the results are written from the right place on.
    return numbers[order], scores[order]


def _distinct(numbers: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Of entries with the same number only the one of the largest score; the others become -1."""
    order = scores.argsort(stable=True, descending=True)
    order = order[numbers[order].argsort(stable=True)]
    numbers, scores = numbers[order], scores[order]
    again = torch.zeros_like(numbers, dtype=torch.bool)
    again[1:] = numbers[1:] == numbers[:-1]
    return torch.where(again, -1, numbers), scores


def _empty_rows(like: Tensor, num_tokens: int, width: int) -> tuple[Tensor, Tensor]:
    return (
        torch.full((num_tokens, width), -1, dtype=torch.int32, device=like.device),
        torch.full((num_tokens, width), -torch.inf, device=like.device),
    )


def _put(rows: tuple[Tensor, Tensor], t: int, numbers: Tensor, scores: Tensor) -> None:
    """Row t: numbers ``>= 0`` packed left in their order, their scores beside them."""
    valid = numbers >= 0
    width = rows[0].shape[1]
    place = torch.where(valid, valid.cumsum(0) - 1, width)
    for row, values in zip(rows, (numbers, scores), strict=True):
        padded = torch.cat([row[t], row.new_empty(1)])
        row[t] = padded.scatter(0, place, values.to(row.dtype))[:width]
