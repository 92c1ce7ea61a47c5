"""The public functions: one op call each, with defaults, types and documentation.

Dimension letters: ``T`` tokens of this step (padding included), ``R`` requests, ``H`` query heads
on this rank, ``P`` pages per request, ``K`` selected positions per token, ``W`` window width.
Definitions: DeepSeek-V4.1 release; slot mapping and metadata as vLLM, attention as FlashMLA.

Every function also raises ``TypeError`` for an argument of the wrong Python type.
"""

from dsv41ops.api.attention import (
    merge_attention_states,
    sparse_mla_decode,
    sparse_mla_decode_out,
)
from dsv41ops.api.index import (
    compressed_slot_mapping,
    compressed_slot_mapping_out,
    dcp_local_seq_lens,
    sliding_window_indices,
    sliding_window_indices_out,
    token_to_request,
    topk_to_slots,
    topk_to_slots_out,
)
from dsv41ops.api.indexer import (
    compress_kv,
    indexer_k_insert,
    indexer_topk,
    merge_topk,
)
from dsv41ops.api.kv_cache import (
    kv_cache_gather,
    kv_cache_insert,
    rope_kv_cache_insert,
)
from dsv41ops.api.metadata import (
    DecodeMetadata,
    decode_metadata,
    decode_metadata_out,
)

__all__ = [
    "DecodeMetadata",
    "compress_kv",
    "compressed_slot_mapping",
    "compressed_slot_mapping_out",
    "dcp_local_seq_lens",
    "decode_metadata",
    "decode_metadata_out",
    "indexer_k_insert",
    "indexer_topk",
    "kv_cache_gather",
    "kv_cache_insert",
    "merge_attention_states",
    "merge_topk",
    "rope_kv_cache_insert",
    "sliding_window_indices",
    "sliding_window_indices_out",
    "sparse_mla_decode",
    "sparse_mla_decode_out",
    "token_to_request",
    "topk_to_slots",
    "topk_to_slots_out",
]
