"""Sizes of the caches, and what one step gets from the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class CacheGeometry:
    """Sizes of the paged caches and of the per-request state. Fixed for the life of a model."""

    max_requests: int
    max_positions: int  # longest request, in tokens
    num_pages: int  # pages of each compressed cache
    num_swa_pages: int  # pages of each window cache
    block_size: int = 64  # tokens per compressed page
    swa_page_size: int = 32
    num_drafts: int = 0  # tokens of a request that may be rejected after a step


class StepInputs(NamedTuple):
    """Static buffers of one bucket: ``T`` tokens and ``R`` requests, padding included."""

    token_ids: Tensor  # [T] int64; -1: the request's last sampled token, -1 - i: its i-th draft
    query_start_loc: Tensor  # [R + 1] int32
    seq_lens: Tensor  # [R] int32, after this step
    request_slots: Tensor  # [R] int64 row of the per-request state; max_requests for padding
    swa_block_table: Tensor  # [R, pages] int32, -1: no page
    block_table: Tensor  # [R, pages] int32, -1: no page
