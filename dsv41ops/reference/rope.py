"""Rotary embedding of the last 64 columns, interleaved pairs (GPT-J style)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41ops.layouts import ROPE_DIM


def group_start(positions: Tensor, compress_ratio: int) -> Tensor:
    """int64 position of the first token of each position's group; below 0 stays below 0."""
    return positions.to(torch.int64) // compress_ratio * compress_ratio


def has_position(positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Whether the table has a row for each position."""
    return (positions >= 0) & (positions < cos_sin.shape[0])


def rotate_last(x: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool = False) -> Tensor:
    """``[N, ..., D]`` f32 with each row's last 64 columns rotated to its position, or back.

    ``cos_sin`` is ``[num_positions, 64]`` f32: 32 cosines, then 32 sines. A row whose position
    the table does not have stays as it is. Every product is rounded before it is added, so that
    no device's result depends on which of them it fuses.
    """
    valid = has_position(positions, cos_sin)
    if cos_sin.shape[0] == 0:
        return x
    table = cos_sin[torch.where(valid, positions, 0).to(torch.int64)]
    table = table.unflatten(1, (2, ROPE_DIM // 2))
    cos, sin = (half.view(-1, *[1] * (x.dim() - 2), ROPE_DIM // 2) for half in table.unbind(1))
    if inverse:
        sin = -sin
    rest, pairs = x[..., :-ROPE_DIM], x[..., -ROPE_DIM:].unflatten(-1, (-1, 2))
    even, odd = pairs.unbind(-1)
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    rotated = torch.where(valid.view(-1, *[1] * x.dim()), rotated, pairs)
    return torch.cat([rest, rotated.flatten(-2)], -1)
