"""The index keys' kernel on a GPU: one launch, the reference's bytes, one graph for any step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dsv41ops
from dsv41ops.reference import index_keys
from tests.contract.inputs import (
    argument_sets,
    index_cache,
    overload,
    rope_table,
    schema_order,
    storage_bytes,
)
from tests.cuda.test_capture import captured
from tests.cuda.test_decode_metadata import kernels_of

CUDA = torch.device("cuda")
OP = "indexer_k_insert"
NON_EMPTY = [name for name in argument_sets(OP) if not name.endswith("T0")]


@pytest.mark.parametrize("name", NON_EMPTY)
def test_one_launch(name: str) -> None:
    arguments = argument_sets(OP)[name](CUDA)
    assert kernels_of(lambda: overload(OP)(**arguments)) == ["_indexer_k_insert_kernel"]


@pytest.mark.parametrize("name", argument_sets(OP))
def test_equals_the_reference(name: str) -> None:
    """Both sets draw their numbers on the CPU; the whole storage of the pool is compared."""
    on_gpu, on_cpu = (argument_sets(OP)[name](device) for device in (CUDA, torch.device("cpu")))
    for arguments in (on_gpu, on_cpu):
        arguments["cache"].fill_(0xA5)
    overload(OP)(**on_gpu)
    positional, _ = schema_order(OP, on_cpu)
    index_keys.indexer_k_insert(*positional)
    assert torch.equal(on_gpu["cache"].cpu(), on_cpu["cache"])


PAGES, PAGE, T, POSITIONS = 300, 64, 512, 5000


def random_step(generator: torch.Generator) -> dict[str, Tensor]:
    """Magnitudes far apart, some values that are not finite, some slots and positions invalid."""
    k = torch.randn(T, 128, generator=generator)
    k *= torch.exp2(torch.randint(-40, 40, (T, 1), generator=generator).float())
    k[::37, 5], k[11::50, 100] = torch.nan, torch.inf
    slots = torch.randperm(PAGES * PAGE + 99, generator=generator)[:T] - 20
    positions = torch.randint(-2, POSITIONS + 40, (T,), generator=generator)
    weight = torch.randn(128, generator=generator)
    return {"k": k, "norm_weight": weight, "positions": positions, "slot_mapping": slots}


@pytest.mark.parametrize("k_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("record", ["fp8", "mxfp4"])
def test_random_keys(record: str, k_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    table = rope_table(POSITIONS, CUDA)
    for ratio in (1, 2, 5):
        step = random_step(generator)
        step["k"], step["norm_weight"] = step["k"].to(k_dtype), step["norm_weight"].to(k_dtype)
        caches = [dsv41ops.new_index_cache(PAGES, PAGE, record, device) for device in ("cpu", CUDA)]
        on_gpu = {name: tensor.to(CUDA) for name, tensor in step.items()}
        dsv41ops.indexer_k_insert(**on_gpu, cos_sin=table, cache=caches[1], compress_ratio=ratio)
        arguments: dict[str, Any] = {**step, "cos_sin": table.cpu(), "cache": caches[0]}
        index_keys.indexer_k_insert(**arguments, compress_ratio=ratio, eps=1e-20)
        assert torch.equal(caches[1].cpu(), caches[0])


@pytest.mark.parametrize("record", ["fp8", "mxfp4"])
def test_one_graph_serves_any_step(record: str) -> None:
    """Captured with every slot 0 and into guarded pages, of which only the named rows change."""
    generator = torch.Generator().manual_seed(6)
    static = {name: torch.zeros_like(t).to(CUDA) for name, t in random_step(generator).items()}
    rest = {"cos_sin": rope_table(POSITIONS, CUDA), "compress_ratio": 2}
    cache = index_cache(record, CUDA, guard_pages=1)
    other = index_cache(record, CUDA, guard_pages=1)
    graph, _ = captured(lambda: dsv41ops.indexer_k_insert(**static, **rest, cache=cache))
    other.copy_(cache)
    for _ in range(20):
        for name, tensor in random_step(generator).items():
            static[name].copy_(tensor)
        graph.replay()
        dsv41ops.indexer_k_insert(**static, **rest, cache=other)
        assert torch.equal(storage_bytes(cache), storage_bytes(other))
