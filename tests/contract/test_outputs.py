"""What comes back: fake and meta outputs laid out like the real ones, and nobody's storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.contract.inputs import (
    OPS,
    argument_sets,
    as_meta,
    each_set,
    overload,
    public,
    tensors_of,
)

FUNCTIONAL = [op for op in OPS if overload(op)._schema.returns]
SILENT = [op for op in OPS if op not in FUNCTIONAL]


def listed(outputs: Any) -> list[Tensor]:
    if outputs is None:
        return []
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def layout(tensor: Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.storage_offset())


@pytest.mark.parametrize(("op", "name"), each_set())
def test_fake_and_meta_match_real(op: str, name: str, device: torch.device) -> None:
    arguments = argument_sets(op)[name](device)
    with FakeTensorMode() as mode:
        faked = {
            key: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for key, value in arguments.items()
        }
        fake = listed(overload(op)(**faked))
    meta = listed(overload(op)(**{key: as_meta(value) for key, value in arguments.items()}))
    real = listed(overload(op)(**arguments))
    assert [layout(t) for t in fake] == [layout(t) for t in real]
    assert [layout(t) for t in meta] == [layout(t) for t in real]
    assert [t.device for t in fake] == [t.device for t in real]
    assert {t.device.type for t in meta} <= {"meta"}
    assert {t.device.type for t in real} <= {device.type}


@pytest.mark.parametrize(("op", "name"), each_set(FUNCTIONAL))
def test_outputs_are_fresh(op: str, name: str, device: torch.device) -> None:
    arguments = argument_sets(op)[name](device)
    outputs = listed(public(op)(**arguments))
    assert len(outputs) == len(overload(op)._schema.returns)
    storages = [t.untyped_storage()._cdata for t in [*outputs, *tensors_of(arguments).values()]]
    inputs = storages[len(outputs) :]
    for index in range(len(outputs)):
        assert storages[index] not in inputs
        assert storages.count(storages[index]) == 1
    for output in outputs:
        assert output.is_contiguous()
        assert output.untyped_storage().nbytes() == output.nbytes  # no slice of a larger scratch


@pytest.mark.parametrize(("op", "name"), each_set(SILENT))
def test_mutating_ops_return_none(op: str, name: str, device: torch.device) -> None:
    assert overload(op)(**argument_sets(op)[name](device)) is None
    assert public(op)(**argument_sets(op)[name](device)) is None


@pytest.mark.parametrize("T", [0, 1, 2, 17])
def test_promised_shapes(T: int, device: torch.device) -> None:
    def call(op: str, **extra: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
        arguments = argument_sets(op)[f"T{T}"](device)
        outputs = listed(public(op)(**{**arguments, **extra}))
        return [(tuple(t.shape), t.dtype) for t in outputs]

    i32, f32, bf16 = torch.int32, torch.float32, torch.bfloat16
    assert call("token_to_request") == [((T,), i32)]
    assert call("compressed_slot_mapping") == [((T,), torch.int64)]
    assert call("sliding_window_indices") == [((T, 128), i32), ((T,), i32)]
    assert call("sliding_window_indices", width=192) == [((T, 192), i32), ((T,), i32)]
    assert call("topk_to_slots") == [((T, 5), i32), ((T,), i32)]
    window = [((T,), torch.int64), ((T, 128), i32), ((T,), i32)]
    R = argument_sets("decode_metadata")[f"T{T}"](device)["seq_lens"].shape[0]
    c1a, c2a = ((0,), torch.int64), ((T,), torch.int64)
    lens = [((0,), i32), ((R,), i32)]
    per_token = [((T,), i32), ((T,), torch.int64)]
    assert call("decode_metadata") == [*per_token, *window, c1a, c2a, *lens]
    assert call("compress_kv") == [((T, 512), bf16)]
    assert call("compress_kv", out_dtype=f32) == [((T, 512), f32)]
    assert call("indexer_topk") == [((T, 5), i32), ((T, 5), f32), ((T, 0), i32), ((T, 0), f32)]
    assert call("indexer_topk", num_candidate_blocks=2)[2:] == [((T, 2), i32), ((T, 2), f32)]
    assert call("merge_topk") == [((T, 5), i32), ((T, 5), f32)]
    assert call("sparse_mla_decode") == [((T, 2, 512), bf16), ((T, 2), f32)]
    assert call("merge_attention_states") == [((T, 2, 512), bf16), ((T, 2), f32)]


def test_a_sliced_q_gives_a_contiguous_out(device: torch.device) -> None:
    arguments = argument_sets("sparse_mla_decode")["strided_64_of_128_heads"](device)
    assert arguments["q"].stride() == (128 * 512, 512, 1)
    out, lse = public("sparse_mla_decode")(**arguments)
    assert (out.shape, out.stride()) == ((2, 64, 512), (64 * 512, 512, 1))
    assert (lse.shape, lse.stride()) == ((2, 64), (64, 1))
