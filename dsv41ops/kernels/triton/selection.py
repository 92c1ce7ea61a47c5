"""Exact selection of the best entries of a list: by score, ties to the earlier entry.

A score is compared as a *key*, an int32 in the order of the scores. Lists are in ascending order
of their numbers, so the earlier of two entries is the one of the lower number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv41ops.kernels.triton.common import INT32_MIN

ABSENT = INT32_MIN  # below the key of every score
INFINITY = tl.constexpr(0x7F800000)  # key of +inf


@triton.jit
def to_key(scores):
    """ABSENT for NaN; 0 has no sign."""
    bits = scores.to(tl.int32, bitcast=True)
    bits = tl.where(bits == INT32_MIN, 0, bits)
    return tl.where(scores != scores, ABSENT, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def to_score(keys):
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best(keys, num_present, k):
    """Which of the keys are the ``k`` best, all present ones if there are no more; and a floor: an
    entry behind these is among the best of all only if its key is above it.

    The k-th key is found bit by bit from the top, in an unsigned number that starts at ABSENT; it
    need not be found exactly once k keys are at or above what is known of it.
    """
    least = tl.where(num_present > k, ABSENT, ABSENT + 1)
    bit = tl.where(num_present > k, 31, -1)
    at_least = num_present
    while (bit >= 0) & (at_least != k):
        trial = least ^ (1 << bit)
        count = tl.sum((keys >= trial).to(tl.int32), 0)
        least = tl.where(count >= k, trial, least)
        at_least = tl.where(count >= k, count, at_least)
        bit -= 1
    keep = keys >= least
    floor = least - 1
    if at_least > k:  # ties at the k-th
        equal = keys == least
        wanted = k - tl.sum((keys > least).to(tl.int32), 0)
        rank = tl.cumsum(equal.to(tl.int32), 0)
        keep = (keys > least) | (equal & (rank <= wanted))
        floor = least
    return keep, floor


@triton.jit
def append(keys, numbers, floor, keys_ptr, numbers_ptr, count):
    """Entries above the floor to the end of a list in memory; its new length."""
    keep = (keys > floor).to(tl.int32)
    place = count + tl.cumsum(keep, 0) - 1
    tl.store(keys_ptr + place, keys, mask=keep > 0)
    tl.store(numbers_ptr + place, numbers, mask=keep > 0)
    return count + tl.sum(keep, 0)


@triton.jit
def shorten(keys_ptr, numbers_ptr, count, k, SIZE: tl.constexpr):
    """Leave the ``k`` best of a list of more in memory; the floor."""
    tl.debug_barrier()
    offs = tl.arange(0, SIZE)
    keys = tl.load(keys_ptr + offs, mask=offs < count, other=ABSENT)
    keep, floor = best(keys, count, k)
    numbers = tl.load(numbers_ptr + offs, mask=keep, other=-1)
    place = tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.debug_barrier()  # the list is overwritten
    tl.store(keys_ptr + place, keys, mask=keep)
    tl.store(numbers_ptr + place, numbers, mask=keep)
    return floor
