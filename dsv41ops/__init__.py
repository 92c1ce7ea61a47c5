"""DeepSeek-V4.1 sparse MLA, slot mapping, index and KV-cache ops for compiled PyTorch models.

Importing the package registers every op under ``torch.ops.dsv41``; the functions here are the
same ops with defaults and documentation, ``warmup``, which compiles their kernels, and
``backends``, which says what can serve attention here. What an engine asks for is in
``dsv41ops.backend``, a layer of the model in ``dsv41ops.nn``, a CUDA-graph runner in
``dsv41ops.capture``.
"""

from dsv41ops.api import (
    DecodeMetadata,
    compress_kv,
    compressed_slot_mapping,
    compressed_slot_mapping_out,
    dcp_local_seq_lens,
    decode_metadata,
    decode_metadata_out,
    indexer_k_insert,
    indexer_topk,
    kv_cache_gather,
    kv_cache_insert,
    merge_attention_states,
    merge_topk,
    rope_kv_cache_insert,
    sliding_window_indices,
    sliding_window_indices_out,
    sparse_mla_decode,
    sparse_mla_decode_out,
    token_to_request,
    topk_to_slots,
    topk_to_slots_out,
)
from dsv41ops.dispatch import backends
from dsv41ops.errors import UnsupportedError
from dsv41ops.layouts import new_index_cache, new_kv_cache
from dsv41ops.warmup import warmup

__version__ = "0.1.0"

__all__ = [
    "DecodeMetadata",
    "UnsupportedError",
    "backends",
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
    "new_index_cache",
    "new_kv_cache",
    "rope_kv_cache_insert",
    "sliding_window_indices",
    "sliding_window_indices_out",
    "sparse_mla_decode",
    "sparse_mla_decode_out",
    "token_to_request",
    "topk_to_slots",
    "topk_to_slots_out",
    "warmup",
]
