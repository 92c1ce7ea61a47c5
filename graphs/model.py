"""The DeepSeek-V4.1 attention stack as one decode step: tokens in, next tokens out.

Layers are ``dsv41ops.nn.SparseMLAAttention``; parameter names are the checkpoint's. The residual
stream and its norms are float32, whatever the dtype of the projections.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dsv41ops.nn import (
    AttentionGeometry,
    CompressedCache,
    Selection,
    SparseMLAAttention,
    StepMetadata,
    rope_table,
    step_metadata,
)
from graphs.batch import CacheGeometry, StepInputs
from graphs.config import ModelConfig
from graphs.verify import Verified, fed_tokens, verify


class StepOutputs(NamedTuple):
    """What one step returns; rows of padding hold anything."""

    verified: Verified  # each request's new tokens, greedy
    hidden: Tensor  # [layers + 1, T, hidden]: the input of each layer, and the last output
    lse: Tensor  # [layers, T, H]
    selected: dict[int, Tensor]  # index source layer -> [T, index_topk] int32


class CacheTypes(NamedTuple):
    """Records of the window and compressed caches and of the index keys."""

    swa_cache: str = "mxfp8"
    cache: str = "nvfp4"
    index_cache: str = "fp8"


def attention_geometry(
    config: ModelConfig, caches: CacheGeometry, layer: int, types: CacheTypes
) -> AttentionGeometry:
    """What the config says about one layer; also for layers past the stack's, of ratio 0."""
    is_candidate_source = layer == config.candidate_source_layer_id
    return AttentionGeometry(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        o_groups=config.o_groups,
        o_lora_rank=config.o_lora_rank,
        num_swa_pages=caches.num_swa_pages,
        swa_page_size=caches.swa_page_size,
        swa_cache_dtype=types.swa_cache,
        compress_ratio=config.ratio(layer),
        is_kv_source=layer in config.kv_source_layer_ids,
        is_index_source=layer in config.index_source_layer_ids,
        index_num_heads=config.index_n_heads,
        index_topk=config.index_topk,
        num_candidate_blocks=config.candidate_topk_blocks if is_candidate_source else 0,
        candidate_block_size=config.candidate_block_size,
        num_pages=caches.num_pages,
        block_size=caches.block_size,
        cache_dtype=types.cache,
        index_cache_dtype=types.index_cache,
        max_requests=caches.max_requests,
        num_drafts=caches.num_drafts,
        eps=config.rms_norm_eps,
    )


class Layer(nn.Module):
    """Pre-norm and attention; the residual is the model's."""

    def __init__(
        self, config: ModelConfig, geometry: AttentionGeometry, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, dtype=torch.float32
        )
        self.attn = SparseMLAAttention(geometry, dtype)

    def forward(
        self,
        hidden: Tensor,
        metadata: StepMetadata,
        source: CompressedCache | None,
        selection: Selection | None,
    ) -> tuple[Tensor, Tensor, Selection | None]:
        out, lse, selection = self.attn(self._norm(hidden), metadata, source, selection)
        return out.float(), lse, selection

    def insert_window(self, hidden: Tensor, metadata: StepMetadata) -> None:
        self.attn.insert_window(self._norm(hidden), metadata)

    def _norm(self, hidden: Tensor) -> Tensor:
        x: Tensor = self.attn_norm(hidden)
        return x.to(self.attn.wq_a.weight.dtype)


class DecodeModel(nn.Module):
    """The stack, its caches, and each request's last sampled token with the drafts after it."""

    rope: Tensor
    compressed_rope: Tensor
    pending: Tensor  # [max_requests + 1, 1 + drafts] int64; the last row takes padding

    def __init__(
        self,
        config: ModelConfig,
        geometry: CacheGeometry,
        types: CacheTypes = CacheTypes(),  # noqa: B008 (immutable)
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config, self.geometry, self.types = config, geometry, types
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(
            Layer(config, attention_geometry(config, geometry, layer, types), dtype)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=torch.float32)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        tables = {
            "rope": rope_table(geometry.max_positions, config.rope_theta),
            "compressed_rope": rope_table(
                geometry.max_positions, config.compress_rope_theta, config.rope_scaling.yarn
            ),
        }
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)
        pending = torch.zeros(geometry.max_requests + 1, 1 + geometry.num_drafts, dtype=torch.int64)
        self.register_buffer("pending", pending, persistent=False)
        self.ratios = tuple(sorted({config.ratio(n) for n in config.compressed_layers}))
        self.kv_sources = {
            n: config.kv_source(n)
            for n in config.compressed_layers
            if n not in config.kv_source_layer_ids
        }

    def forward(self, inputs: StepInputs) -> StepOutputs:
        """One step of a mixed batch. Writes the caches, the rings and ``pending``."""
        metadata = self.metadata(inputs)
        fed = fed_tokens(inputs, metadata.req_id_per_token, self.pending)
        hidden = self.embed(fed).float()
        selection: Selection | None = None
        hiddens, lses, selected = [hidden], [], {}
        for layer_id, layer in enumerate(self.layers):
            source = None
            if layer_id in self.kv_sources:
                source = self.attention(self.kv_sources[layer_id]).compressed_cache
            attn_out, lse, selection = layer(hidden, metadata, source, selection)
            if selection is not None and layer_id in self.config.index_source_layer_ids:
                selected[layer_id] = selection.states
            hidden = hidden + attn_out
            hiddens.append(hidden)
            lses.append(lse)
        verified = verify(inputs, fed, self.pending, lambda rows: self.greedy(hidden[rows]))
        return StepOutputs(verified, torch.stack(hiddens), torch.stack(lses), selected)

    def attention(self, layer: int) -> SparseMLAAttention:
        """One layer's attention, with its caches."""
        attn = self.layers[layer].attn
        assert isinstance(attn, SparseMLAAttention)
        return attn

    def metadata(self, inputs: StepInputs) -> StepMetadata:
        """What all layers of the stack share in this step."""
        return step_metadata(
            inputs.query_start_loc,
            inputs.seq_lens,
            inputs.token_ids.shape[0],
            inputs.swa_block_table,
            self.geometry.swa_page_size,
            self.rope,
            block_table_c1a=inputs.block_table if 1 in self.ratios else None,
            block_table_c2a=inputs.block_table if 2 in self.ratios else None,
            block_size=self.geometry.block_size if self.ratios else None,
            compressed_cos_sin=self.compressed_rope,
            request_slots=inputs.request_slots,
            window=self.config.sliding_window,
        )

    def greedy(self, hidden: Tensor) -> Tensor:
        """``[N, hidden]`` to the greedy token after each row."""
        tokens: Tensor = self.head(self.norm(hidden).to(self.head.weight.dtype)).argmax(1)
        return tokens
