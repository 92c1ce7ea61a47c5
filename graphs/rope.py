"""Rotary embedding: tables with YaRN, and interleaved (GPT-J) rotation of the last dimensions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphs.config import ModelConfig, RopeScaling


def inverse_frequencies(rope_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """``[rope_dim / 2]`` float64. YaRN divides the slow frequencies by its factor, in a ramp."""
    pair = torch.arange(0, rope_dim, 2, dtype=torch.float64)
    frequencies = theta ** (-pair / rope_dim)
    if scaling is None:
        return frequencies

    def pair_with_rotations(rotations: float) -> float:
        """The (fractional) pair that turns this often over the original context."""
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope_dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(pair_with_rotations(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_with_rotations(scaling.beta_slow)), rope_dim - 1)
    position = torch.arange(rope_dim // 2, dtype=torch.float64)
    ramp = ((position - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / scaling.factor * ramp


def cos_sin_table(config: ModelConfig, compressed: bool, num_positions: int) -> Tensor:
    """``[num_positions, 2, rope_dim / 2]`` float64 cosines and sines."""
    theta = config.compress_rope_theta if compressed else config.rope_theta
    scaling = config.rope_scaling if compressed else None
    frequencies = inverse_frequencies(config.qk_rope_head_dim, theta, scaling)
    angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies
    return torch.stack([angle.cos(), angle.sin()], 1)


def rotate(x: Tensor, cos_sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last ``rope_dim`` of ``x [N, ..., D]`` by ``cos_sin [N, 2, rope_dim / 2]``."""
    half = cos_sin.shape[2]
    cos, sin = cos_sin.to(x.dtype).unbind(1)
    for _ in range(x.dim() - 2):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if inverse:
        sin = -sin
    plain, turned = x.split([x.shape[-1] - 2 * half, 2 * half], -1)
    even, odd = turned.unflatten(-1, (half, 2)).unbind(-1)
    pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return torch.cat([plain, pairs.flatten(-2)], -1)
