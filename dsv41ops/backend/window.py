"""Builder of the window cache's metadata: one set of window indices, a plan per layer type."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from dsv41ops.backend.arguments import require_int, require_states_per_page
from dsv41ops.backend.builder import Device, MetadataBuilder
from dsv41ops.backend.capture import AttentionCGSupport
from dsv41ops.backend.dcp import SINGLE_RANK, DCPGeometry
from dsv41ops.backend.layer_types import LayerType, layer_types
from dsv41ops.backend.metadata import CommonAttentionMetadata, DecodePlan, SlidingWindowMetadata

WINDOW_PAGE_SIZE = 32
WIDTH_MULTIPLE = 64


def draft_window_width(window: int, draft_block: int) -> int:
    """Index columns of a draft block: the window before it and all of it, rounded up to 64."""
    return -(-(window + draft_block) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


class SlidingWindowMetadataBuilder(MetadataBuilder):
    """Builds the window cache's :class:`SlidingWindowMetadata` for all layers of a model.

    The window cache is whole on every DCP rank. Layers without a compressed cache attend to it
    everywhere; in the plans of the others it has its rows on rank 0 alone, so that merging the
    ranks' partial results counts it once.

    Args:
        max_num_batched_tokens: Most tokens of a step, padding included.
        compress_ratios: The model's, one per layer; None stands for ``[0]``.
        block_size: Tokens per compressed page; needed if a ratio is above 0.
        index_topk: States that the indexer selects per token; needed if a ratio is above 0.
        page_size: Rows per window page.
        window: Tokens that a query sees, itself included.
        num_speculative_tokens: Draft tokens per decode. Above 0, non-causal batches of up to
            ``1 + num_speculative_tokens`` tokens per request are served too.
        dcp: Which compressed states this rank owns; one rank by default.
        device: Where the buffers live; torch's default device when None.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self,
        *,
        max_num_batched_tokens: int,
        compress_ratios: Iterable[int] | None = None,
        block_size: int | None = None,
        index_topk: int | None = None,
        page_size: int = WINDOW_PAGE_SIZE,
        window: int = 128,
        num_speculative_tokens: int = 0,
        dcp: DCPGeometry = SINGLE_RANK,
        device: Device = None,
    ) -> None:
        super().__init__(max_num_batched_tokens, num_speculative_tokens, device)
        self.page_size = require_int("page_size", page_size, 1)
        self.window = require_int("window", window, 1)
        self.dcp = dcp
        self.layer_types = layer_types(compress_ratios)
        # Per compressed layer type: states per page and width of topk_indices.
        self._compressed: dict[LayerType, tuple[int, int]] = {}
        for kind in self.layer_types:
            if kind is not LayerType.SWA:
                states = require_states_per_page(
                    require_int("block_size", block_size), kind.compress_ratio
                )
                dcp.check_page(states)
                self._compressed[kind] = states, require_int("index_topk", index_topk, 1)
        self.swa_indices_buffer = self._buffer(self.window, fill=-1)
        self.swa_lens_buffer = self._buffer(fill=0)
        self.draft_width = draft_window_width(self.window, self.reorder_batch_threshold)
        # Both forms from the start: nothing may be allocated while a graph is captured.
        drafts = num_speculative_tokens > 0
        self.draft_swa_indices_buffer = self._buffer(self.draft_width, fill=-1) if drafts else None
        self.draft_swa_lens_buffer = self._buffer(fill=0) if drafts else None
        self._no_lens = self._buffer(fill=0) if dcp.dcp_rank > 0 else None

    def build(self, common_attn_metadata: CommonAttentionMetadata) -> SlidingWindowMetadata:
        """Metadata of one step, from the window cache's own block table and slots."""
        common = common_attn_metadata
        num_tokens = self._check_batch(common)
        self._launch(common, num_tokens, self._wanted(common))
        return self._metadata(common, num_tokens)

    def _wanted(self, common: CommonAttentionMetadata) -> dict[str, Any]:
        """The window's arguments of ``decode_metadata_out``."""
        indices, lens = self._buffers(common)
        return {
            "swa_block_table": common.block_table_tensor,
            "swa_page_size": self.page_size,
            "window": self.window,
            "width": indices.shape[1],
            "causal": common.causal,
            "replay_start": common.replay_start,
            "swa_indices": indices,
            "swa_lens": lens,
        }

    def _metadata(self, common: CommonAttentionMetadata, num_tokens: int) -> SlidingWindowMetadata:
        """Views of the buffers, which hold this step's values."""
        indices, lens = self._buffers(common)
        swa_indices, swa_lens = indices[:num_tokens], lens[:num_tokens]
        plans: dict[LayerType, DecodePlan] = {}
        for kind in self.layer_types:
            if kind is LayerType.SWA:
                plans[kind] = DecodePlan(kind, swa_indices, swa_lens, None, 0)
            else:
                states, topk = self._compressed[kind]
                own_lens = swa_lens if self._no_lens is None else self._no_lens[:num_tokens]
                plans[kind] = DecodePlan(kind, swa_indices, own_lens, states, topk)
        return SlidingWindowMetadata(
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            block_size=self.page_size,
            causal=common.causal,
            plans=plans,
        )

    def _buffers(self, common: CommonAttentionMetadata) -> tuple[Tensor, Tensor]:
        if common.causal:
            return self.swa_indices_buffer, self.swa_lens_buffer
        if self.draft_swa_indices_buffer is None or self.draft_swa_lens_buffer is None:
            raise ValueError("causal: expected True without speculative tokens, got False")
        if common.max_query_len > self.reorder_batch_threshold:
            # Longer rows would not fit the width, and their oldest positions would go missing.
            raise ValueError(
                "max_query_len: expected at most 1 + num_speculative_tokens = "
                f"{self.reorder_batch_threshold} in a non-causal batch, got {common.max_query_len}"
            )
        return self.draft_swa_indices_buffer, self.draft_swa_lens_buffer
