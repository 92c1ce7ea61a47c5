"""One layer of DeepSeek-V4.1 attention as a module that a model holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dsv41ops import api
from dsv41ops.layouts import (
    HEAD_DIM,
    INDEX_HEAD_DIM,
    index_record_named,
    new_index_cache,
    new_kv_cache,
    record_named,
)
from dsv41ops.nn.metadata import StepMetadata
from dsv41ops.nn.rope import rotate_queries

RATIOS = (0, 1, 2)


@dataclass(frozen=True)
class AttentionGeometry:
    """Sizes and role of one layer, and sizes of its caches. Heads and groups are this rank's.

    A layer of compress ratio 1 or 2 reads a compressed cache beside its window: its own, as a *kv
    source*, or an earlier layer's. Its selection is its own, as an *index source*, or an earlier
    layer's. A kv source is an index source too, since its indexer makes the cache's index keys.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    num_swa_pages: int
    swa_page_size: int = 32
    swa_cache_dtype: str = "auto"
    compress_ratio: int = 0
    is_kv_source: bool = False
    is_index_source: bool = False
    # Of index sources:
    index_num_heads: int = 32
    index_topk: int = 512
    num_candidate_blocks: int = 0  # above 0: later index sources look only inside the best blocks
    candidate_block_size: int = 8
    # Of kv sources:
    num_pages: int = 0
    block_size: int = 64  # tokens, not states, in one page
    cache_dtype: str = "auto"
    index_cache_dtype: str = "fp8"
    max_requests: int = 0  # rows of the ring, of ratio 2
    num_drafts: int = 0  # tokens of a request that may be rejected after a step
    eps: float = 1e-20

    def __post_init__(self) -> None:
        if self.compress_ratio not in RATIOS:
            raise ValueError(f"compress_ratio: expected 0, 1 or 2, got {self.compress_ratio}")
        least = {"num_swa_pages": 0, "num_pages": 0, "num_candidate_blocks": 0, "num_drafts": 0}
        if self.is_kv_source and self.compress_ratio == 2:
            least["max_requests"] = 1
        for name in ("hidden_size", "num_heads", "q_lora_rank", "o_groups", "o_lora_rank"):
            least[name] = 1
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name}: expected at least {bound}, got {getattr(self, name)}")
        if self.num_heads % self.o_groups:
            raise ValueError(
                f"o_groups: expected a divisor of {self.num_heads} heads, got {self.o_groups}"
            )
        if self.compress_ratio == 0 and (self.is_kv_source or self.is_index_source):
            name = "is_kv_source" if self.is_kv_source else "is_index_source"
            raise ValueError(f"{name}: expected False for compress ratio 0, got True")
        if self.is_kv_source and not self.is_index_source:
            raise ValueError("is_index_source: expected True for a kv source, got False")
        if self.compress_ratio and self.block_size % self.compress_ratio:
            raise ValueError(
                f"block_size: expected a multiple of compress ratio {self.compress_ratio}, "
                f"got {self.block_size}"
            )
        for name in (self.swa_cache_dtype, self.cache_dtype):
            record_named(name)
        index_record_named(self.index_cache_dtype)

    @property
    def states_per_page(self) -> int:
        """Rows of one page of the compressed cache."""
        return self.block_size // max(self.compress_ratio, 1)

    @property
    def ring_capacity(self) -> int:
        """Tokens that a ring keeps per request: a power of two, at least 2 more than drafts."""
        return 1 << (self.num_drafts + 1).bit_length()


class CompressedCache(NamedTuple):
    """What a kv source shares with the layers that read its cache."""

    states: Tensor  # [pages, states_per_page, width]
    index_keys: Tensor  # [pages, states_per_page, bytes] uint8


class Selection(NamedTuple):
    """Which states each token attends to: made by an index source, reused by the layers after."""

    states: Tensor  # [T, index_topk] int32 state numbers, ascending, -1 beyond
    slots: Tensor  # [T, index_topk] int32 slots in the compressed cache, -1 beyond
    lens: Tensor  # [T] int32
    candidates: Tensor | None  # [T, C] int32 blocks that later index sources look inside


class Compressor(nn.Module):
    """Latents of groups of tokens. Its projections are float32 whatever the layer's dtype."""

    def __init__(self, geometry: AttentionGeometry, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.ratio, self.eps = geometry.compress_ratio, geometry.eps
        self.wkv = nn.Linear(geometry.hidden_size, HEAD_DIM, bias=False, dtype=torch.float32)
        if self.ratio == 2:
            self.wgate = nn.Linear(geometry.hidden_size, HEAD_DIM, bias=False, dtype=torch.float32)
        self.norm = nn.RMSNorm(HEAD_DIM, eps=geometry.eps, dtype=dtype)

    def forward(self, x: Tensor, metadata: StepMetadata, ring: Tensor | None) -> Tensor:
        """``x [T, hidden]`` to latents ``[T, 512]`` in its dtype; zeros where no group closes."""
        pairs = self.ratio == 2
        return api.compress_kv(
            _in_float32(self.wkv, x),
            _in_float32(self.wgate, x) if pairs else None,
            metadata.query_start_loc,
            metadata.seq_lens,
            self.norm.weight,
            metadata.request_slots if pairs else None,
            ring,
            self.ratio,
            self.eps,
            x.dtype,
        )


def _in_float32(linear: nn.Linear, x: Tensor) -> Tensor:
    """float32 rows of a projection, also if its weights were converted."""
    return nn.functional.linear(x.to(linear.weight.dtype), linear.weight).float()


class Indexer(nn.Module):
    """Selects states per token; that of a kv source also makes the index keys of its states."""

    def __init__(self, geometry: AttentionGeometry, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.geometry = geometry
        heads = geometry.index_num_heads
        self.scale = (INDEX_HEAD_DIM * heads) ** -0.5
        self.wq_b = nn.Linear(geometry.q_lora_rank, heads * INDEX_HEAD_DIM, bias=False, dtype=dtype)
        self.weights_proj = nn.Linear(geometry.hidden_size, heads, bias=False, dtype=dtype)
        if geometry.is_kv_source:
            self.wk = nn.Linear(HEAD_DIM, INDEX_HEAD_DIM, bias=False, dtype=dtype)
            self.k_norm = nn.RMSNorm(INDEX_HEAD_DIM, eps=geometry.eps, dtype=dtype)

    def insert(self, latent: Tensor, metadata: StepMetadata, index_keys: Tensor) -> None:
        """Index keys of the states that this step closes, from ``latent [T, 512]``."""
        ratio = self.geometry.compress_ratio
        api.indexer_k_insert(
            self.wk(latent),
            self.k_norm.weight,
            metadata.positions,
            metadata.rope_of(ratio).table,
            metadata.state_slots(ratio),
            index_keys,
            ratio,
            self.geometry.eps,
        )

    def forward(
        self,
        x: Tensor,
        q_latent: Tensor,
        metadata: StepMetadata,
        index_keys: Tensor,
        candidates: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """States ``[T, index_topk]``, and the blocks that later index sources look inside."""
        geometry = self.geometry
        ratio = geometry.compress_ratio
        q = self.wq_b(q_latent).unflatten(1, (-1, INDEX_HEAD_DIM))
        states, _, blocks, _ = api.indexer_topk(
            rotate_queries(q, metadata.rope_of(ratio)),
            self.weights_proj(x).float() * self.scale,
            index_keys,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table(ratio),
            geometry.index_topk,
            ratio,
            candidates,
            geometry.num_candidate_blocks,
            geometry.candidate_block_size,
        )
        return states, blocks if geometry.num_candidate_blocks else candidates


class SparseMLAAttention(nn.Module):
    """One layer of attention with its caches, from normalised input to projected output.

    Parameters have the checkpoint's names (``wq_a.weight``, ``compressor.wkv.weight`` ...). Caches
    are buffers that ``state_dict`` leaves out: ``swa_cache``, and of a kv source ``cache``,
    ``index_keys`` and, of ratio 2, ``ring``. Nothing is shared between modules but what
    :meth:`forward` is given.

    Args:
        geometry: Sizes and role of the layer.
        dtype: Of parameters and of ``x``, float32 or bfloat16; None: torch's default. ``attn_sink``
            and the compressor's projections stay float32. ``module.to(dtype)`` converts them as
            well, but no buffer.

    Notes:
        One graph for any ``T`` under ``torch.compile(fullgraph=True)``, safe in CUDA graphs once it
        is warm, exportable. A saved program or package keeps only the names of the ops: whoever
        loads it imports ``dsv41ops`` first.
    """

    swa_cache: Tensor
    cache: Tensor
    index_keys: Tensor
    ring: Tensor | None

    def __init__(self, geometry: AttentionGeometry, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.geometry = geometry
        hidden, heads = geometry.hidden_size, geometry.num_heads
        rank, eps = geometry.q_lora_rank, geometry.eps
        groups, low_rank = geometry.o_groups, geometry.o_groups * geometry.o_lora_rank
        self.wq_a = nn.Linear(hidden, rank, bias=False, dtype=dtype)
        self.q_norm = nn.RMSNorm(rank, eps=eps, dtype=dtype)
        self.wq_b = nn.Linear(rank, heads * HEAD_DIM, bias=False, dtype=dtype)
        self.wkv = nn.Linear(hidden, HEAD_DIM, bias=False, dtype=dtype)
        self.kv_norm = nn.RMSNorm(HEAD_DIM, eps=eps, dtype=dtype)
        self.wo_a = nn.Linear(heads * HEAD_DIM // groups, low_rank, bias=False, dtype=dtype)
        self.wo_b = nn.Linear(low_rank, hidden, bias=False, dtype=dtype)
        self.attn_sink = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.indexer = Indexer(geometry, dtype) if geometry.is_index_source else None
        self.compressor = Compressor(geometry, dtype) if geometry.is_kv_source else None
        self._add_cache(
            "swa_cache",
            new_kv_cache(geometry.num_swa_pages, geometry.swa_page_size, geometry.swa_cache_dtype),
        )
        if geometry.is_kv_source:
            pages = (geometry.num_pages, geometry.states_per_page)
            self._add_cache("cache", new_kv_cache(*pages, geometry.cache_dtype))
            self._add_cache("index_keys", new_index_cache(*pages, geometry.index_cache_dtype))
            ring = None
            if geometry.compress_ratio == 2:
                shape = (geometry.max_requests, geometry.ring_capacity, 2, HEAD_DIM)
                ring = torch.zeros(shape, dtype=torch.float32)
            self._add_cache("ring", ring)

    def _add_cache(self, name: str, cache: Tensor | None) -> None:
        self.register_buffer(name, cache, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """``.to(dtype)`` is for parameters: the dtype of a cache says how it is to be read."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self._buffers.items():
            held = before[name]
            if buffer is not None and held is not None and buffer.dtype != held.dtype:
                self._buffers[name] = held.to(buffer.device)
        return self

    @property
    def compressed_cache(self) -> CompressedCache | None:
        """What later layers take as ``source``; None unless this is a kv source."""
        if not self.geometry.is_kv_source:
            return None
        return CompressedCache(self.cache, self.index_keys)

    def forward(
        self,
        x: Tensor,
        metadata: StepMetadata,
        source: CompressedCache | None = None,
        selection: Selection | None = None,
    ) -> tuple[Tensor, Tensor, Selection | None]:
        """Insert this step's rows, select, attend and project.

        Args:
            x: ``[T, hidden]``, normalised, padding included.
            metadata: Of this step, the same for all layers.
            source: ``compressed_cache`` of the kv source that this layer reads, which has run in
                this step. None for a kv source, which reads its own, and for ratio 0.
            selection: What the layer before returned, None for the first. Used by a layer that is
                no index source; of an index source that is no kv source, its candidates.

        Returns:
            Output ``[T, hidden]`` in the dtype of ``x`` (this rank's part of the sum over heads),
            lse ``[T, H]`` float32, and the selection for the next layer. Padding: 0 and -inf.

        Raises:
            ValueError: An argument breaks the shapes or dtypes above or is missing.
        """
        self._check(x, source, selection)
        ratio = self.geometry.compress_ratio
        rope = metadata.rope_of(ratio)
        self.insert_window(x, metadata)
        q_latent = self.q_norm(self.wq_a(x))
        q = rotate_queries(self.wq_b(q_latent).unflatten(1, (-1, HEAD_DIM)), rope)
        cache = topk_indices = topk_lens = None
        if ratio:
            if self.compressor is not None:
                self._insert_states(x, metadata)
                source = self.compressed_cache
            assert source is not None
            selection = self._select(x, q_latent, metadata, source, selection)
            cache, topk_indices, topk_lens = source.states, selection.slots, selection.lens
        out, lse = api.sparse_mla_decode(
            q,
            self.swa_cache,
            metadata.swa_indices,
            metadata.swa_lens,
            cache,
            topk_indices,
            topk_lens,
            self.attn_sink.float(),
            positions=metadata.positions,
            cos_sin=rope.table,
        )
        return self._project(out.to(x.dtype)), lse, selection

    def _check(
        self, x: Tensor, source: CompressedCache | None, selection: Selection | None
    ) -> None:
        geometry, dtype = self.geometry, self.wq_a.weight.dtype
        if x.dim() != 2 or x.shape[1] != geometry.hidden_size or x.dtype != dtype:
            raise ValueError(
                f"x: expected [T, {geometry.hidden_size}] {dtype}, got {list(x.shape)} {x.dtype}"
            )
        reads_another = geometry.compress_ratio > 0 and not geometry.is_kv_source
        if (source is not None) != reads_another:
            wanted = "the kv source's compressed_cache" if reads_another else "None"
            came = "None" if source is None else "a CompressedCache"
            raise ValueError(f"source: expected {wanted}, got {came}")
        reuses = geometry.compress_ratio > 0 and not geometry.is_index_source
        if reuses and selection is None:
            raise ValueError("selection: expected the last index source's, got None")

    def insert_window(self, x: Tensor, metadata: StepMetadata) -> None:
        """Insert the window rows of ``x [T, hidden]`` and nothing else; :meth:`forward` does it
        for its own tokens. A draft layer's window has rows of the model's output so."""
        api.rope_kv_cache_insert(
            self.kv_norm(self.wkv(x)),
            metadata.positions,
            metadata.rope_of(self.geometry.compress_ratio).table,
            metadata.swa_slots,
            self.swa_cache,
        )

    def _insert_states(self, x: Tensor, metadata: StepMetadata) -> None:
        """Insert the states that this step's tokens close, and their index keys."""
        assert self.compressor is not None
        assert self.indexer is not None
        ratio = self.geometry.compress_ratio
        latent = self.compressor(x, metadata, self.ring)
        api.rope_kv_cache_insert(
            latent,
            metadata.positions,
            metadata.rope_of(ratio).table,
            metadata.state_slots(ratio),
            self.cache,
            ratio,
        )
        self.indexer.insert(latent, metadata, self.index_keys)

    def _select(
        self,
        x: Tensor,
        q_latent: Tensor,
        metadata: StepMetadata,
        source: CompressedCache,
        before: Selection | None,
    ) -> Selection:
        if self.indexer is None:
            assert before is not None
            return before
        # Candidates of another cache say nothing about this one.
        candidates = before.candidates if before and not self.geometry.is_kv_source else None
        states, candidates = self.indexer(x, q_latent, metadata, source.index_keys, candidates)
        ratio = self.geometry.compress_ratio
        slots, lens = api.topk_to_slots(
            states,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table(ratio),
            self.geometry.states_per_page,
            ratio,
        )
        return Selection(states, slots, lens, candidates)

    def _project(self, out: Tensor) -> Tensor:
        """Grouped low-rank output projection."""
        groups = self.geometry.o_groups
        grouped = out.flatten(1).unflatten(1, (groups, -1))
        wo_a = self.wo_a.weight.unflatten(0, (groups, -1))
        low_rank = torch.einsum("tgd,grd->tgr", grouped, wo_a)
        projected: Tensor = self.wo_b(low_rank.flatten(1))
        return projected
