"""No fake and no check branches on a size: every batch size may be unbacked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

from tests.compile.toy import Toy, make_step
from tests.contract.inputs import (
    OPS,
    argument_sets,
    attention,
    overload,
    public,
    tensors_of,
)

# Dimensions that follow the batch, the model or the pool; the rest is fixed by the record.
FREE_DIMS = {
    "query_start_loc": (0,),
    "seq_lens": (0,),
    "block_table": (0, 1),
    "slot_mapping": (0,),
    "replay_start": (0,),
    "swa_block_table": (0, 1),
    "block_table_c1a": (0, 1),
    "block_table_c2a": (0, 1),
    "topk_indices": (0, 1),
    "kv": (0,),
    "cache": (0,),
    "slots": (0,),
    "score": (0,),
    "norm_weight": (),
    "ring_slots": (0,),
    "ring": (0,),
    "k": (0,),
    "weights": (0, 1),
    "candidate_blocks": (0, 1),
    "indices": (0, 1, 2),
    "scores": (0, 1, 2),
    "cos_sin": (0,),
    "q": (0, 1),
    "swa_cache": (0,),
    "swa_indices": (0, 1),
    "swa_lens": (0,),
    "topk_lens": (0,),
    "attn_sink": (0,),
    "outs": (0, 1, 2),
    "lses": (0, 1, 2),
    "out": (0,),
    "lens": (0,),
    "lse": (0, 1),
    "req_id_per_token": (0,),
    "positions": (0,),
    "swa_slot_mapping": (0,),
    "compressed_slot_mapping_c1a": (0,),
    "compressed_slot_mapping_c2a": (0,),
    "dcp_local_seq_lens_c1a": (0,),
    "dcp_local_seq_lens_c2a": (0,),
}
# A twin's buffer shares a dimension with an input only where the op has one that is free.
BUFFER_DIMS = {
    ("topk_to_slots_out", "out"): (0, 1),
    ("sparse_mla_decode_out", "out"): (0, 1),
    ("decode_metadata_out", "swa_indices"): (0,),
}
EVERYTHING_GIVEN = {
    "token_to_request": "T17",
    "compressed_slot_mapping": "dcp_slot_mapping",
    "dcp_local_seq_lens": "interleave4",
    "sliding_window_indices": "replay_start",
    "topk_to_slots": "dcp",
    "decode_metadata": "all",
    "kv_cache_insert": "nvfp4_T17",
    "compress_kv": "all",
    "indexer_k_insert": "fp8_T17",
    "rope_kv_cache_insert": "ratio2",
    "indexer_topk": "all",
    "merge_topk": "T17",
    "kv_cache_gather": "nvfp4_N17",
    "sparse_mla_decode": "all",
    "merge_attention_states": "sink",
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_every_size_unbacked(op: str, strict: bool) -> None:
    # Not strict: branching on a size is an error. Strict: fixing a size to a constant is.
    make = argument_sets(op)[EVERYTHING_GIVEN[op.removesuffix("_out")]]
    arguments, again = (make(torch.device("cpu")) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(public(op), backend=counter, fullgraph=True)
    for name, tensor in tensors_of(arguments).items():
        for dim in BUFFER_DIMS.get((op, name), FREE_DIMS[name]):
            mark_unbacked(tensor, dim, strict=strict)
    compiled_result = compiled(**arguments)
    eager_result = overload(op)(**again)
    torch.testing.assert_close(compiled_result, eager_result, rtol=0, atol=0, equal_nan=True)
    for name, tensor in tensors_of(arguments).items():
        assert same_bits(tensor, again[name]), name
    assert counter.frame_count == 1


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_mismatch_after_compiling_is_refused(backend: str) -> None:
    cpu = torch.device("cpu")
    compiled = torch.compile(public("sparse_mla_decode"), backend=backend, fullgraph=True)
    arguments = attention(5, cpu)
    for name in ("q", "swa_indices", "swa_lens"):
        mark_unbacked(arguments[name], 0)
    compiled(**arguments)
    wrong = attention(7, cpu)
    wrong["swa_lens"] = wrong["swa_lens"][:6]
    with pytest.raises(TorchRuntimeError, match=r"swa_lens: expected tokens = .* in dimension 0"):
        compiled(**wrong)


def test_a_symbolic_trace_keeps_every_call() -> None:
    step = make_step(5)
    toy = Toy()  # its buffers become constants of the trace
    trace = make_fx(toy, tracing_mode="symbolic", _allow_non_fake_inputs=True)
    traced = trace(*step.tensors())
    targets = [str(node.target) for node in traced.graph.nodes]
    assert targets.count("dsv41.kv_cache_insert.default") == 2
    assert targets.count("dsv41.rope_kv_cache_insert.default") == 2
    assert targets.count("dsv41.sparse_mla_decode.default") == 4
    step = make_step(17, R=4, P=9, seed=1)
    assert torch.equal(traced(*step.tensors())[0], Toy()(*step.tensors())[0])
