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
    """Everything that a step's layers share, from the index ops and a little arithmetic."""
    num_tokens = inputs.token_ids.shape[0]
    batch = (inputs.query_start_loc, inputs.seq_lens)
    request = dsv41ops.token_to_request(inputs.query_start_loc, num_tokens)
    row = request.clamp(min=0).long()
    start, end = inputs.query_start_loc[:-1][row], inputs.query_start_loc[1:][row]
    token = torch.arange(num_tokens, device=request.device)
    position = inputs.seq_lens[row] - end + token
    position = torch.where(request >= 0, position, -1)
    swa_indices, swa_lens = dsv41ops.sliding_window_indices(
        *batch, inputs.swa_block_table, num_tokens, geometry.swa_page_size, window
    )
    return StepContext(
        inputs=inputs,
        request=row,
        position=position,
        previous_in_step=token > start,
        cos_sin={kind: table[position.clamp(min=0)] for kind, table in tables.items()},
        state_cos_sin={
            ratio: tables[True][(position // ratio * ratio).clamp(min=0)] for ratio in ratios
        },
        # A window cache is a compressed cache of ratio 1.
        swa_slots=dsv41ops.compressed_slot_mapping(
            *batch, inputs.swa_block_table, num_tokens, geometry.swa_page_size, 1
        ),
        swa_indices=swa_indices,
        swa_lens=swa_lens,
        state_slots={
            ratio: dsv41ops.compressed_slot_mapping(
                *batch, inputs.block_table, num_tokens, geometry.states_per_page(ratio), ratio
            )
            for ratio in ratios
        },
    )
