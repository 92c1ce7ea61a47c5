"""Sparse MLA decode by FlashMLA: its conventions on one side, the op's on the other.

It takes 64 or 128 heads and index rows in blocks of 64, skips an index of exactly -1 and follows
every other one, gives +inf for the ``lse`` of an empty row, and writes tensors of its own. The
plan of its splits is left to be computed by each call, on the device: lengths may change under a
captured graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41ops.configs import DecodeProblem
from dsv41ops.kernels.capture import refuse_in_capture
from dsv41ops.kernels.flash_mla.library import padded_heads, sparse_decode_op
from dsv41ops.kernels.triton.common import kernel
from dsv41ops.layouts import HEAD_DIM

BLOCK = 64  # of its index rows
WORKSPACE_BYTES = 2**28  # of its split results; more tokens than that take turns

# Devices and padded heads whose kernels have run: CUDA loads each when it is first launched.
_warm: set[tuple[torch.device, int]] = set()


@triton.jit
def _copy_row(
    indices_ptr, len_ptr, width, last_slot, row_ptr, padded, count_ptr, BLOCK: tl.constexpr
):
    length = tl.minimum(tl.maximum(tl.load(len_ptr), 0), width)
    tl.store(count_ptr, length)
    column = 0
    while column < padded:
        offs = column + tl.arange(0, BLOCK)
        slots = tl.load(indices_ptr + offs, mask=offs < length, other=-1)
        slots = tl.where((slots >= 0) & (slots <= last_slot), slots, -1)
        tl.store(row_ptr + offs, slots, mask=offs < padded)
        column += BLOCK


@kernel
def _valid_rows_kernel(
    swa_indices_ptr,
    swa_lens_ptr,
    topk_indices_ptr,
    topk_lens_ptr,
    num_tokens,
    swa_indices_stride: tl.int64,
    swa_width,
    swa_padded,
    swa_last_slot,
    topk_indices_stride: tl.int64,
    topk_width,
    topk_padded,
    last_slot,
    rows_ptr,
    counts_ptr,
    BLOCK: tl.constexpr,
):
    """One program per token: its index rows, -1 for what must not be read, and their lengths."""
    token = tl.program_id(0).to(tl.int64)
    row_ptr = rows_ptr + token * (swa_padded + topk_padded)
    _copy_row(
        swa_indices_ptr + token * swa_indices_stride,
        swa_lens_ptr + token,
        swa_width,
        swa_last_slot,
        row_ptr,
        swa_padded,
        counts_ptr + token,
        BLOCK,
    )
    if topk_indices_ptr is not None:
        _copy_row(
            topk_indices_ptr + token * topk_indices_stride,
            topk_lens_ptr + token,
            topk_width,
            last_slot,
            row_ptr + swa_padded,
            topk_padded,
            counts_ptr + num_tokens + token,
            BLOCK,
        )


def variants(problems: Iterable[DecodeProblem]) -> list[dict[str, Any]]:
    """One call warms all: nothing but the heads, which a model does not change, makes a variant."""
    return [{}]


def launch_sparse_mla_decode(
    q: Tensor,
    swa_cache: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    cache: Tensor | None,
    topk_indices: Tensor | None,
    topk_lens: Tensor | None,
    attn_sink: Tensor | None,
    softmax_scale: float,
    batch_invariant: bool,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = q.shape
    heads = padded_heads(num_heads)
    warm = (q.device, heads)
    if warm not in _warm:
        refuse_in_capture(f"flash_mla: its kernels for {heads} heads are not loaded yet")
    sources = [(swa_cache, swa_indices, swa_lens)]
    if cache is not None and topk_indices.shape[1] > 0:
        sources.append((cache, topk_indices, topk_lens))
    if attn_sink is not None and heads != num_heads:
        attn_sink = torch.nn.functional.pad(attn_sink, (0, heads - num_heads))
    step = WORKSPACE_BYTES // (heads * HEAD_DIM * 4)
    if out is None and (num_tokens == 0 or num_tokens > step or heads != num_heads):
        out = q.new_empty(q.shape)
    if lse is None:
        lse = q.new_empty((num_tokens, num_heads), dtype=torch.float32)
    for start in range(0, num_tokens, step):
        part = slice(start, min(start + step, num_tokens))
        pools = _valid_rows([(pool, indices[part], lens[part]) for pool, indices, lens in sources])
        extra = pools[1] if len(pools) > 1 else (None, None, None)
        part_out, part_lse, _, _ = sparse_decode_op()(
            _queries(q[part], heads),
            *pools[0],
            attn_sink,
            *(None, None),  # its plan
            *extra,
            HEAD_DIM,
            softmax_scale,
            None,
        )
        part_out = part_out[:, 0, :num_heads]
        if out is None:
            out = part_out
        else:
            out[part].copy_(part_out)
        torch.nan_to_num(
            part_lse[:, :num_heads, 0],
            nan=math.nan,
            posinf=-math.inf,
            neginf=-math.inf,
            out=lse[part],
        )
        _warm.add(warm)
    assert out is not None
    return out, lse


def _padded(width: int) -> int:
    """At least a block: it takes no empty index row."""
    return max(1, triton.cdiv(width, BLOCK)) * BLOCK


def _valid_rows(
    sources: list[tuple[Tensor, Tensor, Tensor]],
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Pages, index rows and lengths of each cache, as FlashMLA takes them."""
    (swa_cache, swa_indices, swa_lens), (cache, topk_indices, topk_lens) = (
        *sources,
        (None, None, None),
    )[:2]
    num_tokens = swa_indices.shape[0]
    padded = [_padded(indices.shape[1]) for _, indices, _ in sources]
    # The rows of both caches side by side.
    rows = swa_indices.new_empty((num_tokens, sum(padded)))
    counts = swa_lens.new_empty((len(sources), num_tokens))
    _valid_rows_kernel[(num_tokens,)](
        swa_indices,
        swa_lens,
        topk_indices,
        topk_lens,
        num_tokens,
        swa_indices.stride(0),
        swa_indices.shape[1],
        padded[0],
        _last_slot(swa_cache),
        0 if cache is None else topk_indices.stride(0),
        0 if cache is None else topk_indices.shape[1],
        sum(padded[1:]),
        0 if cache is None else _last_slot(cache),
        rows,
        counts,
        BLOCK=512,
        num_warps=4,
    )
    return [
        (_pages(pool), part[:, None], count)
        for (pool, _, _), part, count in zip(sources, rows.split(padded, 1), counts, strict=True)
    ]


def _last_slot(cache: Tensor) -> int:
    return min(cache.shape[0] * cache.shape[1], 2**31) - 1


def _queries(q: Tensor, heads: int) -> Tensor:
    """``[T, 1, heads, 512]`` as TMA reads it: 16-byte steps that int32 holds. Padding: anything."""
    num_tokens, num_heads, head_dim = q.shape
    steps = q.data_ptr() // q.element_size() | q.stride(0) | q.stride(1)
    if heads != num_heads or steps % 8 != 0 or q.stride(0) >= 2**31:
        padded = q.new_empty((num_tokens, heads, head_dim))
        padded[:, :num_heads].copy_(q)
        q = padded
    return q.unsqueeze(1)


def _pages(cache: Tensor) -> Tensor:
    """``[pages, page_size, 1, 584]``, rows adjoining also where a page is one row."""
    num_pages, page_size, width = cache.shape
    return cache.as_strided((num_pages, page_size, 1, width), (cache.stride(0), width, width, 1))
