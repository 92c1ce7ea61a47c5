"""One ``check_<op>`` per op: dtype, shape, stride, device and host values, never tensor values.

Eager kernels and fakes run the same check, so bad input gets the same ``ValueError`` in both. Sizes
may be symbolic: relations between them go through ``torch._check_value``, which states them to the
tracer instead of branching on them.
"""

from dsv41ops.checks.attention import (
    MAX_HEADS,
    check_backend,
    check_merge_attention_states,
    check_sparse_mla_decode,
    check_sparse_mla_decode_out,
)
from dsv41ops.checks.common import (
    SLOT_DTYPES,
)
from dsv41ops.checks.index import (
    check_compressed_slot_mapping,
    check_compressed_slot_mapping_out,
    check_dcp_local_seq_lens,
    check_sliding_window_indices,
    check_sliding_window_indices_out,
    check_token_to_request,
    check_topk_to_slots,
    check_topk_to_slots_out,
)
from dsv41ops.checks.indexer import (
    check_compress_kv,
    check_index_cache,
    check_indexer_k_insert,
    check_indexer_topk,
    check_merge_topk,
)
from dsv41ops.checks.kv_cache import (
    check_kv_cache_gather,
    check_kv_cache_insert,
    check_rope_kv_cache_insert,
)
from dsv41ops.checks.metadata import (
    check_decode_metadata,
    check_decode_metadata_out,
)

__all__ = [
    "MAX_HEADS",
    "SLOT_DTYPES",
    "check_backend",
    "check_compress_kv",
    "check_compressed_slot_mapping",
    "check_compressed_slot_mapping_out",
    "check_dcp_local_seq_lens",
    "check_decode_metadata",
    "check_decode_metadata_out",
    "check_index_cache",
    "check_indexer_k_insert",
    "check_indexer_topk",
    "check_kv_cache_gather",
    "check_kv_cache_insert",
    "check_merge_attention_states",
    "check_merge_topk",
    "check_rope_kv_cache_insert",
    "check_sliding_window_indices",
    "check_sliding_window_indices_out",
    "check_sparse_mla_decode",
    "check_sparse_mla_decode_out",
    "check_token_to_request",
    "check_topk_to_slots",
    "check_topk_to_slots_out",
]
