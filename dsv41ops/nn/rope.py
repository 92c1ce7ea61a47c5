"""Rotary embedding: tables with YaRN for the ops, and the rotation of queries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv41ops.layouts import ROPE_DIM

HALF = ROPE_DIM // 2


@dataclass(frozen=True)
class YarnScaling:
    """YaRN without attention scaling (mscale); the defaults are the release's."""

    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position: int = 65536


def rope_frequencies(theta: float, scaling: YarnScaling | None = None) -> Tensor:
    """``[32]`` float64 angles per position. YaRN divides the slow ones by its factor, in a ramp."""
    pair = torch.arange(HALF, dtype=torch.float64)
    frequencies = theta ** (-2 * pair / ROPE_DIM)
    if scaling is None:
        return frequencies

    def pair_with_turns(turns: float) -> float:
        """The (fractional) pair that turns this often over the original context."""
        period = scaling.original_max_position / (turns * 2 * math.pi)
        return ROPE_DIM * math.log(period) / (2 * math.log(theta))

    low = max(math.floor(pair_with_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_with_turns(scaling.beta_slow)), ROPE_DIM - 1)
    ramp = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / scaling.factor * ramp


def rope_table(num_positions: int, theta: float, scaling: YarnScaling | None = None) -> Tensor:
    """Table that the ops take as ``cos_sin``, on torch's default device.

    Args:
        num_positions: Rows: positions 0 .. ``num_positions - 1``.
        theta: Base: in the release 10000 without scaling for layers of ratio 0, and 160000 with
            ``YarnScaling()`` for all others.
        scaling: YaRN, or None.

    Returns:
        ``[num_positions, 64]`` float32: cosines of the 32 pairs, then their sines.
    """
    position = torch.arange(num_positions, dtype=torch.float64)
    angle = position[:, None] * rope_frequencies(theta, scaling)
    return torch.cat([angle.cos().float(), angle.sin().float()], 1)


class StepRope(NamedTuple):
    """One RoPE base in a step: the table, and its rows at the tokens' positions."""

    table: Tensor  # [num_positions, 64] float32, as rope_table gives it
    cos: Tensor  # [T, 64] float32: cosine of each column's pair
    sin: Tensor  # [T, 64] float32: its sine, negative in even columns


def step_rope(table: Tensor, positions: Tensor) -> StepRope:
    """Rows for :func:`rotate_queries`; a position outside the table gets the nearest one's."""
    rows = table[positions.clamp(0, table.shape[0] - 1)]
    cos, sin = rows.split([HALF, HALF], 1)
    return StepRope(
        table, torch.stack([cos, cos], 2).flatten(1), torch.stack([-sin, sin], 2).flatten(1)
    )


def rotate_queries(q: Tensor, rope: StepRope) -> Tensor:
    """``q [T, H, D]`` to bfloat16 with its last 64 columns rotated, in float32."""
    plain, turned = q.split([q.shape[2] - ROPE_DIM, ROPE_DIM], 2)
    turned = turned.float()
    other = turned.unflatten(2, (HALF, 2)).flip(3).flatten(2)  # each pair's other column
    turned = turned * rope.cos[:, None] + other * rope.sin[:, None]
    return torch.cat([plain.bfloat16(), turned.bfloat16()], 2)
