"""Sparse MLA decode: split-KV attention over rows of a window cache and a compressed cache.

The 512 columns of a row are held as four tiles, 256 + 128 + 64 + 64: the last is the part that
``fp8_ds_mla`` stores as bf16, and a tile's width has to be a power of two.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41ops.configs import (
    MAX_SPLITS,
    DecodeConfig,
    DecodeProblem,
    decode_config,
    decode_variants,
)
from dsv41ops.kernels.device import sms_and_capability
from dsv41ops.kernels.triton.common import kernel
from dsv41ops.kernels.triton.records import INTERPRETED, ROPE_START, load_columns, to_bf16
from dsv41ops.kernels.triton.rope import find_row, rotate
from dsv41ops.layouts import HEAD_DIM

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = 1.4426950408889634
COMBINE_COLUMNS = 128
WORKSPACE_BYTES = 2**28  # of split results; more tokens than that take turns


@triton.jit
def _dot(a, b, acc):
    if INTERPRETED:  # where bf16 products are wrong
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a.to(tl.bfloat16), b, acc)
    return acc


@triton.jit
def _finite(peak):
    """What to subtract from scores: 0 where the running maximum is infinite."""
    return tl.where(tl.abs(peak) == float("inf"), 0.0, peak)


@triton.jit
def _finish(peak, total, attn_sink_ptr, head, head_mask):
    """The factor that normalises an accumulator, with the sink in it; and lse."""
    empty = total == 0.0
    lse = tl.where(empty, float("-inf"), _finite(peak) * LN_2 + tl.log(total))
    factor = 1.0 / total
    if attn_sink_ptr is not None:
        sink = tl.load(attn_sink_ptr + head, mask=head_mask, other=0.0)
        factor = factor / (1.0 + tl.exp(sink - lse))
    return tl.where(empty, 0.0, factor), lse


@triton.jit
def _rotate_back(
    values, column, empty, token, positions_ptr, cos_sin_ptr, num_positions, cos_sin_stride
):
    """``[N, M]`` of one token's output from ``column`` on; 0, not -0, where a row is ``empty``."""
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos_sin_row, known = find_row(cos_sin_ptr, cos_sin_stride, num_positions, position)
    pair = (column - ROPE_START) // 2 + tl.arange(0, values.shape[1] // 2)[None, :]
    return tl.where(empty, 0.0, rotate(values, pair, cos_sin_row, known, True))


@triton.jit
def _load_q(row_ptrs, mask, START: tl.constexpr, WIDTH: tl.constexpr):
    column = START + tl.arange(0, WIDTH)
    return tl.load(row_ptrs[:, None] + column[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def _store(row_ptrs, values, mask, START: tl.constexpr, WIDTH: tl.constexpr):
    column = START + tl.arange(0, WIDTH)
    tl.store(row_ptrs[:, None] + column[None, :], values, mask=mask[:, None])


@triton.jit
def _attend(
    indices_ptr,
    column,
    length,
    last_slot,
    cache_ptr,
    page_stride,
    page_size,
    scale_log2,
    q0,
    q1,
    q2,
    q3,
    peak,
    total,
    acc0,
    acc1,
    acc2,
    acc3,
    RECORD: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The rows named at ``column`` of the indices, into the online softmax of every head."""
    slots = tl.load(indices_ptr + column, mask=column < length, other=-1)
    visible = (slots >= 0) & (slots <= last_slot)
    slots = tl.where(visible, slots, 0)
    # The widest last: the fewest registers under both Triton 3.6 and 3.9.
    k3 = load_columns(cache_ptr, slots, visible, page_stride, page_size, RECORD, 448, 64, ALIGNED)
    k2 = load_columns(cache_ptr, slots, visible, page_stride, page_size, RECORD, 384, 64, ALIGNED)
    k1 = load_columns(cache_ptr, slots, visible, page_stride, page_size, RECORD, 256, 128, ALIGNED)
    k0 = load_columns(cache_ptr, slots, visible, page_stride, page_size, RECORD, 0, 256, ALIGNED)
    scores = tl.zeros([q0.shape[0], column.shape[0]], tl.float32)
    scores = _dot(q0, tl.trans(k0), scores)
    scores = _dot(q1, tl.trans(k1), scores)
    scores = _dot(q2, tl.trans(k2), scores)
    scores = _dot(q3, tl.trans(k3), scores)
    scores = tl.where(visible[None, :], scores * scale_log2, float("-inf"))
    peak_before = peak
    peak = tl.maximum(peak, tl.max(scores, 1))
    shift = _finite(peak)
    decay = tl.exp2(peak_before - shift)
    weights = tl.exp2(scores - shift[:, None])
    total = total * decay + tl.sum(weights, 1)
    acc0 = _dot(weights, k0, acc0 * decay[:, None])
    acc1 = _dot(weights, k1, acc1 * decay[:, None])
    acc2 = _dot(weights, k2, acc2 * decay[:, None])
    acc3 = _dot(weights, k3, acc3 * decay[:, None])
    return peak, total, acc0, acc1, acc2, acc3


@triton.jit
def _length(lens_ptr, token, width):
    return tl.minimum(tl.maximum(tl.load(lens_ptr + token), 0), width)


@kernel
def _sparse_mla_decode_kernel(
    q_ptr,
    swa_cache_ptr,
    swa_indices_ptr,
    swa_lens_ptr,
    cache_ptr,
    topk_indices_ptr,
    topk_lens_ptr,
    attn_sink_ptr,
    positions_ptr,
    cos_sin_ptr,
    scale_log2,
    num_heads,
    num_positions: tl.int64,
    cos_sin_stride: tl.int64,
    q_token_stride: tl.int64,
    q_head_stride: tl.int64,
    swa_last_slot,
    swa_page_stride: tl.int64,
    swa_page_size,
    swa_width,
    swa_indices_stride: tl.int64,
    last_slot,
    page_stride: tl.int64,
    page_size,
    topk_width,
    topk_indices_stride: tl.int64,
    out_token_stride: tl.int64,
    out_head_stride: tl.int64,
    lse_token_stride: tl.int64,
    lse_head_stride: tl.int64,
    out_ptr,
    lse_ptr,
    partial_ptr,
    stats_ptr,
    SWA_RECORD: tl.constexpr,
    RECORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (tokens · blocks of heads, splits): one token, BLOCK_H heads, a share of its blocks.

    The blocks up to a token's lengths are divided evenly among the splits. RECORD 0: no compressed
    cache. SPLIT: leaves an f32 accumulator in ``partial``, its maximum (base 2) and sum in
    ``stats``; otherwise writes ``out``, rotated back if there is a ``cos_sin``, and ``lse``.
    """
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    head_mask = head < num_heads
    head = head.to(tl.int64)

    q_ptrs = q_ptr + token * q_token_stride + head * q_head_stride
    if ALIGNED:
        q_ptrs = tl.multiple_of(q_ptrs, 16)
    q0 = _load_q(q_ptrs, head_mask, 0, 256)
    q1 = _load_q(q_ptrs, head_mask, 256, 128)
    q2 = _load_q(q_ptrs, head_mask, 384, 64)
    q3 = _load_q(q_ptrs, head_mask, 448, 64)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc0 = tl.zeros([BLOCK_H, 256], tl.float32)
    acc1 = tl.zeros([BLOCK_H, 128], tl.float32)
    acc2 = tl.zeros([BLOCK_H, 64], tl.float32)
    acc3 = tl.zeros([BLOCK_H, 64], tl.float32)

    swa_length = _length(swa_lens_ptr, token, swa_width)
    swa_blocks = tl.cdiv(swa_length, BLOCK_N)
    blocks = swa_blocks
    if RECORD != 0:
        length = _length(topk_lens_ptr, token, topk_width)
        blocks += tl.cdiv(length, BLOCK_N)
    begin, end = 0, blocks
    if SPLIT:
        split, num_splits = tl.program_id(1), tl.num_programs(1)
        begin, end = blocks * split // num_splits, blocks * (split + 1) // num_splits

    swa_indices_ptr += token * swa_indices_stride
    if RECORD != 0:
        topk_indices_ptr += token * topk_indices_stride
    offs_n = tl.arange(0, BLOCK_N)
    # disable_licm: the addresses of every matrix instruction's operands, hoisted out of the loop,
    # take more registers than there are.
    if RECORD == SWA_RECORD:
        for block in tl.range(begin, end, num_stages=1, disable_licm=True):
            in_window = block < swa_blocks
            peak, total, acc0, acc1, acc2, acc3 = _attend(
                tl.where(in_window, swa_indices_ptr, topk_indices_ptr),
                (block - tl.where(in_window, 0, swa_blocks)) * BLOCK_N + offs_n,
                tl.where(in_window, swa_length, length),
                tl.where(in_window, swa_last_slot, last_slot),
                tl.where(in_window, swa_cache_ptr, cache_ptr),
                tl.where(in_window, swa_page_stride, page_stride),
                tl.where(in_window, swa_page_size, page_size),
                scale_log2, q0, q1, q2, q3, peak, total, acc0, acc1, acc2, acc3,
                RECORD, ALIGNED,
            )  # fmt: skip
    else:
        for block in tl.range(begin, tl.minimum(end, swa_blocks), num_stages=1, disable_licm=True):
            peak, total, acc0, acc1, acc2, acc3 = _attend(
                swa_indices_ptr, block * BLOCK_N + offs_n, swa_length, swa_last_slot,
                swa_cache_ptr, swa_page_stride, swa_page_size,
                scale_log2, q0, q1, q2, q3, peak, total, acc0, acc1, acc2, acc3,
                SWA_RECORD, ALIGNED,
            )  # fmt: skip
        if RECORD != 0:
            begin, end = tl.maximum(begin - swa_blocks, 0), end - swa_blocks
            for block in tl.range(begin, end, num_stages=1, disable_licm=True):
                peak, total, acc0, acc1, acc2, acc3 = _attend(
                    topk_indices_ptr, block * BLOCK_N + offs_n, length, last_slot,
                    cache_ptr, page_stride, page_size,
                    scale_log2, q0, q1, q2, q3, peak, total, acc0, acc1, acc2, acc3,
                    RECORD, ALIGNED,
                )  # fmt: skip

    if SPLIT:
        row = (token * num_heads + head) * num_splits + split
        tl.store(stats_ptr + 2 * row, peak, mask=head_mask)
        tl.store(stats_ptr + 2 * row + 1, total, mask=head_mask)
        row_ptrs = tl.multiple_of(partial_ptr + row * 512, 16)
        # An empty split's accumulator is not read.
        row_mask = head_mask & (total != 0.0)
        _store(row_ptrs, acc0, row_mask, 0, 256)
        _store(row_ptrs, acc1, row_mask, 256, 128)
        _store(row_ptrs, acc2, row_mask, 384, 64)
        _store(row_ptrs, acc3, row_mask, 448, 64)
    else:
        factor, lse = _finish(peak, total, attn_sink_ptr, head, head_mask)
        lse_ptrs = lse_ptr + token * lse_token_stride + head * lse_head_stride
        tl.store(lse_ptrs, lse, mask=head_mask)
        row_ptrs = out_ptr + token * out_token_stride + head * out_head_stride
        if ALIGNED:
            row_ptrs = tl.multiple_of(row_ptrs, 16)
        _store(row_ptrs, to_bf16(acc0 * factor[:, None]), head_mask, 0, 256)
        _store(row_ptrs, to_bf16(acc1 * factor[:, None]), head_mask, 256, 128)
        _store(row_ptrs, to_bf16(acc2 * factor[:, None]), head_mask, 384, 64)
        acc3 = acc3 * factor[:, None]
        if cos_sin_ptr is not None:
            acc3 = _rotate_back(
                acc3, 448, (total == 0.0)[:, None], token,
                positions_ptr, cos_sin_ptr, num_positions, cos_sin_stride,
            )  # fmt: skip
        _store(row_ptrs, to_bf16(acc3), head_mask, 448, 64)


@kernel
def _combine_kernel(
    partial_ptr,
    stats_ptr,
    attn_sink_ptr,
    positions_ptr,
    cos_sin_ptr,
    num_heads,
    num_splits,
    num_positions: tl.int64,
    cos_sin_stride: tl.int64,
    out_token_stride: tl.int64,
    out_head_stride: tl.int64,
    lse_token_stride: tl.int64,
    lse_head_stride: tl.int64,
    out_ptr,
    lse_ptr,
    MAX_SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (tokens · heads, 512 / COLUMNS): one head's columns from all splits at once."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // num_heads, row % num_heads
    split = tl.arange(0, MAX_SPLITS)
    split_mask = split < num_splits
    row_ptrs = row * num_splits + split
    peaks = tl.load(stats_ptr + 2 * row_ptrs, mask=split_mask, other=float("-inf"))
    totals = tl.load(stats_ptr + 2 * row_ptrs + 1, mask=split_mask, other=0.0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    partials = tl.load(
        tl.multiple_of(partial_ptr + row_ptrs * 512, 16)[:, None] + column[None, :],
        mask=(totals != 0.0)[:, None],
        other=0.0,
    )
    peak = tl.max(peaks, 0)
    weights = tl.exp2(peaks - _finite(peak))
    total = tl.sum(weights * totals, 0)
    factor, lse = _finish(peak, total, attn_sink_ptr, head, True)
    out = tl.sum(weights[:, None] * partials, 0) * factor
    if cos_sin_ptr is not None:
        rotated = _rotate_back(
            out[None, :], tl.program_id(1) * COLUMNS, total == 0.0, token,
            positions_ptr, cos_sin_ptr, num_positions, cos_sin_stride,
        )  # fmt: skip
        out = tl.reshape(rotated, [COLUMNS])
    tl.store(out_ptr + token * out_token_stride + head * out_head_stride + column, to_bf16(out))
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + token * lse_token_stride + head * lse_head_stride, lse)


def _is_aligned(tensor: Tensor, *dims: int) -> bool:
    """Whether a step along any of the dimensions goes from one multiple of 16 bytes to another."""
    steps = [tensor.data_ptr(), *(tensor.stride(dim) * tensor.element_size() for dim in dims)]
    return all(step % 16 == 0 for step in steps)


def _pool(cache: Tensor) -> tuple[Tensor, int, int, int, int]:
    """Bytes, last slot that an int32 may name, page stride in bytes, page size, row bytes."""
    pages = cache if cache.dtype == torch.uint8 else cache.view(torch.uint8)
    num_pages, page_size, row_bytes = pages.shape
    last_slot = min(num_pages * page_size - 1, 2**31 - 1)
    return pages, last_slot, pages.stride(0), page_size, row_bytes


def variants(problems: Iterable[DecodeProblem]) -> list[dict[str, DecodeConfig]]:
    """Options of launches that compile every kernel these problems need."""
    return [{"config": config} for config in decode_variants(problems)]


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
    config: DecodeConfig | None = None,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, head_dim = q.shape
    if out is None:
        out = q.new_empty((num_tokens, num_heads, head_dim))
    if lse is None:
        lse = q.new_empty((num_tokens, num_heads), dtype=torch.float32)
    if num_tokens == 0:
        return out, lse
    swa_width = swa_indices.shape[1]
    topk_width = 0 if topk_indices is None else topk_indices.shape[1]
    if config is None:
        num_sms, capability = sms_and_capability(q.device)
        config = decode_config(
            DecodeProblem(
                num_tokens, num_heads, swa_width, topk_width, num_sms, batch_invariant, capability
            )
        )
    splits = config.num_splits
    swa_pages, swa_last_slot, swa_page_stride, swa_page_size, swa_record = _pool(swa_cache)
    pages, last_slot, page_stride, page_size, record = None, 0, 0, 1, 0
    if topk_width > 0 and cache is not None:
        pages, last_slot, page_stride, page_size, record = _pool(cache)
    else:
        topk_indices = topk_lens = None
    aligned = _is_aligned(q, 0, 1) and _is_aligned(out, 0, 1) and _is_aligned(swa_pages, 0)
    aligned = aligned and (pages is None or _is_aligned(pages, 0))
    head_blocks = triton.cdiv(num_heads, config.block_h)
    partial = stats = None
    step = num_tokens
    if splits > 1:
        row_bytes = num_heads * splits * HEAD_DIM * 4
        step = min(num_tokens, max(1, WORKSPACE_BYTES // row_bytes))
        partial = q.new_empty((step, num_heads, splits, HEAD_DIM), dtype=torch.float32)
        stats = q.new_empty((step, num_heads, splits, 2), dtype=torch.float32)
    table_sizes = (0, 0) if cos_sin is None else (cos_sin.shape[0], cos_sin.stride(0))
    for start in range(0, num_tokens, step):
        part = slice(start, min(start + step, num_tokens))
        finish = (attn_sink, None if positions is None else positions[part], cos_sin)
        results = (out[part], lse[part])
        strides = (out.stride(0), out.stride(1), lse.stride(0), lse.stride(1))
        _sparse_mla_decode_kernel[((part.stop - start) * head_blocks, splits)](
            q[part],
            swa_pages,
            swa_indices[part],
            swa_lens[part],
            pages,
            None if topk_indices is None else topk_indices[part],
            None if topk_lens is None else topk_lens[part],
            *((None,) * 3 if splits > 1 else finish),
            softmax_scale * LOG2_E,
            num_heads,
            *table_sizes,
            q.stride(0),
            q.stride(1),
            swa_last_slot,
            swa_page_stride,
            swa_page_size,
            swa_width,
            swa_indices.stride(0),
            last_slot,
            page_stride,
            page_size,
            topk_width,
            0 if topk_indices is None else topk_indices.stride(0),
            *strides,
            *((None, None) if splits > 1 else results),
            partial,
            stats,
            SWA_RECORD=swa_record,
            RECORD=record,
            ALIGNED=aligned,
            SPLIT=splits > 1,
            BLOCK_H=config.block_h,
            BLOCK_N=config.block_n,
            num_warps=config.num_warps,
            num_stages=1,
        )
        if splits > 1:
            _combine_kernel[((part.stop - start) * num_heads, HEAD_DIM // COMBINE_COLUMNS)](
                partial,
                stats,
                *finish,
                num_heads,
                splits,
                *table_sizes,
                *strides,
                *results,
                MAX_SPLITS=MAX_SPLITS,
                COLUMNS=COMBINE_COLUMNS,
                num_warps=4,
            )
    return out, lse
