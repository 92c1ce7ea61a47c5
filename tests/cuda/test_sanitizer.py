"""A reduced set to run under compute-sanitizer, about a minute there; commands: docs/capture.md."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

import dsv41ops
from tests.contract.inputs import argument_sets, overload
from tests.cuda.test_backends import aligned
from tests.cuda.test_capture import CUDA, as_bits, captured
from tests.cuda.test_cuda_kernels import Kernel, Pair, random_call, run
from tests.decode_calls import Call
from tests.decode_calls import random_call as any_call
from tests.support import assert_attention_close, ints

if os.environ.get("RACECHECK"):  # see common.cuh
    from dsv41ops.kernels.cuda import nvrtc

    nvrtc.OPTIONS = (*nvrtc.OPTIONS, "-DLANES_THAT_ARRIVE=32")

PAIR = ("mxfp8", "nvfp4")
SETS = [
    ("token_to_request", "T17"),
    ("compressed_slot_mapping", "dcp_slot_mapping"),
    ("dcp_local_seq_lens", "interleave4"),
    ("sliding_window_indices_out", "T17"),
    ("sliding_window_indices", "not_causal"),
    ("topk_to_slots_out", "T17"),
    ("topk_to_slots", "dcp"),
    ("decode_metadata_out", "T17"),
    ("decode_metadata", "all"),
    ("kv_cache_insert", "guarded"),
    ("kv_cache_insert", "nvfp4_T17"),
    ("rope_kv_cache_insert", "guarded"),
    ("rope_kv_cache_insert", "nvfp4_float32"),
    ("compress_kv", "all"),
    ("compress_kv", "strided"),
    ("compress_kv", "ratio1"),
    ("indexer_k_insert", "guarded"),
    ("indexer_k_insert", "strided"),
    ("indexer_topk", "guarded"),
    ("indexer_topk", "strided"),
    ("indexer_topk", "all"),
    ("merge_topk", "strided"),
    ("kv_cache_gather", "guarded"),
    ("kv_cache_gather", "nvfp4_N17"),
    ("merge_attention_states", "strided"),
]


@pytest.mark.parametrize(("op", "name"), SETS)
def test_ops(op: str, name: str) -> None:
    arguments = argument_sets(op)[name](CUDA)
    overload(op)(**arguments)
    torch.cuda.synchronize()


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("pair", [PAIR, ("fp8_ds_mla", "bf16")], ids=str)
def test_triton_attention(pair: Pair, tokens: int) -> None:
    """Split and not, rows at odd addresses too."""
    call = any_call(pair, tokens, 20, CUDA, rope=pair == PAIR)
    assert_attention_close(*call.run(backend="triton"), *call.exact())


def unfit(call: Call) -> Call:
    """Some tokens that the wgmma kernel computes again in f32, and some without a row."""
    q = call.q.clone()
    q[::40, 0] *= 2.0**14
    window, *rest = call.parts
    empty = ints(range(len(q)), CUDA) % 5 == 4
    parts = [replace(part, lens=torch.where(empty, 0, part.lens)) for part in (window, *rest)]
    return replace(call, q=q, scale=call.scale * 2.0**-10, parts=tuple(parts))


@pytest.mark.parametrize(
    ("pair", "kernel", "tokens", "heads"),
    [
        (PAIR, 1, 3, 20),
        (PAIR, 8, 1, 5),
        (("fp8_ds_mla", "fp8_ds_mla"), 3, 2, 16),
        (("fp8_ds_mla", None), 1, 3, 20),
        (PAIR, "wgmma64", 140, 33),
        (("fp8_ds_mla", "fp8_ds_mla"), "wgmma64", 140, 33),
        (PAIR, "wgmma64x2", 70, 100),
        (("fp8_ds_mla", "fp8_ds_mla"), "wgmma64x2", 70, 100),
        (("bf16", "bf16"), 3, 2, 16),
        (("bf16", "bf16"), "wgmma64", 140, 33),
        (("bf16", "bf16"), "wgmma32x2", 3, 33),
        (PAIR, "wgmma32", 70, 33),
        (("fp8_ds_mla", "fp8_ds_mla"), "wgmma32", 70, 33),
        (PAIR, "wgmma32x2", 3, 33),
        (("fp8_ds_mla", "fp8_ds_mla"), "wgmma32x3", 3, 33),
        (PAIR, "wgmma16", 140, 16),
        (("fp8_ds_mla", "fp8_ds_mla"), "wgmma16", 140, 16),
        (("bf16", "bf16"), "wgmma16", 140, 16),
        (PAIR, "wgmma16x2", 3, 16),
    ],
    ids=str,
)
def test_cuda_attention(pair: Pair, kernel: Kernel, tokens: int, heads: int) -> None:
    reason = dsv41ops.backends(device=torch.device("cuda", 0))["cuda"]
    if reason is not None:
        pytest.skip(reason)
    call = unfit(random_call(pair, tokens, heads))
    assert_attention_close(*run(call, kernel), *call.exact())


def test_a_captured_replay() -> None:
    """By the backend that `auto` chooses; captured with every length 0."""
    call = aligned(any_call(PAIR, 3, 16, CUDA))
    lens = [part.lens.clone() for part in call.parts]
    out, lse = torch.empty_like(call.q), torch.empty(3, 16, device=CUDA)
    window, selected = call.parts
    slots = torch.arange(3, device=CUDA)

    def step() -> None:
        dsv41ops.kv_cache_insert(call.q[:, 0], slots, window.cache)
        dsv41ops.sparse_mla_decode_out(
            *(call.q, window.cache, window.indices, window.lens),
            *(selected.cache, selected.indices, selected.lens, call.sink),
            out=out,
            lse=lse,
        )

    for part in call.parts:
        part.lens.zero_()
    graph, _ = captured(step)
    for part, given in zip(call.parts, lens, strict=True):
        part.lens.copy_(given)
    graph.replay()
    replayed = [as_bits(out), as_bits(lse)]
    step()
    assert torch.equal(replayed[0], as_bits(out))
    assert torch.equal(replayed[1], as_bits(lse))
    assert_attention_close(out, lse, *call.exact())
