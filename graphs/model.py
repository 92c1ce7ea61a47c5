"""The DeepSeek-V4.1 attention stack as one decode step: tokens in, next tokens out.

Parameter names are the checkpoint's. Activations are float32; only what goes through an op is
bfloat16 (queries and KV rows), so that the step can be compared with a float64 run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

import dsv41ops
from graphs.batch import CacheGeometry, StepContext, StepInputs, step_context
from graphs.compressor import Compressor
from graphs.config import ModelConfig
from graphs.indexer import Indexer, IndexKeys
from graphs.rope import cos_sin_table, rotate


class StepOutputs(NamedTuple):
    """What one step returns; rows of padding hold anything."""

    next_token: Tensor  # [R] int64, greedy
    hidden: Tensor  # [layers + 1, T, hidden]: the input of each layer, and the last output
    lse: Tensor  # [layers, T, H]
    selected: dict[int, Tensor]  # index source layer -> [T, index_topk] int32


class Selection(NamedTuple):
    """Which compressed states a token attends to; made by an index source, reused after it."""

    states: Tensor  # [T, index_topk] int32, -1: none
    slots: Tensor  # [T, index_topk] int32
    lens: Tensor  # [T] int32
    candidates: Tensor | None  # [T, S] bool


def round_for_record(kv: Tensor, record: str) -> Tensor:
    """float32 rows to bfloat16, such that encoding them rounds as if from float32.

    Rounding twice, to bf16 and then to the record, would move values that lie near the middle of
    two codes. Rounding to odd first (truncate, and set the last bit if anything was lost) does
    not, as long as the record is at least two bits coarser.
    """
    if record == "bf16":
        return kv.bfloat16()
    bits = kv.view(torch.int32)
    odd = (bits & -0x10000) | ((bits & 0xFFFF) != 0).int() << 16
    rows = odd.view(torch.float32).bfloat16()
    if record == "fp8_ds_mla":  # its RoPE part stays bf16
        rows = torch.cat([rows[:, :448], kv[:, 448:].bfloat16()], 1)
    return rows


class Attention(nn.Module):
    """One layer's attention with its caches. A kv source also has the compressed ones."""

    swa_cache: Tensor
    cache: Tensor
    index_keys: IndexKeys

    def __init__(
        self,
        config: ModelConfig,
        geometry: CacheGeometry,
        layer: int,
        swa_cache_dtype: str,
        cache_dtype: str,
    ) -> None:
        super().__init__()
        self.config, self.layer, self.ratio = config, layer, config.ratio(layer)
        self.states_per_page = geometry.states_per_page(max(self.ratio, 1))
        self.swa_cache_dtype, self.cache_dtype = swa_cache_dtype, cache_dtype
        hidden, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
        eps = config.rms_norm_eps
        self.wq_a = nn.Linear(hidden, config.q_lora_rank, bias=False)
        self.q_norm = nn.RMSNorm(config.q_lora_rank, eps=eps)
        self.wq_b = nn.Linear(config.q_lora_rank, heads * width, bias=False)
        self.wkv = nn.Linear(hidden, width, bias=False)
        self.kv_norm = nn.RMSNorm(width, eps=eps)
        group_in, low_rank = heads * width // config.o_groups, config.o_groups * config.o_lora_rank
        self.wo_a = nn.Linear(group_in, low_rank, bias=False)
        self.wo_b = nn.Linear(low_rank, hidden, bias=False)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        swa_cache = dsv41ops.new_kv_cache(
            geometry.num_swa_pages, geometry.swa_page_size, swa_cache_dtype
        )
        self.register_buffer("swa_cache", swa_cache, persistent=False)
        self.indexer = Indexer(config, layer) if layer in config.index_source_layer_ids else None
        self.compressor: Compressor | None = None
        if layer in config.kv_source_layer_ids:
            self.compressor = Compressor(config, self.ratio, geometry.max_requests)
            cache = dsv41ops.new_kv_cache(geometry.num_pages, self.states_per_page, cache_dtype)
            self.register_buffer("cache", cache, persistent=False)
            self.index_keys = IndexKeys(config, geometry, self.ratio)

    def forward(
        self,
        x: Tensor,
        step: StepContext,
        source: Attention | None,
        selection: Selection | None,
    ) -> tuple[Tensor, Tensor, Selection | None]:
        """``x [T, hidden]``, normalised, to attention output, lse ``[T, H]``, and the selection.

        Args:
            source: The layer that owns the compressed cache; None for a window-only layer.
            selection: The last index source's.
        """
        cos_sin = step.cos_sin[self.ratio > 0]
        q_latent = self.q_norm(self.wq_a(x))
        q = rotate(self.wq_b(q_latent).unflatten(1, (-1, self.config.head_dim)), cos_sin)
        kv = round_for_record(rotate(self.kv_norm(self.wkv(x)), cos_sin), self.swa_cache_dtype)
        dsv41ops.kv_cache_insert(kv, step.swa_slots, self.swa_cache)
        if self.compressor is not None:
            self._insert_states(x, step)
        if self.indexer is not None:
            assert source is not None
            selection = self._select(x, q_latent, step, source.index_keys, selection)
        if source is None:
            window = (q.bfloat16(), self.swa_cache, step.swa_indices, step.swa_lens)
            out, lse = dsv41ops.sparse_mla_decode(*window, attn_sink=self.attn_sink)
        else:
            assert selection is not None
            out, lse = dsv41ops.sparse_mla_decode(
                q.bfloat16(),
                self.swa_cache,
                step.swa_indices,
                step.swa_lens,
                source.cache,
                selection.slots,
                selection.lens,
                self.attn_sink,
            )
        return self._project(rotate(out.float(), cos_sin, inverse=True)), lse, selection

    def _insert_states(self, x: Tensor, step: StepContext) -> None:
        """Insert the states that this step's tokens close, and their index keys."""
        assert self.compressor is not None
        assert self.indexer is not None
        latent = self.compressor(x, step)
        cos_sin, slots = step.state_cos_sin[self.ratio], step.state_slots[self.ratio]
        rows = round_for_record(rotate(latent, cos_sin), self.cache_dtype)
        dsv41ops.kv_cache_insert(rows, slots, self.cache)
        self.index_keys.insert(self.indexer.key(latent, cos_sin), slots)

    def _select(
        self,
        x: Tensor,
        q_latent: Tensor,
        step: StepContext,
        index_keys: IndexKeys,
        before: Selection | None,
    ) -> Selection:
        assert self.indexer is not None
        candidates = before.candidates if before is not None else None
        states, candidates = self.indexer(x, q_latent, index_keys, step, candidates)
        slots, lens = dsv41ops.topk_to_slots(
            states,
            step.inputs.query_start_loc,
            step.inputs.seq_lens,
            step.inputs.block_table,
            self.states_per_page,
            self.ratio,
        )
        return Selection(states, slots, lens, candidates)

    def _project(self, out: Tensor) -> Tensor:
        """Grouped low-rank output projection."""
        grouped = out.flatten(1).unflatten(1, (self.config.o_groups, -1))
        wo_a = self.wo_a.weight.unflatten(0, (self.config.o_groups, -1))
        low_rank = torch.einsum("tgd,grd->tgr", grouped, wo_a)
        projected: Tensor = self.wo_b(low_rank.flatten(1))
        return projected


class Layer(nn.Module):
    """Pre-norm and attention; the residual is the model's."""

    def __init__(self, config: ModelConfig, attn: Attention) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attn = attn

    def forward(
        self,
        hidden: Tensor,
        step: StepContext,
        source: Attention | None,
        selection: Selection | None,
    ) -> tuple[Tensor, Tensor, Selection | None]:
        result: tuple[Tensor, Tensor, Selection | None] = self.attn(
            self.attn_norm(hidden), step, source, selection
        )
        return result


class DecodeModel(nn.Module):
    """The stack, its caches and the token that each request sampled last."""

    rope: Tensor
    compressed_rope: Tensor
    last_token: Tensor

    def __init__(
        self,
        config: ModelConfig,
        geometry: CacheGeometry,
        swa_cache_dtype: str = "mxfp8",
        cache_dtype: str = "nvfp4",
    ) -> None:
        super().__init__()
        self.config, self.geometry = config, geometry
        self.cache_dtypes = (swa_cache_dtype, cache_dtype)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, Attention(config, geometry, layer, swa_cache_dtype, cache_dtype))
            for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for name, compressed in (("rope", False), ("compressed_rope", True)):
            table = cos_sin_table(config, compressed, geometry.max_positions).float()
            self.register_buffer(name, table, persistent=False)
        last_token = torch.zeros(geometry.max_requests + 1, dtype=torch.int64)
        self.register_buffer("last_token", last_token, persistent=False)
        self.ratios = tuple(sorted({config.ratio(n) for n in config.compressed_layers}))
        self.kv_sources = {n: config.kv_source(n) for n in config.compressed_layers}

    def forward(self, inputs: StepInputs) -> StepOutputs:
        """One step of a mixed batch. Writes the caches, the rings and ``last_token``."""
        config = self.config
        tables = {False: self.rope, True: self.compressed_rope}
        step = step_context(inputs, self.geometry, config.sliding_window, self.ratios, tables)
        sampled = self.last_token[inputs.request_slots][step.request]
        hidden = self.embed(torch.where(inputs.token_ids >= 0, inputs.token_ids, sampled))
        selection: Selection | None = None
        hiddens, lses, selected = [hidden], [], {}
        for layer_id, layer in enumerate(self.layers):
            source = None
            if layer_id in self.kv_sources:
                source = self.layers[self.kv_sources[layer_id]].attn
            attn_out, lse, selection = layer(hidden, step, source, selection)
            if selection is not None and layer_id in config.index_source_layer_ids:
                selected[layer_id] = selection.states
            hidden = hidden + attn_out
            hiddens.append(hidden)
            lses.append(lse)
        next_token = self._sample(hidden, inputs)
        return StepOutputs(next_token, torch.stack(hiddens), torch.stack(lses), selected)

    def _sample(self, hidden: Tensor, inputs: StepInputs) -> Tensor:
        """Greedy token after the last token of each request, kept for the next step."""
        last = (inputs.query_start_loc[1:] - 1).clamp(min=0).long()
        next_token: Tensor = self.head(self.norm(hidden[last])).argmax(1)
        self.last_token[inputs.request_slots] = next_token
        return next_token
