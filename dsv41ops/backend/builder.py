"""Builders of a compressed cache's metadata: into buffers of fixed address, without a host sync."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from dsv41ops.api import decode_metadata, decode_metadata_out
from dsv41ops.backend.arguments import require_int, require_states_per_page
from dsv41ops.backend.capture import AttentionCGSupport
from dsv41ops.backend.dcp import SINGLE_RANK, DCPGeometry
from dsv41ops.backend.metadata import CommonAttentionMetadata, SparseMLAMetadata
from dsv41ops.backend.split import DecodeSplit, split_decodes_and_prefills

Device = torch.device | str | None


class MetadataBuilder:
    """What the builders of both cache kinds share: capacity, limits of a batch, the split.

    The buffers are the builder's own: a step's metadata is valid until the next ``build``.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    # A draft block whose tokens see each other, also with the states spread over DCP ranks.
    supports_non_causal_multi_token_decode: ClassVar[bool] = True
    supports_non_causal_multi_token_dcp: ClassVar[bool] = True

    def __init__(
        self, max_num_batched_tokens: int, num_speculative_tokens: int, device: Device
    ) -> None:
        self.max_num_batched_tokens = require_int(
            "max_num_batched_tokens", max_num_batched_tokens, 1
        )
        require_int("num_speculative_tokens", num_speculative_tokens, 0)
        # vLLM's name: the longest query that is still a decode.
        self.reorder_batch_threshold = 1 + num_speculative_tokens
        self.device = device
        self._left_out = self._empty_buffers()

    @classmethod
    def get_cudagraph_support(cls) -> AttentionCGSupport:
        """What an engine may capture with this builder's metadata."""
        return cls._cudagraph_support

    def split(self, common_attn_metadata: CommonAttentionMetadata) -> DecodeSplit:
        """Decodes and prompts of a batch; a query of up to 1 + speculative tokens is a decode.

        Host data only, and host code only: not for a compiled region.
        """
        return split_decodes_and_prefills(common_attn_metadata, self.reorder_batch_threshold)

    def _buffer(self, *width: int, fill: int, dtype: torch.dtype = torch.int32) -> Tensor:
        shape = (self.max_num_batched_tokens, *width)
        # An inference tensor could not be written outside inference mode; this one can, anywhere.
        with torch.inference_mode(False):
            return torch.full(shape, fill, dtype=dtype, device=self.device)

    def _empty_buffers(self) -> dict[str, Tensor]:
        """What ``decode_metadata_out`` takes for a buffer that it leaves alone, by argument."""
        with torch.inference_mode(False):
            start = torch.zeros(1, dtype=torch.int32, device=self.device)
            return decode_metadata(start, start[1:], num_tokens=0)._asdict()

    def _launch(
        self, common: CommonAttentionMetadata, num_tokens: int, wanted: dict[str, Any]
    ) -> None:
        """Fill the buffers among ``wanted``, which also says from what; all in one launch."""
        decode_metadata_out(
            common.query_start_loc, common.seq_lens, num_tokens, **{**self._left_out, **wanted}
        )

    def _check_batch(self, common: CommonAttentionMetadata) -> int:
        """``T`` of a batch that fits the buffers; what the ops check themselves is left to them."""
        for name in ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"):
            if isinstance(getattr(common, name), Tensor):
                raise TypeError(f"{name}: expected an int, got a Tensor; reading it is a host sync")
        num_tokens = common.slot_mapping.shape[0]
        num_rows = common.seq_lens.shape[0]
        if num_tokens > self.max_num_batched_tokens:
            raise ValueError(
                "slot_mapping: expected at most max_num_batched_tokens = "
                f"{self.max_num_batched_tokens} entries, got {num_tokens}"
            )
        if common.num_actual_tokens > num_tokens:
            raise ValueError(
                f"num_actual_tokens: expected at most len(slot_mapping) = {num_tokens}, "
                f"got {common.num_actual_tokens}"
            )
        if common.num_reqs > num_rows:
            raise ValueError(
                f"num_reqs: expected at most len(seq_lens) = {num_rows}, got {common.num_reqs}"
            )
        if common.query_start_loc.shape[0] != num_rows + 1:
            raise ValueError(
                f"query_start_loc: expected len(seq_lens) + 1 = {num_rows + 1} entries, "
                f"got {common.query_start_loc.shape[0]}"
            )
        return num_tokens


class SparseMLAMetadataBuilder(MetadataBuilder):
    """Builds one compressed cache's :class:`SparseMLAMetadata`; DCP with interleave 1 only.

    Args:
        block_size: Tokens per page; a multiple of ``compress_ratio``.
        compress_ratio: Tokens per state, 1 or 2.
        max_num_batched_tokens: Most tokens of a step, padding included; under DCP also most
            requests.
        index_topk: States that the indexer selects per token.
        num_speculative_tokens: Draft tokens per decode.
        dcp: Which states this rank owns; one rank by default.
        device: Where the buffers live; torch's default device when None.
    """

    _supports_cp_interleave: ClassVar[bool] = False

    def __init__(
        self,
        *,
        block_size: int,
        compress_ratio: int,
        max_num_batched_tokens: int,
        index_topk: int,
        num_speculative_tokens: int = 0,
        dcp: DCPGeometry = SINGLE_RANK,
        device: Device = None,
    ) -> None:
        super().__init__(max_num_batched_tokens, num_speculative_tokens, device)
        if require_int("compress_ratio", compress_ratio) not in (1, 2):
            raise ValueError(f"compress_ratio: expected 1 or 2, got {compress_ratio}")
        if dcp.enabled and dcp.cp_interleave != 1 and not self._supports_cp_interleave:
            raise NotImplementedError(
                f"cp_interleave: expected 1 under DCP, got {dcp.cp_interleave}: "
                f"{type(self).__name__} deals out single states"
            )
        self.block_size = block_size
        self.compress_ratio = compress_ratio
        self.states_per_page = require_states_per_page(block_size, compress_ratio)
        dcp.check_page(self.states_per_page)
        self.topk_tokens = require_int("index_topk", index_topk, 1)
        self.dcp = dcp
        self.req_id_per_token_buffer = self._buffer(fill=-1)
        self.compressed_slot_mapping_buffer = self._buffer(fill=-1, dtype=torch.int64)
        self.dcp_local_seq_lens_buffer = self._buffer(fill=0) if dcp.enabled else None

    def build(self, common_attn_metadata: CommonAttentionMetadata) -> SparseMLAMetadata:
        """Metadata of one step: shapes follow ``T`` and ``R``, values are computed on the device.

        Causal and non-causal batches are built alike: what a token may see changes neither where
        states go nor who owns them.
        """
        common = common_attn_metadata
        num_tokens = self._check_batch(common)
        self._launch(common, num_tokens, self._wanted(common))
        return self._metadata(common, num_tokens, self.req_id_per_token_buffer)

    def _wanted(self, common: CommonAttentionMetadata) -> dict[str, Any]:
        """This cache's arguments of ``decode_metadata_out``."""
        wanted: dict[str, Any] = {"req_id_per_token": self.req_id_per_token_buffer}
        if self.compress_ratio == 1 and not self.dcp.enabled:
            return wanted
        kind = f"c{self.compress_ratio}a"
        wanted |= {
            f"block_table_{kind}": common.block_table_tensor,
            "block_size": self.block_size,
            "dcp_world_size": self.dcp.dcp_world_size,
            "dcp_rank": self.dcp.dcp_rank,
            f"cp_interleave_{kind}": self.dcp.cp_interleave,
        }
        if self.compress_ratio > 1:
            replayed = common.replay_slot_mapping
            if replayed is None and not self.dcp.enabled:
                replayed = common.slot_mapping
            wanted["slot_mapping"] = replayed
            wanted[f"compressed_slot_mapping_{kind}"] = self.compressed_slot_mapping_buffer
        if self.dcp_local_seq_lens_buffer is not None:
            wanted[f"dcp_local_seq_lens_{kind}"] = self.dcp_local_seq_lens_buffer
            num_rows = common.seq_lens.shape[0]
            if num_rows > self.max_num_batched_tokens:
                raise ValueError(
                    "seq_lens: expected at most max_num_batched_tokens = "
                    f"{self.max_num_batched_tokens} requests, got {num_rows}"
                )
        return wanted

    def _metadata(
        self, common: CommonAttentionMetadata, num_tokens: int, req_id_per_token: Tensor
    ) -> SparseMLAMetadata:
        """Views of the buffers, which hold this step's values."""
        # At ratio 1 every token is a state: the engine's slots are the states'.
        slot_mapping = common.slot_mapping
        if self.compress_ratio > 1:
            slot_mapping = self.compressed_slot_mapping_buffer[:num_tokens]
        local_seq_lens = self.dcp_local_seq_lens_buffer
        if local_seq_lens is not None:
            local_seq_lens = local_seq_lens[: common.seq_lens.shape[0]]
        return SparseMLAMetadata(
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            slot_mapping=slot_mapping,
            block_table=common.block_table_tensor,
            req_id_per_token=req_id_per_token[:num_tokens],
            block_size=self.block_size,
            topk_tokens=self.topk_tokens,
            cp_kv_cache_interleave_size=self.dcp.cp_interleave,
            seq_lens=common.seq_lens,
            dcp_local_seq_lens=local_seq_lens,
        )


class FlashMLASparseDSV41MetadataBuilder(SparseMLAMetadataBuilder):
    """The package's builder: any interleave, and a captured graph serves every batch that fits."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    _supports_cp_interleave: ClassVar[bool] = True
