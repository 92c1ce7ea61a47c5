"""Sparse MLA decode by CUDA C++: one launch, no workspace.

The sources beside this file are compiled when a kernel is first needed. Each has one entry,
``sparse_mla_decode(Params)``, and serves units of work: some heads of one token. A config names
the source, its macros and its launch.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from dsv41ops.configs import (
    CudaConfig,
    DecodeProblem,
    cuda_config,
    cuda_variants,
    head_groups,
)
from dsv41ops.kernels.capture import refuse_in_capture
from dsv41ops.kernels.cuda.driver import Kernel, Launch
from dsv41ops.kernels.cuda.nvrtc import compile_cubin
from dsv41ops.kernels.cuda.params import LAYOUT, POOL
from dsv41ops.kernels.device import sms_and_capability
from dsv41ops.layouts import find_record, record_of

ENTRY = "sparse_mla_decode"
LOG2_E = 1.4426950408889634
NO_POOL = (0,) * len(POOL)

Macros = tuple[tuple[str, int], ...]


def variants(problems: Iterable[DecodeProblem]) -> list[dict[str, CudaConfig]]:
    """Options of launches that compile every kernel these problems need."""
    return [{"config": config} for config in cuda_variants(problems)]


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
    config: CudaConfig | None = None,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = q.shape
    if out is None:
        out = q.new_empty(q.shape)
    if lse is None:
        lse = q.new_empty((num_tokens, num_heads), dtype=torch.float32)
    if num_tokens == 0:
        return out, lse
    queries = _rows(q)
    if not _aligned(*queries):
        q = q.clone(memory_format=torch.contiguous_format)
        queries = _rows(q)
    written, results = out, _rows(out)
    if not _aligned(*results):
        written = q.new_empty(q.shape)
        results = _rows(written)
    topk_width = 0 if topk_indices is None else topk_indices.shape[1]
    launch, groups, num_units = _plan(
        q.device.index,
        torch.cuda.current_stream().cuda_stream,
        num_tokens,
        num_heads,
        swa_indices.shape[1],
        topk_width,
        record_of(swa_cache).row_bytes,
        record_of(cache).row_bytes if topk_width > 0 else 0,
        batch_invariant,
        softmax_scale,
        config,
    )
    params = LAYOUT.pack(
        *queries,
        *_pool(swa_cache, swa_indices, swa_lens),
        *(_pool(cache, topk_indices, topk_lens) if topk_width > 0 else NO_POOL),
        0 if attn_sink is None else attn_sink.data_ptr(),
        *results,
        lse.data_ptr(),
        *lse.stride(),
        *_rotation(positions, cos_sin),
        num_heads,
        groups,
        softmax_scale * LOG2_E,
        num_units,
    )
    launch(params)
    if written is not out:
        out[:num_tokens].copy_(written)
    return out, lse


def _rows(rows: Tensor) -> tuple[int, int, int]:
    token_stride, head_stride, _ = rows.stride()
    return rows.data_ptr(), token_stride, head_stride


def _rotation(positions: Tensor | None, cos_sin: Tensor | None) -> tuple[int, ...]:
    if positions is None:
        return 0, 0, 0, 0, False
    return (
        positions.data_ptr(),
        cos_sin.data_ptr(),
        cos_sin.stride(0),
        cos_sin.shape[0],
        positions.dtype is torch.int64,
    )


def _aligned(address: int, token_stride: int, head_stride: int) -> bool:
    """Whether every row of bf16 begins at a multiple of 16 bytes."""
    return (address | token_stride * 2 | head_stride * 2) % 16 == 0


def _pool(cache: Tensor, indices: Tensor, lens: Tensor) -> tuple[int, ...]:
    num_pages, page_size, _ = cache.shape
    return (
        cache.data_ptr(),
        indices.data_ptr(),
        lens.data_ptr(),
        cache.stride(0) * cache.itemsize,
        indices.stride(0),
        page_size,
        num_pages * page_size,
        *_division(page_size),
        indices.shape[1],
        0,
    )


@cache
def _division(divisor: int) -> tuple[int, int]:
    """``(magic, shift)``: below 2^31, ``n // divisor == n * magic >> shift``."""
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift


@lru_cache(maxsize=4096)
def _plan(
    device: int,
    stream: int,
    num_tokens: int,
    num_heads: int,
    swa_width: int,
    topk_width: int,
    swa_record: int,
    record: int,
    batch_invariant: bool,
    softmax_scale: float,
    config: CudaConfig | None,
) -> tuple[Launch, int, int]:
    """A call's launch, groups of heads and units of work; one like an earlier one is a look-up.

    Records are bytes per row, 0 for no compressed cache.
    """
    num_sms, _ = sms_and_capability(torch.device("cuda", device))
    if config is None:
        config = cuda_config(
            DecodeProblem(
                num_tokens,
                num_heads,
                swa_width,
                topk_width,
                num_sms,
                batch_invariant,
                window_record=_name(swa_record),
                record=_name(record) if record else None,
                softmax_scale=softmax_scale,
            )
        )
    macros = (*config.macros, ("SWA_RECORD", swa_record), ("RECORD", record))
    kernel = _kernel(device, config.source, macros)
    groups = head_groups(num_heads, config.heads)
    num_units = num_tokens * groups
    ctas = config.ctas(num_units, num_sms)
    return kernel.launch(ctas, config.threads, config.ranks, stream), groups, num_units


def _name(record: int) -> str:
    return find_record(torch.uint8, record).name


@cache
def _kernel(device: int, source: str, macros: Macros) -> Kernel:
    refuse_in_capture("cuda: the kernel of this configuration is not loaded yet")
    return Kernel(_cubin(source, macros), ENTRY)


@cache
def _cubin(source: str, macros: Macros) -> bytes:
    """Compiled once for all devices."""
    cubin, _ = compile_cubin(source_text(source), source, macros)
    return cubin


def source_text(source: str) -> str:
    return (Path(__file__).parent / source).read_text()
