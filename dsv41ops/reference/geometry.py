"""Batch geometry that the index ops share: positions, block-table look-ups, DCP ownership, packing.

Everything is read on the device and bounded there: no host sync, no shape that follows a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1


def request_of(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """``[T]`` int64 request of each token, -1 for padding."""
    num_requests = query_start_loc.shape[0] - 1
    token = torch.arange(num_tokens, dtype=torch.int32, device=query_start_loc.device)
    # Right-sided: an empty request's start equals the next one's and is passed over.
    request = torch.searchsorted(query_start_loc, token, right=True) - 1
    return torch.where(request < num_requests, request, -1)


def per_request(values: Tensor, request: Tensor) -> Tensor:
    """``values[request]`` as int64; padding tokens get some value of the tensor, or 0."""
    if values.shape[0] == 0:
        return torch.zeros_like(request)
    return values.to(torch.int64)[request.clamp(min=0)]


def token_positions(
    query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Per token int64: request, position, and its request's first query position.

    Request and position are -1 for padding; position is -1 where it would be negative.
    """
    request = request_of(query_start_loc, num_tokens)
    start = per_request(query_start_loc[:-1], request)
    query_len = per_request(query_start_loc[1:], request) - start
    first = per_request(seq_lens, request) - query_len
    token = torch.arange(num_tokens, device=query_start_loc.device)
    position = first + token - start
    return request, torch.where((request >= 0) & (position >= 0), position, -1), first


def page_number(block_table: Tensor, request: Tensor, page: Tensor) -> Tensor:
    """``block_table[request, page]`` as int64, -1 wherever that lies outside the table."""
    rows, columns = block_table.shape
    if rows == 0 or columns == 0:
        return torch.full_like(page, -1)
    inside = (request >= 0) & (request < rows) & (page >= 0) & (page < columns)
    entry = block_table[request.clamp(0, rows - 1), page.clamp(0, columns - 1)].to(torch.int64)
    return torch.where(inside & (entry >= 0), entry, -1)


def slot_of(block_table: Tensor, request: Tensor, row: Tensor, page_size: int) -> Tensor:
    """Slot of a request's ``row``-th cached row, -1 where there is none (``row < 0`` included)."""
    page = page_number(block_table, request, row // page_size)
    return torch.where(page >= 0, page * page_size + row % page_size, -1)


def local_state(state: Tensor, world: int, rank: int, interleave: int) -> Tensor:
    """This rank's number of a global state, -1 where another rank owns it or ``state < 0``."""
    local = state // (interleave * world) * interleave + state % interleave
    owned = (state >= 0) & (state // interleave % world == rank)
    return torch.where(owned, local, -1)


def pack_left(slots: Tensor) -> tuple[Tensor, Tensor]:
    """Move the valid entries of each row to the front, in order; their count beside it.

    ``[T, K]`` int64 to int32, -1 beyond. A slot that int32 cannot hold counts as invalid.
    """
    num_tokens, width = slots.shape
    valid = (slots >= 0) & (slots <= INT32_MAX)
    # Invalid entries all land in one extra column, which is cut off.
    target = torch.where(valid, valid.cumsum(1) - 1, width)
    packed = torch.full(
        (num_tokens, width + 1), -1, dtype=torch.int32, device=slots.device
    ).scatter_(1, target, slots.to(torch.int32))
    # A copy always: with one row, the slice would pass for contiguous and keep its wider stride.
    packed = packed[:, :width].clone(memory_format=torch.contiguous_format)
    return packed, valid.sum(1, dtype=torch.int32)
