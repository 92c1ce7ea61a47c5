"""Rotary embedding of interleaved pairs by a row of ``cos_sin``: 32 cosines, then 32 sines.

Both sides of a sum are products that the reference rounds: where bits have to be its, launch with
``enable_fp_fusion=False``.
"""

import triton
import triton.language as tl

from dsv41ops.layouts import ROPE_DIM

NUM_PAIRS = tl.constexpr(ROPE_DIM // 2)


@triton.jit
def group_start(position, compress_ratio):
    """The int64 position of the first token of a position's group; -1 below 0."""
    # Division rounds to 0 here, and would make a position of -1.
    return tl.where(position < 0, -1, position // compress_ratio * compress_ratio)


@triton.jit
def find_row(cos_sin_ptr, cos_sin_stride, num_positions, position):
    """The row of an int64 position, and whether there is one: another is not to be read."""
    known = (position >= 0) & (position < num_positions)
    return cos_sin_ptr + tl.where(known, position, 0) * cos_sin_stride, known


@triton.jit
def rotate(values, pair, cos_sin_row, known, INVERSE: tl.constexpr):
    """``[N, M]`` f32 columns by the angle of their pairs, ``pair`` ``[N or 1, M / 2]``.

    Columns whose pair's number is negative stay as they are, and all without a ``known`` position.
    """
    even, odd = tl.split(tl.reshape(values, [values.shape[0], values.shape[1] // 2, 2]))
    turns = pair >= tl.where(known, 0, NUM_PAIRS)
    cos = tl.load(cos_sin_row + pair, mask=turns, other=1.0)
    sin = tl.load(cos_sin_row + NUM_PAIRS + pair, mask=turns, other=0.0)
    if INVERSE:
        sin = -sin
    turned_even = tl.where(turns, even * cos - odd * sin, even)
    turned_odd = tl.where(turns, even * sin + odd * cos, odd)
    return tl.reshape(tl.join(turned_even, turned_odd), [values.shape[0], values.shape[1]])
