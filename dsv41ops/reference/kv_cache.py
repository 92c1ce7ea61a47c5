"""KV insert and gather on a paged cache of any record."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41ops.layouts import HEAD_DIM, ROPE_DIM, record_of
from dsv41ops.reference.records import decode, encode, read_rows, to_bf16, write_rows
from dsv41ops.reference.rope import group_start, has_position, rotate_last


def kv_cache_insert(kv: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
    record = record_of(cache)
    slots = slot_mapping.to(torch.int64)
    written = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    write_rows(cache, record, slots[written], encode(kv[written], record))


def rope_kv_cache_insert(
    kv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    compress_ratio: int,
) -> None:
    starts = group_start(positions, compress_ratio)
    nope, rope = kv.split([HEAD_DIM - ROPE_DIM, ROPE_DIM], 1)
    rope = rotate_last(rope.float(), starts, cos_sin)
    rows = torch.cat([nope, to_bf16(rope) if kv.dtype == torch.bfloat16 else rope], 1)
    slots = torch.where(has_position(starts, cos_sin), slot_mapping, -1)
    kv_cache_insert(rows, slots, cache)


def kv_cache_gather(cache: Tensor, slots: Tensor) -> Tensor:
    return gather_rows(cache, slots).to(torch.bfloat16)


def gather_rows(cache: Tensor, slots: Tensor) -> Tensor:
    """``[N, 512]`` f32 or bf16 rows of the slots; zeros for a slot outside the cache."""
    num_slots = cache.shape[0] * cache.shape[1]
    if num_slots == 0:
        return cache.new_zeros((slots.shape[0], HEAD_DIM), dtype=torch.float32)
    record = record_of(cache)
    valid = (slots >= 0) & (slots < num_slots)
    rows = read_rows(cache, record, torch.where(valid, slots, 0).to(torch.int64))
    return decode(rows.masked_fill(~valid[:, None], 0), record)
