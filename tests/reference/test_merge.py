"""Merging partial states of several ranks: identity (C16), unit (C17), sink once (C20)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import dsv41ops
from tests.support import HEAD_DIM, assert_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.bfloat16, torch.float32]


def states(
    num_ranks: int, device: torch.device, dtype: torch.dtype, num_tokens: int = 3, heads: int = 4
) -> tuple[Tensor, Tensor]:
    """Random finite partial states, some of them -0.0."""
    outs = torch.randn(num_ranks, num_tokens, heads, HEAD_DIM, device=device)
    outs[..., ::17] = -0.0
    return outs.to(dtype), torch.randn(num_ranks, num_tokens, heads, device=device) * 3


def constant(values: list[float], zs: list[float], device: torch.device) -> tuple[Tensor, Tensor]:
    """Per rank one token and head: a constant row, and the log of its softmax denominator."""
    outs = torch.tensor(values, device=device)[:, None, None, None].expand(-1, 1, 1, HEAD_DIM)
    lses = torch.tensor(zs, device=device).log()[:, None, None]
    return outs.contiguous(), lses


def exact_merge(outs: Tensor, lses: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The definition in float64, one (token, head) at a time."""
    outs, lses = outs.double().cpu(), lses.double().cpu()
    _, num_tokens, heads, _ = outs.shape
    out = torch.zeros(num_tokens, heads, HEAD_DIM, dtype=torch.float64)
    lse = torch.full((num_tokens, heads), -math.inf, dtype=torch.float64)
    for token, head in itertools.product(range(num_tokens), range(heads)):
        parts = [r for r in range(len(lses)) if lses[r, token, head] > -math.inf]
        if not parts:
            continue
        total = torch.logsumexp(lses[parts, token, head], 0)
        lse[token, head] = total
        for rank in parts:
            out[token, head] += outs[rank, token, head] * (lses[rank, token, head] - total).exp()
        if sink is not None:
            out[token, head] /= 1 + (sink[head].double().cpu() - total).exp()
    return out, lse


def assert_merged(
    merged: tuple[Tensor, Tensor], outs: Tensor, lses: Tensor, sink: Tensor | None = None
) -> None:
    out, lse = merged
    expected, expected_lse = exact_merge(outs, lses, sink)
    assert out.dtype == outs.dtype
    assert lse.dtype == torch.float32
    rounding = 2.0**-8 if out.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(out.double().cpu(), expected, rtol=rounding, atol=2e-6)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("with_sink", [False, True])
def test_the_definition(
    with_sink: bool, num_ranks: int, dtype: torch.dtype, device: torch.device
) -> None:
    outs, lses = states(num_ranks, device, dtype)
    lses[torch.rand(lses.shape, device=device) < 0.3] = -math.inf
    sink = torch.randn(4, device=device) * 2 if with_sink else None
    assert_merged(dsv41ops.merge_attention_states(outs, lses, sink), outs, lses, sink)


def test_c17_two_ranks_in_natural_log(device: torch.device) -> None:
    out, lse = dsv41ops.merge_attention_states(*constant([10.0, 0.0], [2.0, 8.0], device))
    assert lse.item() == pytest.approx(2.302585, abs=1e-6)
    torch.testing.assert_close(out, torch.full_like(out, 2.0))


@pytest.mark.parametrize(
    ("logit", "expected"),
    [(math.log(10), 1.0), (-math.inf, 2.0), (3e38, 0.0), (-3e38, 2.0), (math.inf, 0.0)],
)
def test_c20_the_sink_joins_once(logit: float, expected: float, device: torch.device) -> None:
    outs, lses = constant([10.0, 0.0], [2.0, 8.0], device)
    plain, plain_lse = dsv41ops.merge_attention_states(outs, lses)
    sink = torch.tensor([logit], device=device)
    out, lse = dsv41ops.merge_attention_states(outs, lses, sink)
    assert_same_bits(lse, plain_lse)
    torch.testing.assert_close(out, torch.full_like(out, expected), rtol=1e-6, atol=0)
    if expected == 2.0:
        assert_same_bits(out, plain)
    if expected == 0.0:
        assert not bool(out.any())


def test_c20_distinct_sinks_per_head(device: torch.device) -> None:
    """Each as large as its own lse, one empty row, and the extremes next to them."""
    outs, lses = states(3, device, torch.float32, num_tokens=2, heads=8)
    lses[:, 1, 2] = -math.inf
    total = torch.logsumexp(lses[:, 0], 0)
    sink = total + torch.linspace(-1, 1, 8, device=device)
    sink[3:7] = torch.tensor([-math.inf, math.inf, 3e38, -3e38], device=device)
    out, lse = dsv41ops.merge_attention_states(outs, lses, sink)
    assert_merged((out, lse), outs, lses, sink)
    assert bool(torch.isfinite(out).all())
    assert_same_bits(out[1, 2], torch.zeros_like(out[1, 2]))


@pytest.mark.parametrize("logit", [None, 0.5, -math.inf, math.inf, 3e38, -3e38])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_c16_all_empty(
    dtype: torch.dtype, num_ranks: int, logit: float | None, device: torch.device
) -> None:
    """Whatever the unset buffers hold, 0 and -inf come out, with any sink."""
    outs, lses = states(num_ranks, device, dtype)
    outs[0], lses[:] = math.nan, -math.inf
    sink = None if logit is None else torch.full((4,), logit, device=device)
    out, lse = dsv41ops.merge_attention_states(outs, lses, sink)
    assert_same_bits(out, torch.zeros_like(out))
    assert bool(torch.isneginf(lse).all())


@pytest.mark.parametrize("unset", [0.0, math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_c16_one_rank_comes_back_bit_for_bit(
    dtype: torch.dtype, num_ranks: int, unset: float, device: torch.device
) -> None:
    """In every place, -0.0 included, with lse from very negative to very positive."""
    for place in range(num_ranks):
        outs, lses = states(num_ranks, device, dtype)
        lses[place, 0] = torch.tensor([-1e30, 1e30, -87.3, 123.4], device=device)
        others = [rank for rank in range(num_ranks) if rank != place]
        outs[others], lses[others] = unset, -math.inf
        out, lse = dsv41ops.merge_attention_states(outs, lses)
        assert_same_bits(out, outs[place])
        assert_same_bits(lse, lses[place])
        minus_inf = torch.full((4,), -math.inf, device=device)
        same, _ = dsv41ops.merge_attention_states(outs, lses, minus_inf)
        assert_same_bits(same, out)


def test_c16_very_negative_is_not_empty(device: torch.device) -> None:
    outs, lses = states(2, device, torch.float32)
    lses[:] = -1e30
    out, lse = dsv41ops.merge_attention_states(outs, lses)
    torch.testing.assert_close(out, (outs[0] + outs[1]) / 2, rtol=1e-6, atol=1e-6)
    assert bool((lse == -1e30).all())


def test_large_lse_does_not_overflow(device: torch.device) -> None:
    outs, lses = states(3, device, torch.float32)
    assert_merged(dsv41ops.merge_attention_states(outs, lses + 1e4), outs, lses + 1e4)
    lses[1] += 3e38  # one rank outweighs the others altogether
    out, lse = dsv41ops.merge_attention_states(outs, lses)
    torch.testing.assert_close(out, outs[1], rtol=0, atol=0)
    assert_same_bits(lse, lses[1])


def test_neighbours_do_not_matter(device: torch.device) -> None:
    """A NaN state stays in its own row and head."""
    outs, lses = states(2, device, torch.bfloat16)
    out, lse = dsv41ops.merge_attention_states(outs, lses)
    outs[0, 1, 2] = math.nan
    spoiled, same_lse = dsv41ops.merge_attention_states(outs, lses)
    assert bool(torch.isnan(spoiled[1, 2]).all())
    spoiled[1, 2] = out[1, 2]
    assert_same_bits(spoiled, out)
    assert_same_bits(same_lse, lse)


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_shapes_and_fresh_results(num_ranks: int, num_tokens: int, device: torch.device) -> None:
    """No result shares memory with an input, one rank included; inputs stay as they were."""
    outs, lses = states(num_ranks, device, torch.bfloat16, num_tokens=num_tokens)
    before = outs.clone(), lses.clone()
    out, lse = dsv41ops.merge_attention_states(outs, lses)
    assert out.shape == (num_tokens, 4, HEAD_DIM)
    assert lse.shape == (num_tokens, 4)
    out.fill_(7)
    lse.fill_(7)
    assert_same_bits(outs, before[0])
    assert_same_bits(lses, before[1])


def test_strided_states(device: torch.device) -> None:
    """Ranks gathered into one bigger buffer: same bits as from a dense copy."""
    outs, lses = states(3, device, torch.bfloat16)
    wide = torch.full((3, 5, 9, HEAD_DIM), math.nan, device=device).bfloat16()
    wide[:, 1:4, 2:6] = outs
    wide_lses = torch.full((3, 5, 9), math.nan, device=device)
    wide_lses[:, 1:4, 2:6] = lses
    strided = dsv41ops.merge_attention_states(wide[:, 1:4, 2:6], wide_lses[:, 1:4, 2:6])
    for a, b in zip(strided, dsv41ops.merge_attention_states(outs, lses), strict=True):
        assert_same_bits(a, b)
