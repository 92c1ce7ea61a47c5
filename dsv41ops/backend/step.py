"""Builder of a whole step: the metadata of every cache of a model, in one launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dsv41ops.backend.builder import FlashMLASparseDSV41MetadataBuilder, MetadataBuilder
from dsv41ops.backend.capture import AttentionCGSupport
from dsv41ops.backend.metadata import (
    CommonAttentionMetadata,
    SlidingWindowMetadata,
    SparseMLAMetadata,
)
from dsv41ops.backend.window import SlidingWindowMetadataBuilder


class StepMetadata(NamedTuple):
    """One step's metadata of all caches, valid until the next ``build``."""

    req_id_per_token: Tensor  # int32 [T], -1 for padding
    positions: Tensor  # int64 [T], -1 for padding
    swa_slot_mapping: Tensor  # int64 [T], each token's row of the window cache, replayed or not
    window: SlidingWindowMetadata
    compressed: dict[int, SparseMLAMetadata]  # by compress_ratio


class StepMetadataBuilder(MetadataBuilder):
    """Builds what its builders build, in one launch instead of one each.

    What a builder has a buffer for lies there, but for the requests: those are shared.

    Args:
        window: Builder of the window cache.
        compressed: Builders of the compressed caches, one per ratio; the same page size in tokens
            and the same DCP rank everywhere.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self, window: SlidingWindowMetadataBuilder, *compressed: FlashMLASparseDSV41MetadataBuilder
    ) -> None:
        self.window = window
        self.compressed = {builder.compress_ratio: builder for builder in compressed}
        if len(self.compressed) < len(compressed):
            ratios = [builder.compress_ratio for builder in compressed]
            raise ValueError(f"compressed: expected a builder per compress_ratio, got {ratios}")
        page_sizes = {builder.block_size for builder in compressed}
        if len(page_sizes) > 1:
            raise ValueError(f"block_size: expected one for all builders, got {sorted(page_sizes)}")
        shards = (window.dcp, *(builder.dcp for builder in compressed))
        ranks = {(shard.dcp_world_size, shard.dcp_rank) for shard in shards}
        if len(ranks) > 1:
            raise ValueError(f"dcp: expected one rank for all builders, got {sorted(ranks)}")
        super().__init__(
            min(builder.max_num_batched_tokens for builder in (window, *compressed)),
            window.reorder_batch_threshold - 1,
            window.device,
        )
        self.req_id_per_token_buffer = self._buffer(fill=-1)
        self.positions_buffer = self._buffer(fill=-1, dtype=torch.int64)
        self.swa_slot_mapping_buffer = self._buffer(fill=-1, dtype=torch.int64)

    def build(
        self,
        window: CommonAttentionMetadata,
        compressed: Mapping[int, CommonAttentionMetadata] | None = None,
    ) -> StepMetadata:
        """Metadata of one step, from each cache's own block table and slots.

        Args:
            window: The window cache's batch.
            compressed: By compress_ratio, one for each builder. The requests and their tokens are
                the window's: their ``query_start_loc`` and ``seq_lens`` are not read.
        """
        compressed = compressed or {}
        if set(compressed) != set(self.compressed):
            raise ValueError(
                f"compressed: expected batches of the ratios {sorted(self.compressed)}, "
                f"got {sorted(compressed)}"
            )
        num_tokens = self._check_batch(window)
        num_rows = window.seq_lens.shape[0]
        wanted: dict[str, Any] = {
            "positions": self.positions_buffer,
            "swa_slot_mapping": self.swa_slot_mapping_buffer,
        }
        for ratio, builder in self.compressed.items():
            common = compressed[ratio]
            if self._check_batch(common) != num_tokens or common.seq_lens.shape[0] != num_rows:
                raise ValueError(
                    f"compressed: expected {num_tokens} tokens and {num_rows} requests as in the "
                    f"window's batch, got {common.slot_mapping.shape[0]} and "
                    f"{common.seq_lens.shape[0]}"
                )
            wanted |= builder._wanted(common)
        wanted |= self.window._wanted(window)
        wanted["req_id_per_token"] = self.req_id_per_token_buffer
        self._launch(window, num_tokens, wanted)
        return StepMetadata(
            self.req_id_per_token_buffer[:num_tokens],
            self.positions_buffer[:num_tokens],
            self.swa_slot_mapping_buffer[:num_tokens],
            self.window._metadata(window, num_tokens),
            {
                ratio: builder._metadata(
                    compressed[ratio], num_tokens, self.req_id_per_token_buffer
                )
                for ratio, builder in self.compressed.items()
            },
        )
