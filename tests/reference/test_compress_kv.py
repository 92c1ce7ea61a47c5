"""compress_kv by hand, in f64, and over every way to cut a sequence into steps."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv41ops
from tests.reference.test_large_strides import far_apart
from tests.support import HEAD_DIM, assert_same_bits, ints

pytestmark = pytest.mark.usefixtures("one_thread")

EPS = 1e-20


def rows(*shape: int, device: torch.device) -> tuple[Tensor, Tensor]:
    kv, score = torch.randn(2, *shape, HEAD_DIM, device=device).unbind(0)
    return kv, score * 4


def new_ring(num_rows: int, capacity: int, device: torch.device) -> Tensor:
    """Full of what must never be read."""
    return torch.full((num_rows, capacity, 2, HEAD_DIM), math.nan, device=device)


def norm(pooled: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    x = pooled.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def exact(kv: Tensor, score: Tensor, weight: Tensor) -> Tensor:
    """The latents of one whole sequence ``[L, 512]`` of ratio 2, in f64."""
    kv, score = kv.double(), score.double()
    pairs = len(kv) // 2
    out = torch.zeros_like(kv)
    groups, scores = kv[: 2 * pairs].unflatten(0, (pairs, 2)), score[: 2 * pairs]
    weights = scores.unflatten(0, (pairs, 2)).softmax(1)
    out[1::2] = norm((groups * weights).sum(1), weight)
    return out


def one_step(
    kv: Tensor, score: Tensor | None, weight: Tensor, ring: Tensor | None = None, **extra: Any
) -> Tensor:
    """All tokens of one request from position 0 on."""
    device, count = kv.device, kv.shape[0]
    batch = ints([0, count], device), ints([count], device)
    ratio, slots = 1, None
    if score is not None:
        ratio, slots = 2, ints([0], device)
        ring = new_ring(1, 2, device) if ring is None else ring
    return dsv41ops.compress_kv(kv, score, *batch, weight, slots, ring, ratio, **extra)


def test_softmax_of_two_by_hand(device: torch.device) -> None:
    """Scores log 3 apart weigh 1/4 and 3/4; the norm's mean is over all 512."""
    kv, score = torch.zeros(2, 2, HEAD_DIM, device=device).unbind(0)
    kv[0, 0], kv[1, 1], score[1] = 1, 1, math.log(3)
    weight = torch.full((HEAD_DIM,), 2.0, device=device)
    rms = math.sqrt((1 / 16 + 9 / 16) / HEAD_DIM)
    out = one_step(kv, score, weight, out_dtype=torch.float32)
    expected = torch.tensor([0.5 / rms, 1.5 / rms] + [0.0] * 510, device=device)
    torch.testing.assert_close(out[1], expected, rtol=1e-6, atol=0)
    assert not bool(out[0].any())
    assert_same_bits(one_step(kv, score, weight), out.bfloat16())


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e10])
def test_against_f64(ratio: int, scale: float, device: torch.device) -> None:
    kv, score = rows(37, device=device)
    kv *= scale
    weight = torch.randn(HEAD_DIM, device=device)
    out = one_step(kv, score if ratio == 2 else None, weight, out_dtype=torch.float32)
    expected = norm(kv, weight) if ratio == 1 else exact(kv, score, weight)
    error = (out.double() - expected).abs()
    # A difference of two scores is rounded, and its exponential multiplies that.
    assert bool((error <= 4e-6 * expected.abs() + 1e-6).all())
    assert_same_bits(one_step(kv, score if ratio == 2 else None, weight), out.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_eps_and_a_zero_row(dtype: torch.dtype, device: torch.device) -> None:
    kv = torch.randn(3, HEAD_DIM, device=device)
    kv[1] = 0
    weight = torch.randn(HEAD_DIM, device=device).to(dtype)
    out = one_step(kv, None, weight, eps=0.5, out_dtype=torch.float32)
    torch.testing.assert_close(out.double(), norm(kv, weight, 0.5), rtol=1e-6, atol=1e-7)
    assert not bool(one_step(kv, None, weight)[1].any())


INF = math.inf


@pytest.mark.parametrize(
    ("scores", "share"),
    [
        *(((INF, 0.0), 0.0), ((0.0, INF), 1.0), ((-INF, 0.0), 1.0), ((0.0, -INF), 0.0)),
        *(((-INF, INF), 1.0), ((3e38, -3e38), 0.0), ((-3e38, 3e38), 1.0), ((2e38, 2e38), 0.5)),
        *(((INF, INF), None), ((-INF, -INF), None), ((math.nan, 0.0), None)),
    ],
)
def test_infinite_scores(
    scores: tuple[float, float], share: float | None, device: torch.device
) -> None:
    """``share``: the newer row's; None: none exists, a NaN in that column and so in its group."""
    kv, score = rows(4, device=device)
    score[:2, 5] = torch.tensor(scores, device=device)
    weight = torch.ones(HEAD_DIM, device=device)
    out = one_step(kv, score, weight, out_dtype=torch.float32)
    if share is None:
        assert bool(out[1].isnan().all())
    else:
        pooled = (kv[:2] * score[:2].softmax(0)).sum(0)
        pooled[5] = kv[0, 5] * (1 - share) + kv[1, 5] * share
        torch.testing.assert_close(out[1].double(), norm(pooled, weight), rtol=1e-5, atol=1e-6)
    alone = one_step(kv[2:], score[2:], weight, out_dtype=torch.float32)
    assert_same_bits(out[3], alone[1])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_nan_stays_in_its_group(poison: float, device: torch.device) -> None:
    kv, score = rows(8, device=device)
    weight = torch.ones(HEAD_DIM, device=device)
    clean = one_step(kv, score, weight)
    kv[2, 77] = poison
    out = one_step(kv, score, weight)
    assert bool(out[3].isnan().any())
    assert not bool(out[2].any())
    kept = [0, 1, 4, 5, 6, 7]
    assert_same_bits(out[kept], clean[kept])


def mixed_step(device: torch.device) -> dict[str, Any]:
    """Chunks, decodes, an empty, a dummy (positions below 0) and a padded request, and padding."""
    kv, score = rows(20, device=device)
    return {
        "kv": kv,
        "score": score,
        "query_start_loc": ints([0, 5, 6, 6, 9, 12, 12, 12], device),
        "seq_lens": ints([5, 10, 7, 1, 40, 0, 0], device),
        "norm_weight": torch.ones(HEAD_DIM, device=device),
        "ring_slots": ints([4, 0, 2, 1, 5, 3, 3], device),
        "compress_ratio": 2,
    }


# Per row of the ring: the token whose row each place holds after the step, None: as before.
CAPACITY4 = {
    4: [4, 1, 2, 3],  # positions 0 .. 4, the newest 4
    0: [None, 5, None, None],  # position 9
    1: [8, None, None, None],  # positions -2, -1, 0
    5: [None, 9, 10, 11],  # positions 37 .. 39
}


def test_a_mixed_step(device: torch.device) -> None:
    step = mixed_step(device)
    kv, score, weight = step["kv"], step["score"], step["norm_weight"]
    ring = torch.randn(6, 4, 2, HEAD_DIM, device=device)
    before = ring.clone()
    out = dsv41ops.compress_kv(**step, ring=ring, out_dtype=torch.float32)

    expected = torch.zeros(20, HEAD_DIM, dtype=torch.float64, device=device)
    # token -> its predecessor's rows: in the step, or at position (p - 1) % 4 of the ring
    pairs = {1: (kv[0], score[0]), 3: (kv[2], score[2]), 11: (kv[10], score[10])}
    pairs |= {5: before[0, 0].unbind(0), 9: before[5, 0].unbind(0)}
    for token, (old_kv, old_score) in pairs.items():
        two = torch.stack([old_kv, kv[token]]), torch.stack([old_score, score[token]])
        expected[token] = exact(*two, weight)[1]
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert out.any(1).nonzero().flatten().tolist() == [1, 3, 5, 9, 11]

    for row, places in CAPACITY4.items():
        for place, token in enumerate(places):
            if token is not None:
                before[row, place] = torch.stack([kv[token], score[token]])
    assert_same_bits(ring, before)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_request_without_a_ring_row(dtype: torch.dtype, device: torch.device) -> None:
    """Neither read nor written: a first token at an odd position is pooled alone."""
    slots = [-1, 6, -(2**31), 2**31 - 1, *((2**32, -(2**40), 2**62) if dtype.itemsize == 8 else ())]
    count = len(slots)
    kv, score = rows(3 * count, device=device)
    score[0] = math.nan
    weight = torch.randn(HEAD_DIM, device=device)
    batch = ints(range(0, 3 * count + 1, 3), device), ints([10] * count, device)
    for num_rows in (6, 0):
        ring = torch.zeros(num_rows, 4, 2, HEAD_DIM, device=device)
        out = dsv41ops.compress_kv(
            kv, score, *batch, weight, ints(slots, device, dtype), ring, 2, out_dtype=torch.float32
        )
        assert not bool(ring.any())
        alone = one_step(kv, None, weight, out_dtype=torch.float32)
        assert_same_bits(out[0::3], alone[0::3])
        two = one_step(kv[1:3], score[1:3], weight, out_dtype=torch.float32)
        assert_same_bits(out[2], two[1])


def test_ring_and_rows_may_be_views(device: torch.device) -> None:
    step = mixed_step(device)
    rings = torch.randn(6, 3, 4, 2, HEAD_DIM, device=device)  # of three layers
    whole = rings.clone()
    expected_ring = rings[:, 1].clone()
    expected = dsv41ops.compress_kv(**step, ring=expected_ring)
    for name in ("kv", "score"):
        step[name] = torch.cat([step[name], step[name].flip(0)], 1)[:, :HEAD_DIM]
    assert_same_bits(dsv41ops.compress_kv(**step, ring=rings[:, 1]), expected)
    whole[:, 1] = expected_ring
    assert_same_bits(rings, whole)


def test_nothing_to_do(device: torch.device) -> None:
    weight = torch.ones(HEAD_DIM, device=device)
    none = torch.empty(0, HEAD_DIM, device=device)
    ring = new_ring(1, 2, device)
    before = ring.clone()
    assert one_step(none, none, weight, ring).shape == (0, HEAD_DIM)
    kv, score = rows(3, device=device)
    no_requests = ints([0], device), ints([], device)
    slots = ints([], device)
    out = dsv41ops.compress_kv(kv, score, *no_requests, weight, slots, ring, 2)
    assert not bool(out.any())
    assert_same_bits(ring, before)
    assert not bool(dsv41ops.compress_kv(kv, None, *no_requests, weight, None, None, 1).any())


@pytest.mark.parametrize("name", ["score", "ring_slots", "ring"])
def test_ratio1_takes_no_ring(name: str, device: torch.device) -> None:
    given = {"score": None, "ring_slots": None, "ring": None}
    given[name] = {
        "score": torch.ones(1, HEAD_DIM, device=device),
        "ring_slots": ints([0], device),
        "ring": torch.zeros(1, 2, 2, HEAD_DIM, device=device),
    }[name]
    batch = ints([0, 1], device), ints([1], device)
    kv, weight = torch.ones(1, HEAD_DIM, device=device), torch.ones(HEAD_DIM, device=device)
    with pytest.raises(ValueError, match=f"^{name}: expected None with compress_ratio = 1, got "):
        dsv41ops.compress_kv(
            kv, given["score"], *batch, weight, given["ring_slots"], given["ring"], 1
        )


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 11])
@pytest.mark.parametrize("first", [0, 1, 2, 3, 5])
def test_the_row_that_is_read_is_replaced(first: int, count: int, device: torch.device) -> None:
    """Every residue of a chunk that is shorter or longer than the ring, and begins anywhere."""
    kv, score = rows(first + count, device=device)
    weight = torch.randn(HEAD_DIM, device=device)
    whole = one_step(kv, score, weight)
    ring = new_ring(1, 4, device)
    slots, last = ints([0], device), first + count
    for start, stop in ((0, first), (first, last)):
        batch = ints([0, stop - start], device), ints([stop], device)
        part = (kv[start:stop], score[start:stop])
        out = dsv41ops.compress_kv(*part, *batch, weight, slots, ring, 2)
        assert_same_bits(out, whole[start:stop])
    for position in range(max(last - 4, 0), last):
        assert_same_bits(ring[0, position % 4], torch.stack([kv[position], score[position]]))


LENGTH, REQUESTS, CAPACITY = 23, 3, 8


@pytest.mark.parametrize("seed", range(20))
def test_any_chunking_gives_the_same_latents(seed: int, device: torch.device) -> None:
    """Chunks, decodes with drafts of which some are rejected, requests that pause; a shared ring.

    Rejected drafts are NaN: none of them may reach a later step.
    """
    kv, score = rows(REQUESTS, LENGTH, device=device)
    weight = torch.randn(HEAD_DIM, device=device)
    expected = [one_step(*rows, weight) for rows in zip(kv, score, strict=True)]
    ring = new_ring(REQUESTS + 1, CAPACITY, device)
    random = Random(seed)
    slots = random.sample(range(REQUESTS + 1), REQUESTS)
    done = [0] * REQUESTS
    while min(done) < LENGTH:
        starts, lengths, accepted = [0], [], []
        parts = []
        for request in range(REQUESTS):
            left = LENGTH - done[request]
            count = min(left, random.choice((0, 1, 1, 2, 5, 7, 12)))
            # Capacity - 2 drafts may be rejected; a verified token comes before them.
            kept = random.randint(max(1, count - (CAPACITY - 2)), count) if count else 0
            begin, end = done[request], done[request] + count
            part = torch.stack([kv[request, begin:end], score[request, begin:end]])
            part[:, kept:] = math.nan
            parts.append(part)
            starts.append(starts[-1] + count)
            lengths.append(end)
            accepted.append(kept)
        padding = random.randint(0, 2)
        step = torch.cat([*parts, torch.full((2, padding, HEAD_DIM), math.nan, device=device)], 1)
        batch = ints(starts, device), ints(lengths, device)
        out = dsv41ops.compress_kv(*step, *batch, weight, ints(slots, device), ring, 2)
        for request in range(REQUESTS):
            kept, begin = accepted[request], starts[request]
            where = slice(done[request], done[request] + kept)
            assert_same_bits(out[begin : begin + kept], expected[request][where])
            done[request] += kept
        assert not bool(out[starts[-1] :].any())


@pytest.mark.parametrize("name", ["kv", "score", "ring"])
def test_far_rows(name: str, device: torch.device) -> None:
    """Row strides that pass 2^31 elements."""
    arguments: dict[str, Any] = dict(zip(("kv", "score"), rows(3, device=device), strict=True))
    arguments["ring"] = torch.randn(3, 2, 2, HEAD_DIM, device=device)
    batch = ints([0, 1, 2, 3], device), ints([8, 4, 2], device)

    def run() -> list[Tensor]:
        kv, score, ring = (arguments[key] for key in ("kv", "score", "ring"))
        weight, slots = torch.ones(HEAD_DIM, device=device), ints([2, 0, 1], device)
        return [dsv41ops.compress_kv(kv, score, *batch, weight, slots, ring, 2), ring.clone()]

    original = arguments["ring"].clone()
    expected = run()
    arguments["ring"] = original
    arguments[name] = far_apart(arguments[name], 2**30 + 4)
    for far, near in zip(run(), expected, strict=True):
        assert_same_bits(far, near)
