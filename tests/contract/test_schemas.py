"""The schemas are frozen: a saved export and every caller depend on these names and defaults."""

from __future__ import annotations

import inspect

import pytest
import torch

import dsv41ops
from tests.contract.inputs import OPS, overload, public, written

# Written out on purpose. A new argument needs a default and a change here; none is ever renamed.
FROZEN = {
    "token_to_request": "(Tensor query_start_loc, SymInt num_tokens) -> Tensor",
    "compressed_slot_mapping": (
        "(Tensor query_start_loc, Tensor seq_lens, Tensor block_table, SymInt num_tokens, "
        "int states_per_page, int compress_ratio, Tensor? slot_mapping=None, "
        "int dcp_world_size=1, int dcp_rank=0, int cp_interleave=1) -> Tensor"
    ),
    "compressed_slot_mapping_out": (
        "(Tensor query_start_loc, Tensor seq_lens, Tensor block_table, SymInt num_tokens, "
        "int states_per_page, int compress_ratio, Tensor? slot_mapping=None, "
        "int dcp_world_size=1, int dcp_rank=0, int cp_interleave=1, *, Tensor(a!) out) -> ()"
    ),
    "dcp_local_seq_lens": (
        "(Tensor seq_lens, int compress_ratio, int dcp_world_size, int dcp_rank, "
        "int cp_interleave=1) -> Tensor"
    ),
    "sliding_window_indices": (
        "(Tensor query_start_loc, Tensor seq_lens, Tensor block_table, SymInt num_tokens, "
        "int page_size, int window=128, int? width=None, bool causal=True, "
        "Tensor? replay_start=None) -> (Tensor, Tensor)"
    ),
    "sliding_window_indices_out": (
        "(Tensor query_start_loc, Tensor seq_lens, Tensor block_table, SymInt num_tokens, "
        "int page_size, int window=128, int? width=None, bool causal=True, "
        "Tensor? replay_start=None, *, Tensor(a!) out, Tensor(b!) lens) -> ()"
    ),
    "topk_to_slots": (
        "(Tensor topk_indices, Tensor query_start_loc, Tensor seq_lens, Tensor block_table, "
        "int states_per_page, int compress_ratio, int dcp_world_size=1, int dcp_rank=0, "
        "int cp_interleave=1) -> (Tensor, Tensor)"
    ),
    "topk_to_slots_out": (
        "(Tensor topk_indices, Tensor query_start_loc, Tensor seq_lens, Tensor block_table, "
        "int states_per_page, int compress_ratio, int dcp_world_size=1, int dcp_rank=0, "
        "int cp_interleave=1, *, Tensor(a!) out, Tensor(b!) lens) -> ()"
    ),
    "decode_metadata": (
        "(Tensor query_start_loc, Tensor seq_lens, SymInt num_tokens, "
        "Tensor? swa_block_table=None, int? swa_page_size=None, Tensor? block_table_c1a=None, "
        "Tensor? block_table_c2a=None, int? block_size=None, int window=128, int? width=None, "
        "bool causal=True, Tensor? replay_start=None, Tensor? slot_mapping=None, "
        "int dcp_world_size=1, int dcp_rank=0, int cp_interleave_c1a=1, int cp_interleave_c2a=1) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "decode_metadata_out": (
        "(Tensor query_start_loc, Tensor seq_lens, SymInt num_tokens, "
        "Tensor? swa_block_table=None, int? swa_page_size=None, Tensor? block_table_c1a=None, "
        "Tensor? block_table_c2a=None, int? block_size=None, int window=128, int? width=None, "
        "bool causal=True, Tensor? replay_start=None, Tensor? slot_mapping=None, "
        "int dcp_world_size=1, int dcp_rank=0, int cp_interleave_c1a=1, int cp_interleave_c2a=1, "
        "*, Tensor(a!) req_id_per_token, Tensor(b!) positions, Tensor(c!) swa_slot_mapping, "
        "Tensor(d!) swa_indices, Tensor(e!) swa_lens, Tensor(f!) compressed_slot_mapping_c1a, "
        "Tensor(g!) compressed_slot_mapping_c2a, Tensor(h!) dcp_local_seq_lens_c1a, "
        "Tensor(i!) dcp_local_seq_lens_c2a) -> ()"
    ),
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
    "indexer_topk": (
        "(Tensor q, Tensor weights, Tensor cache, Tensor query_start_loc, Tensor seq_lens, "
        "Tensor block_table, int topk, int compress_ratio, Tensor? candidate_blocks=None, "
        "int num_candidate_blocks=0, int candidate_block_size=8, int dcp_world_size=1, "
        "int dcp_rank=0, int cp_interleave=1) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "merge_topk": "(Tensor indices, Tensor scores, int topk) -> (Tensor, Tensor)",
    "kv_cache_gather": "(Tensor cache, Tensor slots) -> Tensor",
    "sparse_mla_decode": (
        "(Tensor q, Tensor swa_cache, Tensor swa_indices, Tensor swa_lens, Tensor? cache=None, "
        "Tensor? topk_indices=None, Tensor? topk_lens=None, Tensor? attn_sink=None, "
        "float softmax_scale=0.04419417382415922, bool batch_invariant=False, "
        'str backend="auto", Tensor? positions=None, Tensor? cos_sin=None) -> (Tensor, Tensor)'
    ),
    "sparse_mla_decode_out": (
        "(Tensor q, Tensor swa_cache, Tensor swa_indices, Tensor swa_lens, Tensor? cache=None, "
        "Tensor? topk_indices=None, Tensor? topk_lens=None, Tensor? attn_sink=None, "
        "float softmax_scale=0.04419417382415922, bool batch_invariant=False, "
        'str backend="auto", Tensor? positions=None, Tensor? cos_sin=None, '
        "*, Tensor(a!) out, Tensor(b!) lse) -> ()"
    ),
    "merge_attention_states": (
        "(Tensor outs, Tensor lses, Tensor? attn_sink=None) -> (Tensor, Tensor)"
    ),
}


@pytest.mark.parametrize("op", FROZEN)
def test_schema_is_frozen(op: str) -> None:
    assert overload(op)._schema == torch._C.parse_schema(f"dsv41::{op}{FROZEN[op]}")


def test_no_other_ops() -> None:
    registered = {
        name.removeprefix("dsv41::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("dsv41::")
    }
    assert registered == set(FROZEN) == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_tags(op: str) -> None:
    # needs_exact_strides: inductor must not densify q slices or repack a padded cache.
    assert set(overload(op).tags) == {torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides}


@pytest.mark.parametrize("op", OPS)
def test_both_devices_registered_and_no_composite(op: str) -> None:
    name = f"dsv41::{op}"
    for key in ("CPU", "CUDA", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), key
    for key in ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "Autograd"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, key), key


# The ring's rows are those of the latents that it returns: one launch.
@pytest.mark.parametrize("op", [op for op in OPS if written(op) and op != "compress_kv"])
def test_mutating_ops_return_nothing(op: str) -> None:
    assert overload(op)._schema.returns == []


@pytest.mark.parametrize("op", OPS)
def test_public_signature_is_the_schemas(op: str) -> None:
    parameters = list(inspect.signature(public(op)).parameters.values())
    schema = overload(op)._schema.arguments
    assert [p.name for p in parameters] == [a.name for a in schema]
    for parameter, argument in zip(parameters, schema, strict=True):
        keyword_only = parameter.kind is parameter.KEYWORD_ONLY
        assert keyword_only == argument.kwarg_only, argument.name
        if argument.has_default_value():
            assert parameter.default == argument.default_value, argument.name
            assert type(parameter.default) is type(argument.default_value), argument.name
        else:
            assert parameter.default is parameter.empty, argument.name


@pytest.mark.parametrize("op", OPS)
def test_public_function_is_typed_and_documented(op: str) -> None:
    function = public(op)
    assert op in dsv41ops.__all__
    signature = inspect.signature(function)
    assert signature.return_annotation is not signature.empty
    assert all(p.annotation is not p.empty for p in signature.parameters.values())
    documentation = inspect.getdoc(function) or ""
    # A twin's page refers to its functional form for all but the buffers.
    names = written(op) if op.endswith("_out") else list(signature.parameters)
    for name in names:
        assert f"    {name}: " in documentation, name


def test_default_scale() -> None:
    parameters = inspect.signature(public("sparse_mla_decode")).parameters
    assert parameters["softmax_scale"].default == 512**-0.5
