"""What one step gets from the scheduler, and what the graph derives from it once for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import dsv41ops


@dataclass(frozen=True)
class CacheGeometry:
    """Sizes of the paged caches and of the per-request state. Fixed for the life of a model."""

    max_requests: int
    max_positions: int  # longest request, in tokens
    num_pages: int  # pages of each compressed cache
    num_swa_pages: int  # pages of each window cache
    block_size: int = 64  # tokens per compressed page
    swa_page_size: int = 32

    def states_per_page(self, ratio: int) -> int:
        return self.block_size // ratio


class StepInputs(NamedTuple):
    """Static buffers of one bucket: ``T`` tokens and ``R`` requests, padding included."""

    token_ids: Tensor  # [T] int64; -1: the token that the request sampled in its last step
    query_start_loc: Tensor  # [R + 1] int32
    seq_lens: Tensor  # [R] int32, after this step
    request_slots: Tensor  # [R] int64 row of the per-request state; max_requests for padding
    swa_block_table: Tensor  # [R, pages] int32, -1: no page
    block_table: Tensor  # [R, pages] int32, -1: no page


class StepContext(NamedTuple):
    """Derived on the device; layers only read it."""

    inputs: StepInputs
    request: Tensor  # [T] int64; 0 for padding
    position: Tensor  # [T] int64; -1 for padding
    previous_in_step: Tensor  # [T] bool: the token before this one is in this step too
    cos_sin: dict[bool, Tensor]  # compressed layer? -> [T, 2, rope_dim / 2] at the position
    state_cos_sin: dict[int, Tensor]  # ratio -> the same at the first position of the group
    swa_slots: Tensor  # [T] int64
    swa_indices: Tensor  # [T, window] int32
    swa_lens: Tensor  # [T] int32
    state_slots: dict[int, Tensor]  # ratio -> [T] int64


def step_context(
    inputs: StepInputs,
    geometry: CacheGeometry,
    window: int,
    ratios: tuple[int, ...],
    tables: dict[bool, Tensor],
) -> StepContext:
    """Everything that a step's layers share, from one op and a little arithmetic."""
    num_tokens = inputs.token_ids.shape[0]
    metadata = dsv41ops.decode_metadata(
        inputs.query_start_loc,
        inputs.seq_lens,
        num_tokens,
        swa_block_table=inputs.swa_block_table,
        swa_page_size=geometry.swa_page_size,
        block_table_c1a=inputs.block_table if 1 in ratios else None,
        block_table_c2a=inputs.block_table if 2 in ratios else None,
        block_size=geometry.block_size,
        window=window,
    )
    row = metadata.req_id_per_token.clamp(min=0).long()
    position = metadata.positions
    token = torch.arange(num_tokens, device=position.device)
    slots = {1: metadata.compressed_slot_mapping_c1a, 2: metadata.compressed_slot_mapping_c2a}
    return StepContext(
        inputs=inputs,
        request=row,
        position=position,
        previous_in_step=token > inputs.query_start_loc[:-1][row],
        cos_sin={kind: table[position.clamp(min=0)] for kind, table in tables.items()},
        state_cos_sin={
            ratio: tables[True][(position // ratio * ratio).clamp(min=0)] for ratio in ratios
        },
        swa_slots=metadata.swa_slot_mapping,
        swa_indices=metadata.swa_indices,
        swa_lens=metadata.swa_lens,
        state_slots={ratio: slots[ratio] for ratio in ratios},
    )
