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
INT32_MIN: tl.constexpr = tl.constexpr(-(2**31))
# Starts that a program compares at once. A search would wait for one load per step; here all loads
# of a step are in flight together.
FEW_STARTS: tl.constexpr = tl.constexpr(128)
MANY_STARTS: tl.constexpr = tl.constexpr(512)
# Tokens of a program that writes no rows, by one warp: a warp has nobody to wait for.
TOKEN_BLOCK = 4
FILL_ROWS = 16  # rows of padding that a program fills


def kernel(fn: Callable[..., Any]) -> Any:
    """``triton.jit`` whose variants follow dtypes, given optionals and constexprs alone.

    Neither a number's value (1, a multiple of 16) nor a pointer's alignment makes a new one.
    """
    parameters = inspect.signature(fn).parameters.values()
    free = [p.name for p in parameters if "constexpr" not in str(p.annotation)]
    return triton.jit(do_not_specialize=free, do_not_specialize_on_alignment=free)(fn)


def stripe_of(world: int, interleave: int) -> int:
    """States from one of a rank's runs to its next; as good as infinite past 2^31."""
    return min(world * interleave, 2**31)


def row_programs(num_tokens: int, out_rows: int) -> int:
    """A program per token's row; the rows of padding past them are shared out in blocks."""
    return num_tokens + triton.cdiv(out_rows - num_tokens, FILL_ROWS)


def column_block(width: int) -> tuple[int, int]:
    """Columns of an index row that a program takes at a time, and its warps: three variants."""
    block = 128 if width <= 128 else 512 if width <= 512 else 1024
    return block, block // 128


@triton.jit
def _count_starts(query_start_loc_ptr, first, num_starts, token, BLOCK: tl.constexpr):
    """Of BLOCK starts, how many are at or before each token."""
    offs = first + tl.arange(0, BLOCK)
    start = tl.load(query_start_loc_ptr + offs, mask=offs < num_starts, other=INT32_MAX)
    return tl.sum((start[None, :] <= token[:, None]).to(tl.int32), 1)


@triton.jit
def find_requests(query_start_loc_ptr, num_requests, token, num_tokens):
    """Request of each of a block of tokens, -1 from ``num_tokens`` on and past the last request."""
    num_starts = num_requests + 1
    # An empty request's start equals the next one's, so it is passed over.
    if num_starts <= FEW_STARTS:
        begun = _count_starts(query_start_loc_ptr, 0, num_starts, token, FEW_STARTS)
    else:
        begun = _count_starts(query_start_loc_ptr, 0, num_starts, token, MANY_STARTS)
        first = MANY_STARTS
        while first < num_starts:
            begun += _count_starts(query_start_loc_ptr, first, num_starts, token, MANY_STARTS)
            first += MANY_STARTS
    request = begun - 1
    return tl.where((token < num_tokens) & (request < num_requests), request, -1)


@triton.jit
def _scan_requests(
    query_start_loc_ptr, seq_lens_ptr, first, num_requests, token, BLOCK: tl.constexpr
):
    """The last request of BLOCK that has begun, above its length in one number; the starts around
    the token."""
    request = first + tl.arange(0, BLOCK)
    start = tl.load(query_start_loc_ptr + request, mask=request <= num_requests, other=INT32_MAX)
    seq_len = tl.load(seq_lens_ptr + request, mask=request < num_requests, other=0)
    begun = start <= token
    last = (request.to(tl.int64) << 32) | (seq_len.to(tl.int64) & 0xFFFFFFFF)
    return (
        tl.max(tl.where(begun, last, -1), 0),
        tl.max(tl.where(begun, start, INT32_MIN), 0),
        tl.min(tl.where(begun, INT32_MAX, start), 0),
    )


@triton.jit
def locate_token(query_start_loc_ptr, seq_lens_ptr, num_requests, token):
    """Of one token: request, int32 position, and its request's first query position (int64) and
    length. Request and position are -1 for padding; position is -1 where it would be negative.

    Everything comes from one round of loads, or one per MANY_STARTS requests up to the token's.
    """
    if num_requests < FEW_STARTS:
        last, start, end = _scan_requests(
            query_start_loc_ptr, seq_lens_ptr, 0, num_requests, token, FEW_STARTS
        )
    else:
        last, start, end = _scan_requests(
            query_start_loc_ptr, seq_lens_ptr, 0, num_requests, token, MANY_STARTS
        )
        first = MANY_STARTS
        while (first <= num_requests) & (end == INT32_MAX):
            other_last, other_start, other_end = _scan_requests(
                query_start_loc_ptr, seq_lens_ptr, first, num_requests, token, MANY_STARTS
            )
            last = tl.maximum(last, other_last)
            start = tl.maximum(start, other_start)
            end = tl.minimum(end, other_end)
            first += MANY_STARTS
    request = (last >> 32).to(tl.int32)
    request = tl.where(request < num_requests, request, -1)
    seq_len = last.to(tl.int32)
    first_query = seq_len.to(tl.int64) - end + start
    position = first_query + token - start
    position = tl.where((request >= 0) & (position >= 0), position, -1).to(tl.int32)
    return request, position, first_query, seq_len


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
def pack_left(slots, start, out_ptr, count):
    """Append the slots that int32 holds to a row that has ``count`` entries; the new count.

    Without a hole from the ``start``-th on, places are plain: a scan takes far longer than a sum.
    """
    offs = tl.arange(0, slots.shape[0])
    valid = (slots >= 0) & (slots <= INT32_MAX)
    kept = tl.sum(valid.to(tl.int32), 0)
    end = tl.max(tl.where(valid, offs + 1, start), 0)
    place = offs - start
    if end - start != kept:
        place = tl.cumsum(valid.to(tl.int32), 0) - 1
    tl.store(out_ptr + (count + place), slots.to(tl.int32), mask=valid)
    return count + kept


@triton.jit
def end_row(out_ptr, lens_ptr, count, width, BLOCK: tl.constexpr):
    """-1 behind a row's ``count`` entries, and the count."""
    tl.store(lens_ptr, count)
    start = count
    while start < width:
        column = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + column, -1, mask=column < width)
        start += BLOCK


@triton.jit
def fill_rows(
    first, out_rows, out_stride, width, out_ptr, lens_ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """ROWS rows of padding: -1, and length 0."""
    row = first + tl.arange(0, ROWS)
    tl.store(lens_ptr + row, 0, mask=row < out_rows)
    rows_ptr = out_ptr + row.to(tl.int64)[:, None] * out_stride
    column = 0
    while column < width:
        offs = column + tl.arange(0, BLOCK)
        # Past the last row no column is inside.
        limit = tl.where(row < out_rows, width, 0)
        tl.store(rows_ptr + offs[None, :], -1, mask=offs[None, :] < limit[:, None])
        column += BLOCK


@triton.jit
def bf16_to_f32(value):
    return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_f32(value):
    """A value of a tensor that may be bf16 or f32."""
    return bf16_to_f32(value) if value.dtype == tl.bfloat16 else value


@triton.jit
def f32_to_bf16(value):
    """Rounded to nearest even; NaN becomes the plain one."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, rounded)
    return (rounded >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
