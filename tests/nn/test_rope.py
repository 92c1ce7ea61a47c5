"""RoPE tables; the recorded attention stack (tests/graphs) holds them against the release's."""

from __future__ import annotations

import math

import torch

import dsv41ops
from dsv41ops.nn import YarnScaling, rope_frequencies, rope_table
from dsv41ops.nn.rope import rotate_queries, step_rope


def test_plain_table() -> None:
    table = rope_table(100, 10000.0)
    assert (table.shape, table.dtype) == ((100, 64), torch.float32)
    for position, pair in ((0, 0), (1, 0), (99, 5), (42, 31)):
        angle = position * 10000.0 ** (-2 * pair / 64)
        assert math.isclose(table[position, pair], math.cos(angle), abs_tol=1e-7)
        assert math.isclose(table[position, 32 + pair], math.sin(angle), abs_tol=1e-7)


def test_late_positions_are_exact() -> None:
    """Angles are float64: float32 would be a tenth of a turn off at a million."""
    table = rope_table(1_000_001, 10000.0)
    assert math.isclose(table[1_000_000, 0], math.cos(1_000_000.0), abs_tol=1e-7)


def test_yarn() -> None:
    plain = rope_frequencies(160000.0)
    scaled = rope_frequencies(160000.0, YarnScaling())
    turns = plain * 65536 / (2 * math.pi)
    ratio = plain / scaled
    assert torch.equal(scaled[turns > 32.0 * 1.5], plain[turns > 32.0 * 1.5])
    assert torch.allclose(ratio[turns < 1 / 1.5], ratio.new_tensor(16.0))
    assert (ratio.diff() >= -1e-12).all()
    assert ((ratio > 1.001) & (ratio < 15.999)).sum() >= 5  # the ramp


def test_queries_turn_as_cached_rows_do() -> None:
    table, positions = rope_table(64, 10000.0), torch.tensor([0, 3, 63, 17])
    rows = torch.randn(4, 512)
    cache = dsv41ops.new_kv_cache(1, 4, "bf16")
    slots = torch.arange(4)
    dsv41ops.rope_kv_cache_insert(rows, positions, table, slots, cache)
    expected = dsv41ops.kv_cache_gather(cache, slots)
    for dtype in (torch.float32, torch.bfloat16):
        came = rotate_queries(rows[:, None].to(dtype), step_rope(table, positions))[:, 0]
        torch.testing.assert_close(came, expected, atol=2**-7, rtol=2**-6)


def test_positions_outside_the_table_do_no_harm() -> None:
    rope = step_rope(rope_table(8, 10000.0), torch.tensor([-1, 8, 10**9]))
    assert bool(rope.cos.isfinite().all())
    assert torch.equal(rope.cos[1], rope.cos[2])
