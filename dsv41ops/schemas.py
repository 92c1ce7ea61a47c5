"""The ops of ``torch.ops.dsv41``: names and schema strings, nothing that runs.

Sizes that follow the batch are ``SymInt`` (or come from shapes); configuration is ``int``, so that
a graph is specialised on it. An ``_out`` twin takes the arguments of its functional form plus
keyword-only buffers and returns nothing. A saved export is tied to these strings: new arguments
need defaults, and none is ever renamed.
"""

from __future__ import annotations

_SLOT_MAPPING = (
    "Tensor query_start_loc, Tensor seq_lens, Tensor block_table, SymInt num_tokens, "
    "int states_per_page, int compress_ratio, Tensor? slot_mapping=None, "
    "int dcp_world_size=1, int dcp_rank=0, int cp_interleave=1"
)
_WINDOW = (
    "Tensor query_start_loc, Tensor seq_lens, Tensor block_table, SymInt num_tokens, "
    "int page_size, int window=128, int? width=None, bool causal=True, Tensor? replay_start=None"
)
_TOPK = (
    "Tensor topk_indices, Tensor query_start_loc, Tensor seq_lens, Tensor block_table, "
    "int states_per_page, int compress_ratio, "
    "int dcp_world_size=1, int dcp_rank=0, int cp_interleave=1"
)
_METADATA = (
    "Tensor query_start_loc, Tensor seq_lens, SymInt num_tokens, "
    "Tensor? swa_block_table=None, int? swa_page_size=None, "
    "Tensor? block_table_c1a=None, Tensor? block_table_c2a=None, int? block_size=None, "
    "int window=128, int? width=None, bool causal=True, "
    "Tensor? replay_start=None, Tensor? slot_mapping=None, "
    "int dcp_world_size=1, int dcp_rank=0, int cp_interleave_c1a=1, int cp_interleave_c2a=1"
)
_METADATA_BUFFERS = (
    "Tensor(a!) req_id_per_token, Tensor(b!) positions, Tensor(c!) swa_slot_mapping, "
    "Tensor(d!) swa_indices, Tensor(e!) swa_lens, "
    "Tensor(f!) compressed_slot_mapping_c1a, Tensor(g!) compressed_slot_mapping_c2a, "
    "Tensor(h!) dcp_local_seq_lens_c1a, Tensor(i!) dcp_local_seq_lens_c2a"
)
_DECODE = (
    "Tensor q, Tensor swa_cache, Tensor swa_indices, Tensor swa_lens, "
    "Tensor? cache=None, Tensor? topk_indices=None, Tensor? topk_lens=None, "
    "Tensor? attn_sink=None, float softmax_scale=0.04419417382415922, bool batch_invariant=False, "
    'str backend="auto", Tensor? positions=None, Tensor? cos_sin=None'
)

_INDEXER = (
    "Tensor q, Tensor weights, Tensor cache, Tensor query_start_loc, Tensor seq_lens, "
    "Tensor block_table, int topk, int compress_ratio, Tensor? candidate_blocks=None, "
    "int num_candidate_blocks=0, int candidate_block_size=8, "
    "int dcp_world_size=1, int dcp_rank=0, int cp_interleave=1"
)

SCHEMAS: dict[str, str] = {
    "token_to_request": "(Tensor query_start_loc, SymInt num_tokens) -> Tensor",
    "compressed_slot_mapping": f"({_SLOT_MAPPING}) -> Tensor",
    "compressed_slot_mapping_out": f"({_SLOT_MAPPING}, *, Tensor(a!) out) -> ()",
    "dcp_local_seq_lens": (
        "(Tensor seq_lens, int compress_ratio, int dcp_world_size, int dcp_rank, "
        "int cp_interleave=1) -> Tensor"
    ),
    "sliding_window_indices": f"({_WINDOW}) -> (Tensor, Tensor)",
    "sliding_window_indices_out": f"({_WINDOW}, *, Tensor(a!) out, Tensor(b!) lens) -> ()",
    "topk_to_slots": f"({_TOPK}) -> (Tensor, Tensor)",
    "topk_to_slots_out": f"({_TOPK}, *, Tensor(a!) out, Tensor(b!) lens) -> ()",
    "decode_metadata": f"({_METADATA}) -> ({', '.join(['Tensor'] * 9)})",
    "decode_metadata_out": f"({_METADATA}, *, {_METADATA_BUFFERS}) -> ()",
    "kv_cache_insert": "(Tensor kv, Tensor slot_mapping, Tensor(a!) cache) -> ()",
    "rope_kv_cache_insert": (
        "(Tensor kv, Tensor positions, Tensor cos_sin, Tensor slot_mapping, Tensor(a!) cache, "
        "int compress_ratio=1) -> ()"
    ),
    "compress_kv": (
        "(Tensor kv, Tensor? score, Tensor query_start_loc, Tensor seq_lens, Tensor norm_weight, "
        "Tensor? ring_slots, Tensor(a!)? ring, int compress_ratio, float eps=1e-20, "
        "ScalarType? out_dtype=None) -> Tensor"
    ),
    "indexer_k_insert": (
        "(Tensor k, Tensor norm_weight, Tensor positions, Tensor cos_sin, Tensor slot_mapping, "
        "Tensor(a!) cache, int compress_ratio=1, float eps=1e-20) -> ()"
    ),
    "indexer_topk": f"({_INDEXER}) -> (Tensor, Tensor, Tensor, Tensor)",
    "merge_topk": "(Tensor indices, Tensor scores, int topk) -> (Tensor, Tensor)",
    "kv_cache_gather": "(Tensor cache, Tensor slots) -> Tensor",
    "sparse_mla_decode": f"({_DECODE}) -> (Tensor, Tensor)",
    "sparse_mla_decode_out": f"({_DECODE}, *, Tensor(a!) out, Tensor(b!) lse) -> ()",
    "merge_attention_states": (
        "(Tensor outs, Tensor lses, Tensor? attn_sink=None) -> (Tensor, Tensor)"
    ),
}
