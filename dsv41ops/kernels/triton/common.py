"""Device code that several ops share: batch geometry, block-table look-ups, DCP ownership, bf16.

The kernels compute what ``reference/`` says, bit for bit, on a GPU and in Triton's interpreter. So
bf16 is converted and scales are taken apart in integers: the interpreter's own conversions round
wrongly.
"""

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from dsv41ops.kernels.triton.capture import guard_capture

guard_capture()

INT32_MAX: tl.constexpr = tl.constexpr(2**31 - 1)


def kernel(fn: Callable[..., Any]) -> Any:
    """``triton.jit`` whose variants follow dtypes, given optionals and constexprs alone.

    Neither a number's value (1, a multiple of 16) nor a pointer's alignment makes a new one.
    """
    parameters = inspect.signature(fn).parameters.values()
    free = [p.name for p in parameters if "constexpr" not in str(p.annotation)]
    return triton.jit(do_not_specialize=free, do_not_specialize_on_alignment=free)(fn)


def search_steps(query_start_loc: Any) -> int:
    """Steps after which a binary search over the starts of all requests has ended."""
    return int(query_start_loc.shape[0]).bit_length()


def stripe_of(world: int, interleave: int) -> int:
    """States from one of a rank's runs to its next; as good as infinite past 2^31."""
    return min(world * interleave, 2**31)


def column_block(width: int) -> tuple[int, int]:
    """Columns of an index row that a program takes at a time, and its warps: three variants."""
    block = 128 if width <= 128 else 512 if width <= 512 else 1024
    return block, block // 128


@triton.jit
def find_request(query_start_loc_ptr, num_requests, steps, token, real):
    """Request of each token, -1 where not ``real`` and past the last request."""
    low = token * 0
    high = low + (num_requests + 1)
    # Right-sided: an empty request's start equals the next one's and is passed over.
    while steps > 0:
        middle = low + ((high - low) >> 1)
        open_ = low < high
        start = tl.load(query_start_loc_ptr + middle, mask=open_ & real, other=0)
        right = open_ & (start <= token)
        high = tl.where(right, high, middle)
        low = tl.where(right, middle + 1, low)
        steps -= 1
    request = low - 1
    return tl.where(real & (request < num_requests), request, -1)


@triton.jit
def token_position(query_start_loc_ptr, seq_lens_ptr, request, token):
    """int32 position in the request, -1 for padding and where it would be negative."""
    known = request >= 0
    end = tl.load(query_start_loc_ptr + request + 1, mask=known, other=0)
    seq_len = tl.load(seq_lens_ptr + request, mask=known, other=0)
    # Below seq_len, as token < end; only a negative one may need 64 bits.
    position = seq_len.to(tl.int64) - end + token
    return tl.where(known & (position >= 0), position, -1).to(tl.int32)


@triton.jit
def slot_of(
    block_table_ptr, table_stride, table_rows, table_columns, request, row, valid, page_size
):
    """int64 slot of a request's ``row``-th cached row, -1 where it has none or is not ``valid``."""
    page = row // page_size
    inside = valid & (page < tl.where((request >= 0) & (request < table_rows), table_columns, 0))
    where = request.to(tl.int64) * table_stride + page
    entry = tl.load(block_table_ptr + where, mask=inside, other=-1).to(tl.int64)
    return tl.where(inside & (entry >= 0), entry * page_size + row % page_size, -1)


@triton.jit
def local_state(state, stripe, world, rank, interleave, SHARDED: tl.constexpr):
    """This rank's number of a global state ``>= 0``, and whether it owns that state."""
    local = state
    owned = state >= 0
    if SHARDED:
        local = state // stripe * interleave + state % interleave
        owned = owned & (state // interleave % world == rank)
    return local, owned


@triton.jit
def pack_left(slots, out_ptr, count):
    """Append the slots that int32 holds to a row that has ``count`` entries; the new count."""
    valid = (slots >= 0) & (slots <= INT32_MAX)
    kept = valid.to(tl.int32)
    place = count + tl.cumsum(kept, 0) - 1
    tl.store(out_ptr + place, slots.to(tl.int32), mask=valid)
    return count + tl.sum(kept, 0)


@triton.jit
def fill_row(out_ptr, start, width, BLOCK: tl.constexpr):
    """-1 from column ``start`` to the row's end."""
    while start < width:
        column = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + column, -1, mask=column < width)
        start += BLOCK


@triton.jit
def bf16_to_f32(value):
    return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def f32_to_bf16(value):
    """Rounded to nearest even; NaN becomes the plain one."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, rounded)
    return (rounded >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
