"""The kernel against the reference: bits where the meaning fixes them, else rounding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv41ops.kernels.triton.merge_attention_states import launch_merge_attention_states
from dsv41ops.reference.attention import merge_attention_states
from tests.support import HEAD_DIM, assert_same_bits

DTYPES = [torch.bfloat16, torch.float32]


def states(
    num_ranks: int, dtype: torch.dtype, num_tokens: int = 2, heads: int = 5
) -> tuple[Tensor, Tensor]:
    outs = torch.randn(num_ranks, num_tokens, heads, HEAD_DIM)
    outs[..., ::17] = -0.0
    return outs.to(dtype), torch.randn(num_ranks, num_tokens, heads) * 3


def check(outs: Tensor, lses: Tensor, sink: Tensor | None = None) -> None:
    out, lse = launch_merge_attention_states(outs, lses, sink)
    expected, expected_lse = merge_attention_states(outs, lses, sink)
    assert out.dtype == expected.dtype
    assert out.is_contiguous()
    rounding = 2.0**-8 if out.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(out, expected, rtol=rounding, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6, equal_nan=True)
    zero = expected == 0
    assert bool((out[zero] == 0).all())
    assert_same_bits(torch.signbit(out[zero]), torch.signbit(expected[zero]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("with_sink", [False, True])
def test_random_states(with_sink: bool, num_ranks: int, dtype: torch.dtype) -> None:
    outs, lses = states(num_ranks, dtype)
    lses[torch.rand(lses.shape) < 0.3] = -math.inf
    check(outs, lses, torch.randn(5) * 2 if with_sink else None)


@pytest.mark.parametrize("heads", [1, 3, 4, 9])
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_shapes(num_tokens: int, heads: int) -> None:
    check(*states(2, torch.bfloat16, num_tokens, heads), torch.randn(heads))


@pytest.mark.parametrize("unset", [0.0, math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rank_comes_back_bit_for_bit(dtype: torch.dtype, unset: float) -> None:
    for place in range(3):
        outs, lses = states(3, dtype, heads=4)
        outs[place, 1, 1, :5] = torch.tensor([math.inf, math.nan, -math.inf, 3e38, 1e-40])
        lses[place, 0] = torch.tensor([-1e30, 1e30, -87.3, 123.4])
        others = [rank for rank in range(3) if rank != place]
        outs[others], lses[others] = unset, -math.inf
        for sink in (None, torch.full((4,), -math.inf)):
            out, lse = launch_merge_attention_states(outs, lses, sink)
            number = ~outs[place].isnan()
            assert torch.equal(~out.isnan(), number)
            assert_same_bits(out[number], outs[place][number])
            assert_same_bits(lse, lses[place])


@pytest.mark.parametrize("logit", [None, 0.5, -math.inf, math.inf, 3e38, -3e38])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_rows(dtype: torch.dtype, logit: float | None) -> None:
    outs, lses = states(3, dtype)
    outs[0, 0], lses[:, 0] = math.nan, -math.inf
    sink = None if logit is None else torch.full((5,), logit)
    check(outs, lses, sink)
    out, lse = launch_merge_attention_states(outs, lses, sink)
    assert_same_bits(out[0], torch.zeros_like(out[0]))
    assert bool(torch.isneginf(lse[0]).all())


@pytest.mark.parametrize("scale", [1e4, 1e30, 3e38])
def test_large_logarithms_and_sinks(scale: float) -> None:
    outs, lses = states(3, torch.float32)
    lses[0] += scale
    lses[1] -= scale
    for sign in (1, -1):
        check(outs, lses, sign * torch.tensor([0.0, scale, 3e38, math.inf, 1.0]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_states_stay_in_their_own_row_and_head(value: float) -> None:
    outs, lses = states(2, torch.bfloat16)
    outs[0, 1, 2], lses[1, 0, 3] = math.nan, value
    check(outs, lses)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 1])
def test_strided_states(start: int, dtype: torch.dtype) -> None:
    """Ranks gathered into a bigger buffer, at an aligned and an odd column."""
    outs, lses = states(3, dtype)
    wide = torch.full((3, 4, 9, HEAD_DIM + 16), math.nan, dtype=dtype)
    wide[:, 1:3, 2:7, start : start + HEAD_DIM] = outs
    wide_lses = torch.full((3, 4, 9), math.nan)
    wide_lses[:, 1:3, 2:7] = lses
    merged = launch_merge_attention_states(
        wide[:, 1:3, 2:7, start : start + HEAD_DIM], wide_lses[:, 1:3, 2:7], None
    )
    for mine, dense in zip(merged, launch_merge_attention_states(outs, lses, None), strict=True):
        assert_same_bits(mine, dense)
