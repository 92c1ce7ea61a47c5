"""The compressor's kernel on a GPU: one launch, the reference's result, one graph for any step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv41ops
from dsv41ops.reference import compressor
from tests.contract.inputs import argument_sets, overload, schema_order
from tests.cuda.test_capture import as_bits, captured
from tests.cuda.test_decode_metadata import kernels_of
from tests.support import HEAD_DIM

CUDA = torch.device("cuda")
OP = "compress_kv"
NON_EMPTY = [name for name in argument_sets(OP) if name != "T0"]


@pytest.mark.parametrize("name", NON_EMPTY)
def test_one_launch(name: str) -> None:
    arguments = argument_sets(OP)[name](CUDA)
    assert kernels_of(lambda: overload(OP)(**arguments)) == ["_compress_kv_kernel"]


def check(on_gpu: dict[str, Any]) -> Tensor:
    """Against the reference on the CPU: the ring's bits, latents within the exponential's."""
    on_cpu = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in on_gpu.items()}
    latent = overload(OP)(**on_gpu)
    positional, _ = schema_order(OP, on_cpu)
    expected = compressor.compress_kv(*positional)
    assert latent.dtype == expected.dtype
    if on_gpu["compress_ratio"] == 1:
        assert torch.equal(as_bits(latent.cpu()), as_bits(expected))
        return latent
    assert torch.equal(as_bits(on_gpu["ring"].cpu()), as_bits(on_cpu["ring"]))
    rtol = 1e-5 if latent.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(latent.cpu(), expected, rtol=rtol, atol=1e-5, equal_nan=True)
    assert torch.equal(latent.any(1).cpu(), expected.any(1))
    return latent


@pytest.mark.parametrize("name", argument_sets(OP))
def test_equals_the_reference(name: str) -> None:
    check(argument_sets(OP)[name](CUDA))


T, R, CAPACITY = 200, 600, 8


def random_step(generator: torch.Generator) -> dict[str, Tensor]:
    """Many requests, most of them empty, chunks longer than the ring, some without a row."""

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    lengths = integers(0, 30, R) * (torch.rand(R, generator=generator) < 0.02)
    starts = torch.cat([torch.zeros(1), lengths.cumsum(0)]).clamp(max=T).to(torch.int32)
    seq_lens = torch.maximum(integers(0, 2000, R), starts.diff() - integers(0, 3, R))
    slots = torch.randperm(R + 9, generator=generator)[:R] - 5
    kv, score = torch.randn(2, T, HEAD_DIM, generator=generator).unbind(0)
    return {
        "kv": kv,
        "score": score * 5,
        "query_start_loc": starts,
        "seq_lens": seq_lens.to(torch.int32),
        "norm_weight": torch.randn(HEAD_DIM, generator=generator),
        "ring_slots": slots,
        "ring": torch.randn(R, CAPACITY, 2, HEAD_DIM, generator=generator),
    }


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_random_steps(out_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        step = {name: tensor.to(CUDA) for name, tensor in random_step(generator).items()}
        check({**step, "compress_ratio": 2, "out_dtype": out_dtype})
        for name in ("score", "ring_slots", "ring"):
            step[name] = None
        check({**step, "compress_ratio": 1, "out_dtype": out_dtype})


def test_one_graph_serves_any_step() -> None:
    """Captured with every length 0."""
    generator = torch.Generator().manual_seed(2)
    static = {name: torch.zeros_like(t).to(CUDA) for name, t in random_step(generator).items()}
    graph, (latent,) = captured(lambda: dsv41ops.compress_kv(**static, compress_ratio=2))
    for _ in range(20):
        step = {name: tensor.to(CUDA) for name, tensor in random_step(generator).items()}
        for name, tensor in step.items():
            static[name].copy_(tensor)
        graph.replay()
        expected = dsv41ops.compress_kv(**step, compress_ratio=2)
        assert torch.equal(as_bits(latent), as_bits(expected))
        assert torch.equal(as_bits(static["ring"]), as_bits(step["ring"]))


@pytest.mark.parametrize("seed", range(4))
def test_a_long_prompt_in_steps(seed: int) -> None:
    """Thousands of tokens at once, in chunks of any size, and token by token: the same bits.

    Every program of a chunk runs at the same time as the one that reads the ring.
    """
    generator = torch.Generator().manual_seed(seed)
    length = 3000
    kv, score = torch.randn(2, length, HEAD_DIM, generator=generator).to(CUDA).unbind(0)
    weight = torch.randn(HEAD_DIM, generator=generator).to(CUDA)
    slots = torch.tensor([1], device=CUDA)

    def run(cuts: list[int]) -> Tensor:
        ring = torch.full((2, CAPACITY, 2, HEAD_DIM), torch.nan, device=CUDA)
        parts = []
        for begin, end in pairwise(cuts):
            batch = [torch.tensor(x, dtype=torch.int32) for x in ([0, end - begin], [end])]
            rows = kv[begin:end], score[begin:end]
            geometry = (tensor.to(CUDA) for tensor in batch)
            parts.append(dsv41ops.compress_kv(*rows, *geometry, weight, slots, ring, 2))
        return torch.cat(parts)

    whole = run([0, length])
    sizes = torch.randint(1, 40, (length,), generator=generator)
    chunks = [0, *sizes.cumsum(0)[sizes.cumsum(0) < length].tolist(), length]
    for cuts in (chunks, list(range(400))):
        latents = run(cuts)
        assert torch.equal(as_bits(latents), as_bits(whole[: cuts[-1]]))
