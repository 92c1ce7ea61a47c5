"""What an engine hands to the builders, and what the builders hand to the layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsv41ops.backend.layer_types import LayerType, layer_type


@dataclass(kw_only=True)
class CommonAttentionMetadata:
    """One step's batch, as an engine knows it for one KV-cache group.

    ``T`` is the length of ``slot_mapping``: this step's tokens with padding, fixed per captured
    graph. ``R`` is the length of ``seq_lens``: requests with padding.
    """

    query_start_loc: Tensor  # int32 [R+1]; padded requests repeat the last start
    seq_lens: Tensor  # int32 [R], tokens after this step
    num_reqs: int  # at most R
    num_actual_tokens: int  # at most T
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor  # int32 [R, P], this group's pages
    slot_mapping: Tensor  # int64 [T], this group's slots; -1: write nothing
    causal: bool = True  # False: a draft block, whose tokens see each other
    query_start_loc_cpu: Tensor | None = None  # host copy; only the decode/prompt split reads it
    replay_start: Tensor | None = None  # int32 [R], first position whose window row is written
    # int32 or int64 [T], read above ratio 1 only. -1: a replayed token, whose state is cached
    # already. None: slot_mapping's -1 says so, except under DCP, where it means another rank's.
    replay_slot_mapping: Tensor | None = None


@dataclass
class SparseMLAMetadata:
    """One step's metadata of a compressed cache, valid until its builder's next ``build``."""

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: Tensor  # int32 [R+1]
    slot_mapping: Tensor  # [T], where this step's states go; the compressed one above ratio 1
    block_table: Tensor  # int32 [R, P]
    req_id_per_token: Tensor  # int32 [T], -1 for padding
    block_size: int  # tokens per page; block_size // compress_ratio states
    topk_tokens: int  # states that the indexer selects per token
    cp_kv_cache_interleave_size: int = 1  # in states
    seq_lens: Tensor | None = None  # int32 [R], tokens
    dcp_local_seq_lens: Tensor | None = None  # int32 [R], this rank's states; None with one rank


@dataclass
class DecodePlan:
    """What ``sparse_mla_decode`` takes per step, the same for all layers of one type."""

    layer_type: LayerType
    swa_indices: Tensor  # int32 [T, W], rows of the window cache, packed left, -1 beyond
    swa_lens: Tensor  # int32 [T]
    states_per_page: int | None  # of the compressed cache; None for SWA
    topk_tokens: int  # width of topk_indices; 0 for SWA


@dataclass
class SlidingWindowMetadata:
    """One step's metadata of the window cache, with a plan for each layer type of the model."""

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: Tensor  # int32 [R+1]
    seq_lens: Tensor  # int32 [R]
    slot_mapping: Tensor  # [T], where this step's window rows go
    block_table: Tensor  # int32 [R, P]
    block_size: int  # rows per window page
    causal: bool
    plans: dict[LayerType, DecodePlan]

    def plan(self, compress_ratio: int) -> DecodePlan:
        """The plan of a layer; ValueError if the builder was not told of its ratio."""
        kind = layer_type(compress_ratio)
        if kind not in self.plans:
            present = ", ".join(str(present.compress_ratio) for present in self.plans)
            raise ValueError(
                f"compress_ratio: expected one of the model's ({present}), got {compress_ratio}"
            )
        return self.plans[kind]
