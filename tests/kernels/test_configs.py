"""Launch configurations are pure functions of sizes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dsv41ops.configs import INVARIANT_ROWS, MAX_SPLITS, DecodeProblem, decode_config

PROBLEM = DecodeProblem(num_tokens=1, num_heads=64, window_width=128, topk_width=512, num_sms=132)
TOKENS = [*range(1, 300), 512, 8192]


def blocks(problem: DecodeProblem) -> int:
    block_n = decode_config(problem).block_n
    return math.ceil(problem.window_width / block_n) + math.ceil(problem.topk_width / block_n)


@pytest.mark.parametrize(
    ("num_tokens", "splits"), [(1, 10), (8, 10), (16, 5), (64, 2), (128, 1), (512, 1), (8192, 1)]
)
def test_splits_fill_the_gpu(num_tokens: int, splits: int) -> None:
    """The release's widths on an H200."""
    assert decode_config(replace(PROBLEM, num_tokens=num_tokens)).num_splits == splits


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads", [1, 16, 17, 128])
@pytest.mark.parametrize("widths", [(0, 0), (1, 0), (128, 0), (0, 64), (128, 512), (192, 70000)])
def test_bounds(widths: tuple[int, int], heads: int, batch_invariant: bool) -> None:
    for num_tokens in TOKENS:
        problem = DecodeProblem(num_tokens, heads, *widths, 132, batch_invariant)
        splits = decode_config(problem).num_splits
        assert 1 <= splits <= max(1, min(MAX_SPLITS, blocks(problem)))


def test_no_split_is_empty_at_full_width() -> None:
    for num_tokens in TOKENS:
        problem = replace(PROBLEM, num_tokens=num_tokens, topk_width=2048)
        splits, total = decode_config(problem).num_splits, blocks(problem)
        shares = [total * (s + 1) // splits - total * s // splits for s in range(splits)]
        assert min(shares) >= 1
        assert max(shares) == math.ceil(total / splits)


@pytest.mark.parametrize("width", [0, 1, 64, 512, 2048])
def test_batch_invariant_ignores_the_batch(width: int) -> None:
    problem = replace(PROBLEM, topk_width=width, batch_invariant=True)
    configs = {
        decode_config(replace(problem, num_tokens=num_tokens, num_sms=num_sms))
        for num_tokens in TOKENS
        for num_sms in (78, 132)
    }
    assert len(configs) == 1
    (config,) = configs
    longest = math.ceil(blocks(problem) / config.num_splits)
    assert longest * config.block_n <= INVARIANT_ROWS or config.num_splits == MAX_SPLITS


@pytest.mark.parametrize("capability", [8, 9, 10, 12])
def test_tiles(capability: int) -> None:
    """Only sm_90's matrix instructions hold 64 heads at a time."""
    for heads in range(1, 129):
        config = decode_config(replace(PROBLEM, num_heads=heads, capability=capability))
        assert config.block_h == (64 if capability == 9 and heads > 16 else 16)
