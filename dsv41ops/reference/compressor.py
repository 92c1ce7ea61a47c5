"""Pool groups of tokens to latents, across steps by a ring of each request's newest rows."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41ops.reference.geometry import per_request, token_positions
from dsv41ops.reference.norm import rms_norm


def compress_kv(
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
) -> Tensor:
    request, position, first = token_positions(query_start_loc, seq_lens, kv.shape[0])
    closes = (position >= 0) & ((position + 1) % compress_ratio == 0)
    if score is not None and ring_slots is not None and ring is not None:
        row = torch.stack([kv, score], 1)  # [T, 2, 512], as the ring holds it
        slot = per_request(ring_slots, request)
        slot = torch.where((slot >= 0) & (slot < ring.shape[0]), slot, -1)
        token = torch.arange(kv.shape[0], device=kv.device)
        # A request's first token of this step, for the earlier ones of which positions are < 0.
        opens = (token == 0) | (position == first.clamp(min=0))
        kv = _pool(row, _previous(row, opens, position, slot, ring), ~opens | (slot >= 0))
        _remember(row, position, per_request(seq_lens, request), slot, ring)
    latent = rms_norm(kv, norm_weight, eps).masked_fill(~closes[:, None], 0)
    return latent.to(torch.bfloat16 if out_dtype is None else out_dtype)


def _previous(row: Tensor, opens: Tensor, position: Tensor, slot: Tensor, ring: Tensor) -> Tensor:
    """The row of each token's predecessor; anything where there is none."""
    in_step = row.roll(1, 0)
    if ring.shape[0] == 0:
        return in_step
    before = ring[slot.clamp(min=0), (position - 1) % ring.shape[1]]
    return torch.where(opens[:, None, None], before, in_step)


def _pool(row: Tensor, previous: Tensor, has_previous: Tensor) -> Tensor:
    """Softmax over the two scores, by their difference: a finite beside an infinite one is fine."""
    kv, score = row.unbind(1)
    previous_kv, previous_score = previous.unbind(1)
    lead = score - previous_score
    pooled = previous_kv * _weight(-lead) + kv * _weight(lead)
    return torch.where(has_previous[:, None], pooled, kv)


def _weight(lead: Tensor) -> Tensor:
    return 1 / (1 + (-lead).exp())


def _remember(row: Tensor, position: Tensor, seq_len: Tensor, slot: Tensor, ring: Tensor) -> None:
    """Keep the newest ``capacity`` rows of each request."""
    capacity = ring.shape[1]
    kept = (position >= 0) & (seq_len - position <= capacity) & (slot >= 0)
    ring[slot[kept], position[kept] % capacity] = row[kept]
