"""The kernel against the reference: latents within roundings, every bit of the ring."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dsv41ops.kernels.triton.compress_kv import launch_compress_kv
from dsv41ops.reference.compressor import compress_kv
from tests.kernels.interpreted.batches import BATCHES, CPU, Batch
from tests.reference.test_large_strides import far_apart
from tests.support import HEAD_DIM, assert_same_bits, ints

EPS = 1e-20
WEIGHT = torch.linspace(-2, 2, HEAD_DIM)


def wide(num_tokens: int, spread: float = 1.0) -> Tensor:
    """Rows inside wider ones, at odd offsets."""
    return (torch.randn(num_tokens, HEAD_DIM + 3) * spread)[:, 1:-2]


def check(
    batch: tuple[Tensor, Tensor],
    kv: Tensor,
    score: Tensor | None,
    slots: Tensor | None = None,
    ring: Tensor | None = None,
    weight: Tensor = WEIGHT,
    eps: float = EPS,
) -> Tensor:
    """By both, in f32 and in bf16; the f32 latents."""
    ratio = 1 if score is None else 2
    for dtype in (torch.float32, torch.bfloat16, None):
        results, rings = [], []
        for run in (launch_compress_kv, compress_kv):
            own = None if ring is None else ring.clone()
            results.append(run(kv, score, *batch, weight, slots, own, ratio, eps, dtype))
            rings.append(own)
        got, expected = results
        assert got.dtype == (torch.bfloat16 if dtype is None else dtype)
        if ratio == 1:
            assert_same_bits(got, expected)
        else:
            assert_same_bits(rings[0], rings[1])
            # Two libraries' exponentials; bf16 doubles what is next to a half-way point.
            rtol = 1e-5 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(got, expected, rtol=rtol, atol=1e-5, equal_nan=True)
        if dtype == torch.float32:
            latent = got
    return latent


@pytest.mark.parametrize("batch", BATCHES)
def test_ratio1(batch: Batch) -> None:
    for weight in (WEIGHT, WEIGHT.bfloat16()):
        check(batch.geometry(), wide(batch.num_tokens, 3), None, weight=weight, eps=0.25)


@pytest.mark.parametrize("capacity", [2, 4])
@pytest.mark.parametrize("batch", BATCHES)
def test_ratio2(batch: Batch, capacity: int) -> None:
    requests = len(batch.seq_lens)
    kv, score = wide(batch.num_tokens), wide(batch.num_tokens, 4)
    slots = torch.randperm(requests + 2) - 1  # one has none, another's is past the ring
    rings = torch.randn(requests, 3, capacity, 2, HEAD_DIM)
    check(batch.geometry(), kv, score, slots, rings[:, 1])
    check(batch.geometry(), kv, score, slots.int(), rings[:, 2], WEIGHT.bfloat16())


@pytest.mark.parametrize("start", [-(2**31), -3, 1])
def test_starts_off_the_step(start: int) -> None:
    """The first token of the step is not the request's first, or is nobody's."""
    kv, score = wide(5), wide(5)
    ring = torch.randn(1, 2, 2, HEAD_DIM)
    for length in (6, 7, 2**31 - 1):
        check((ints([start, 4], CPU), ints([length], CPU)), kv, score, ints([0], CPU), ring)


@pytest.mark.parametrize("capacity", [2, 8])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_chunks_give_the_same_bits(first: int, capacity: int) -> None:
    kv, score = wide(11), wide(11)
    slots = ints([0], CPU)
    latents = []
    for cuts in ((0, 11), (0, first, first + 1, first + 4, 11)):
        ring = torch.full((1, capacity, 2, HEAD_DIM), math.nan)
        parts = []
        for begin, end in pairwise(cuts):
            batch = ints([0, end - begin], CPU), ints([end], CPU)
            rows = kv[begin:end], score[begin:end]
            parts.append(launch_compress_kv(*rows, *batch, WEIGHT, slots, ring, 2, EPS, None))
        latents.append(torch.cat(parts))
    assert_same_bits(latents[1], latents[0])


def test_hostile_slots_and_values() -> None:
    slots = [-1, 3, -(2**31), 2**31 - 1, 2**32, -(2**40), 2**62]
    batch = ints(range(0, 15, 2), CPU), ints([9] * 7, CPU)
    kv, score = wide(14), wide(14)
    values = [math.nan, math.inf, -math.inf, 3e38, -3e38, 0.0, -0.0]
    for row, value in enumerate(values):
        kv[row, row], score[row + 7, row] = value, value
    for rows in (3, 0):
        check(batch, kv, score, torch.tensor(slots), torch.randn(rows, 2, 2, HEAD_DIM))


def test_no_tokens() -> None:
    batch = ints([0, 0], CPU), ints([4], CPU)
    ring = torch.randn(1, 2, 2, HEAD_DIM)
    assert check(batch, wide(0), wide(0), ints([0], CPU), ring).shape == (0, HEAD_DIM)


@pytest.mark.parametrize("name", ["kv", "score", "ring"])
def test_far_rows(name: str) -> None:
    tensors = {"kv": wide(3), "score": wide(3), "ring": torch.randn(3, 2, 2, HEAD_DIM)}
    batch = ints([0, 1, 2, 3], CPU), ints([8, 4, 2], CPU)
    results = []
    for far in (False, True):
        own = {key: tensor.clone() for key, tensor in tensors.items()}
        own[name] = far_apart(own[name], 2**30 + 4) if far else own[name]
        kv, score, ring = own.values()
        slots = ints([2, 0, 1], CPU)
        latent = launch_compress_kv(kv, score, *batch, WEIGHT, slots, ring, 2, EPS, None)
        results.append((latent, ring.clone()))
    for far, near in zip(*results, strict=True):
        assert_same_bits(far, near)
