"""Indexer: scores every compressed state of a token's request and selects the best."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphs.batch import CacheGeometry, StepContext
from graphs.config import ModelConfig
from graphs.rope import rotate


class IndexKeys(nn.Module):
    """Index keys of one compressed cache, in its slots; one spare row takes what has no slot."""

    keys: Tensor

    def __init__(self, config: ModelConfig, geometry: CacheGeometry, ratio: int) -> None:
        super().__init__()
        self.states_per_page = geometry.states_per_page(ratio)
        num_slots = geometry.num_pages * self.states_per_page
        keys = torch.zeros(num_slots + 1, config.index_head_dim)
        self.register_buffer("keys", keys, persistent=False)

    def insert(self, keys: Tensor, slots: Tensor) -> None:
        """``keys [T, 128]`` to ``slots [T]``; -1: not kept."""
        spare = self.keys.shape[0] - 1
        self.keys[torch.where(slots >= 0, slots, spare)] = keys

    def of_requests(self, block_table: Tensor) -> Tensor:
        """``[R, P * states_per_page, 128]``; rows of absent pages hold anything."""
        row = torch.arange(self.states_per_page, device=block_table.device)
        slots = block_table.clamp(min=0).long()[:, :, None] * self.states_per_page + row
        return self.keys[slots.flatten(1)]


class Indexer(nn.Module):
    """Selects ``index_topk`` states per token; ties go to the lower state number."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.is_candidate_source = layer == config.candidate_source_layer_id
        self.uses_candidates = layer > config.candidate_source_layer_id
        self.ratio = config.ratio(layer)
        heads, width = config.index_n_heads, config.index_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, heads * width, bias=False)
        self.weights_proj = nn.Linear(config.hidden_size, heads, bias=False)
        if layer in config.kv_source_layer_ids:
            self.wk = nn.Linear(config.head_dim, width, bias=False)
            self.k_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)

    def key(self, latent: Tensor, cos_sin: Tensor) -> Tensor:
        """Index key ``[T, 128]`` of a latent whose group starts at ``cos_sin``'s position."""
        return rotate(self.k_norm(self.wk(latent)), cos_sin)

    def forward(
        self,
        x: Tensor,
        q_latent: Tensor,
        index_keys: IndexKeys,
        step: StepContext,
        candidates: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """States ``[T, index_topk]`` int32, ascending, -1 beyond; and the candidate mask."""
        keys = index_keys.of_requests(step.inputs.block_table)[step.request]  # [T, S, 128]
        q = self.wq_b(q_latent).unflatten(1, (self.config.index_n_heads, -1))
        q = rotate(q, step.cos_sin[True])
        scale = (self.config.index_head_dim * self.config.index_n_heads) ** -0.5
        head_weight = self.weights_proj(x) * scale
        products = torch.bmm(q, keys.transpose(1, 2)).relu()
        scores = torch.bmm(head_weight[:, None], products).squeeze(1)  # [T, S]
        num_visible = (step.position + 1) // self.ratio
        state = torch.arange(scores.shape[1], device=scores.device)
        scores = scores.masked_fill(state >= num_visible[:, None], -torch.inf)
        if self.is_candidate_source:
            candidates = self._candidates(scores, num_visible)
        elif self.uses_candidates and candidates is not None:
            scores = scores.masked_fill(~candidates, -torch.inf)
        return self._select(scores), candidates

    def _candidates(self, scores: Tensor, num_visible: Tensor) -> Tensor:
        """``[T, S]``: is the state in one of the best blocks? The newest block always is."""
        size = self.config.candidate_block_size
        num_states = scores.shape[1]
        padded = nn.functional.pad(scores, (0, -num_states % size), value=-torch.inf)
        best = padded.unflatten(1, (-1, size)).amax(2)
        block = torch.arange(best.shape[1], device=scores.device)
        newest = (num_visible - 1) // size
        best = best.masked_fill(block == newest[:, None], torch.inf)
        order = best.sort(dim=1, descending=True, stable=True).indices
        kept = order[:, : self.config.candidate_topk_blocks]
        mask = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
        return mask.repeat_interleave(size, 1)[:, :num_states]

    def _select(self, scores: Tensor) -> Tensor:
        topk, num_states = self.config.index_topk, scores.shape[1]
        best = scores.sort(dim=1, descending=True, stable=True)
        # Absent states sort last.
        states = torch.where(best.values > -torch.inf, best.indices, num_states)[:, :topk]
        states = nn.functional.pad(states, (0, topk - states.shape[1]), value=num_states)
        states = states.sort(dim=1).values
        return torch.where(states < num_states, states, -1).int()
