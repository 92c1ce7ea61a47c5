"""Compressor: pools groups of tokens into latents, across chunk and step boundaries."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphs.batch import StepContext
from graphs.config import ModelConfig


class Compressor(nn.Module):
    """Latent of the group that each token closes; for other tokens the value is unused.

    The rows of a group that is still open wait in ``ring [max_requests + 1, capacity, 2, 512]``
    (KV and score), at position mod capacity. The last request row takes padding.
    """

    RING_CAPACITY = 2  # a power of two >= drafts + 2

    ring: Tensor

    def __init__(self, config: ModelConfig, ratio: int, max_requests: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.wkv = nn.Linear(config.hidden_size, config.head_dim, bias=False)
        self.norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        if ratio == 2:
            self.wgate = nn.Linear(config.hidden_size, config.head_dim, bias=False)
            ring = torch.zeros(max_requests + 1, self.RING_CAPACITY, 2, config.head_dim)
            self.register_buffer("ring", ring, persistent=False)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """``x [T, hidden]`` to latents ``[T, 512]``."""
        if self.ratio == 1:
            latent: Tensor = self.norm(self.wkv(x))
            return latent
        row = torch.stack([self.wkv(x), self.wgate(x)], 1)  # [T, 2, 512]
        slot = step.inputs.request_slots[step.request]
        before = self.ring[slot, (step.position - 1) % self.RING_CAPACITY]
        in_step = torch.cat([row[:1], row[:-1]])
        previous = torch.where(step.previous_in_step[:, None, None], in_step, before)
        self._remember(row, slot, step)
        kv, score = torch.stack([previous, row], 1).unbind(2)  # [T, 2 tokens, 512] each
        pooled: Tensor = self.norm((kv * score.softmax(1)).sum(1))
        return pooled

    def _remember(self, row: Tensor, slot: Tensor, step: StepContext) -> None:
        """Write the newest ``capacity`` tokens of each request; the rest go to the spare row."""
        left = step.inputs.seq_lens[step.request] - step.position
        keep = (step.position >= 0) & (left <= self.RING_CAPACITY)
        spare = self.ring.shape[0] - 1
        self.ring[torch.where(keep, slot, spare), step.position % self.RING_CAPACITY] = row
