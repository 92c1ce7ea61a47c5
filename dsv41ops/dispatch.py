"""Which backend serves a sparse MLA decode on CUDA: a named one, or the fastest that can.

A backend ``x`` is a line in ``configs.BACKENDS`` and two modules in ``kernels/x/``. ``supports``
imports nothing that may be missing: ``unavailable(device)`` and ``supports(problem)`` give the
reason against, or None. ``sparse_mla_decode`` is imported when it is first chosen and has
``launch_sparse_mla_decode``, with the reference's arguments and ``out=`` and ``lse=``, and
``variants(problems)``: the launcher's keyword options that warm up all that these problems need.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv41ops.checks import MAX_HEADS, check_backend
from dsv41ops.configs import AUTO, BACKENDS, DecodeProblem
from dsv41ops.errors import UnsupportedError
from dsv41ops.kernels.device import sms_and_capability
from dsv41ops.layouts import find_record, record_named

ENVIRONMENT_VARIABLE = "DSV41_BACKEND"
TABLE = Path(__file__).with_name("backend_table.json")

# Records of both caches -> heads -> tokens -> microseconds of each backend that could.
Times = Mapping[str, Mapping[int, Mapping[int, Mapping[str, float]]]]


def requested(backend: str) -> str:
    """``auto`` gives way to the environment's choice, if there is one; that is not checked yet."""
    if backend != AUTO:
        return backend
    return os.environ.get(ENVIRONMENT_VARIABLE) or AUTO


@cache
def measured_times(capability: int) -> Times:
    """What ``python -m dsv41ops.bench --table`` measured; empty for another capability."""
    return read_times(TABLE.read_text(), capability)


def read_times(text: str, capability: int) -> Times:
    table = json.loads(text)
    times: dict[str, dict[int, dict[int, dict[str, float]]]] = {}
    for records, num_heads, num_tokens, us in table["us"]:
        if table["capability"] == capability:
            times.setdefault(records, {}).setdefault(num_heads, {})[num_tokens] = us
    return times


def fastest_first(problem: DecodeProblem, times: Times) -> list[str]:
    """Every backend, by the next larger measured size, the largest beyond it.

    A window-only call goes by the pair of its record with itself. The order is that of
    ``BACKENDS`` for records that were not measured, and for a batch-invariant call: its backend
    must not follow the number of tokens.
    """
    records = replace(problem, record=problem.record or problem.window_record).records
    us: Mapping[str, float] = {}
    if records in times and not problem.batch_invariant:
        by_tokens = times[records][_next_larger(times[records], problem.num_heads)]
        us = by_tokens[_next_larger(by_tokens, problem.num_tokens)]
    return sorted(BACKENDS, key=lambda backend: us.get(backend, float("inf")))


def _next_larger(measured: Mapping[int, object], size: int) -> int:
    return min((m for m in measured if m >= size), default=max(measured))


def refusal(backend: str, device: torch.device, problem: DecodeProblem | None) -> str | None:
    """Why a backend cannot serve here, or cannot serve this problem; None if it can."""
    if device.type != "cuda":
        return f"needs a CUDA device, this is {device}"
    reason = _unavailable(backend, device)
    if reason is None and problem is not None:
        reason = import_module(f"dsv41ops.kernels.{backend}.supports").supports(problem)
    return reason


@cache
def _unavailable(backend: str, device: torch.device) -> str | None:
    reason: str | None
    reason = import_module(f"dsv41ops.kernels.{backend}.supports").unavailable(device)
    return reason


def choose(backend: str, device: torch.device, problem: DecodeProblem) -> str:
    """The backend that serves a problem; ``backend`` as :func:`requested` gives it.

    Raises:
        ValueError: No such backend; a call's own is checked before.
        UnsupportedError: The named one cannot, or none at all.
    """
    check_backend(ENVIRONMENT_VARIABLE, backend)
    candidates = [backend]
    if backend == AUTO:
        candidates = fastest_first(problem, measured_times(problem.capability))
    refusals = {}
    for candidate in candidates:
        reason = refusal(candidate, device, problem)
        if reason is None:
            return candidate
        refusals[candidate] = reason
    lines = "".join(f"\n  {candidate}: {reason}" for candidate, reason in refusals.items())
    raise UnsupportedError(f"sparse_mla_decode: no backend for this call on {device}{lines}")


def backends(
    swa_cache_dtype: str | None = None,
    cache_dtype: str | None = None,
    num_heads: int = 64,
    *,
    batch_invariant: bool = False,
    inverse_rope: bool = False,
    device: torch.device | str | None = None,
) -> dict[str, str | None]:
    """Every backend of ``sparse_mla_decode``, and why it cannot serve here.

    Args:
        swa_cache_dtype: Record of the window cache, as :func:`new_kv_cache` names it; None asks
            about the device alone.
        cache_dtype: Record of the compressed cache; None for window-only layers.
        num_heads: ``H``, 1 to 128.
        batch_invariant: As attention will be called.
        inverse_rope: Whether it will be called with ``positions`` and ``cos_sin``.
        device: torch's current CUDA device when None, a CPU where there is none.

    Returns:
        Name to None if the backend can serve, else to the reason in one line. Tensors on a CPU
        are served by the reference, which is none of these.

    Raises:
        ValueError: An unknown record, or ``num_heads`` out of range.
    """
    if not 1 <= num_heads <= MAX_HEADS:
        raise ValueError(f"num_heads: expected 1 to {MAX_HEADS}, got {num_heads}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    window = None if swa_cache_dtype is None else record_named(swa_cache_dtype).name
    record = None if cache_dtype is None else record_named(cache_dtype).name
    problem = None
    if window is not None and device.type == "cuda":
        num_sms, capability = sms_and_capability(device)
        problem = DecodeProblem(
            num_tokens=1,
            num_heads=num_heads,
            window_width=128,
            topk_width=0 if record is None else 512,
            num_sms=num_sms,
            batch_invariant=batch_invariant,
            rope=inverse_rope,
            capability=capability,
            window_record=window,
            record=record,
        )
    return {backend: refusal(backend, device, problem) for backend in BACKENDS}


def launcher(backend: str) -> Callable[..., Any]:
    module = import_module(f"dsv41ops.kernels.{backend}.sparse_mla_decode")
    return module.launch_sparse_mla_decode  # type: ignore[no-any-return]


# What a choice needs to know of a cache: dtype, width, page stride, whether 16-byte aligned, bytes.
Layout = tuple[torch.dtype, int, int, bool, int]


def _layout(pool: Tensor) -> Layout:
    num_pages, page_size, width = pool.shape
    element = pool.element_size()
    stride = pool.stride(0) * element
    aligned = (pool.data_ptr() | stride) % 16 == 0
    length = (num_pages - 1) * stride + page_size * width * element if num_pages else 0
    return pool.dtype, width, stride, aligned, length


def _record(layout: Layout) -> str:
    record = find_record(*layout[:2])
    assert record is not None
    return record.name


@lru_cache(maxsize=4096)
def _chosen(
    backend: str,
    device: torch.device,
    num_tokens: int,
    num_heads: int,
    window_width: int,
    topk_width: int,
    batch_invariant: bool,
    softmax_scale: float,
    rope: bool,
    window: Layout,
    compressed: Layout | None,
) -> Callable[..., Any]:
    """The launcher for a call; a call like an earlier one costs a look-up."""
    num_sms, capability = sms_and_capability(device)
    layouts = [window] if compressed is None else [window, compressed]
    problem = DecodeProblem(
        num_tokens,
        num_heads,
        window_width,
        topk_width,
        num_sms,
        batch_invariant,
        capability,
        window_record=_record(window),
        record=None if compressed is None else _record(compressed),
        page_stride=max(layout[2] for layout in layouts),
        cache_bytes=max(layout[4] for layout in layouts),
        aligned=all(layout[3] for layout in layouts),
        empty_pool=any(layout[4] == 0 for layout in layouts),
        softmax_scale=softmax_scale,
        rope=rope,
    )
    return launcher(choose(backend, device, problem))


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
    backend: str,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    **buffers: Tensor,
) -> tuple[Tensor, Tensor]:
    """Through the backend that serves this call; what it may depend on is all in the arguments."""
    topk_width = 0 if topk_indices is None else topk_indices.shape[1]
    launch = _chosen(
        requested(backend),
        q.device,
        q.shape[0],
        q.shape[1],
        swa_indices.shape[1],
        topk_width,
        batch_invariant,
        softmax_scale,
        positions is not None,
        _layout(swa_cache),
        None if cache is None or topk_width == 0 else _layout(cache),
    )
    result: tuple[Tensor, Tensor] = launch(
        q,
        swa_cache,
        swa_indices,
        swa_lens,
        cache,
        topk_indices,
        topk_lens,
        attn_sink,
        softmax_scale,
        batch_invariant,
        positions,
        cos_sin,
        **buffers,
    )
    return result
