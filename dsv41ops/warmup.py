"""Compile ahead of time every kernel variant that a configuration's ops may launch."""

from __future__ import annotations

from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor

from dsv41ops import api, dispatch
from dsv41ops.checks import MAX_HEADS, SLOT_DTYPES, check_backend
from dsv41ops.checks.indexer import F32_OR_BF16, MAX_BLOCK_SIZE, MAX_INDEX_HEADS, MAX_SELECTED
from dsv41ops.configs import DecodeProblem
from dsv41ops.kernels.device import sms_and_capability
from dsv41ops.layouts import (
    HEAD_DIM,
    INDEX_HEAD_DIM,
    ROPE_DIM,
    index_record_named,
    new_index_cache,
    new_kv_cache,
    record_named,
)

PAGE_SIZE = 32  # of the dummy caches; no variant depends on it


def warmup(
    num_heads: int,
    swa_cache_dtype: str = "auto",
    cache_dtype: str | None = None,
    *,
    index_cache_dtype: str | None = None,
    index_heads: int = 32,
    num_candidate_blocks: int = 0,
    candidate_block_size: int = 8,
    window_width: int = 128,
    draft_width: int | None = None,
    topk: int = 512,
    max_num_tokens: int = 8192,
    attn_sink: bool = True,
    batch_invariant: bool = False,
    inverse_rope: bool = False,
    backend: str = "auto",
    dcp_world_size: int = 1,
    dcp_rank: int = 0,
    cp_interleave: int = 1,
    unaligned: bool = False,
    device: torch.device | str | None = None,
) -> None:
    """Compile every kernel variant that a configuration needs, by running it on tiny tensors.

    Call it once per configuration before CUDA graphs are captured: a kernel that is not compiled
    when a capture needs it is an error. All ops are covered for the records and widths given, with
    int32 and int64 slots and selections, with and without each optional tensor that an engine may
    leave out, in functional and ``_out`` form, with and without the compressed cache (a model has
    layers of both kinds). Calling it again costs some launches and compiles nothing.

    Args:
        num_heads: ``H``, query heads on this rank, 1 to 128.
        swa_cache_dtype: Record of the window caches, as :func:`new_kv_cache` names it.
        cache_dtype: Record of the compressed caches; None if the model has none.
        index_cache_dtype: Record of the index caches, as :func:`new_index_cache` names it; None if
            compressor and indexer do not run by these ops.
        index_heads: Heads of the indexer, 1 to 64.
        num_candidate_blocks: Blocks that an indexer keeps for later ones, 0 to 2048; 0: none does.
        candidate_block_size: States in such a block, 1 to 128.
        window_width: Columns of the causal window indices.
        draft_width: Columns of the non-causal ones (draft blocks); None if there are none.
        topk: Columns of the selection, at least 1; unused without a compressed cache.
        max_num_tokens: The largest step. The number of splits follows a step's tokens.
        attn_sink: Whether attention has sinks. Under DCP the variants without are compiled too,
            as the merge applies them.
        batch_invariant: As attention will be called.
        inverse_rope: Whether it will be called with ``positions`` and ``cos_sin``.
        backend: As attention will be called; ``auto`` covers all that it may choose, and
            the libraries of those are loaded.
        dcp_world_size: DCP ranks; above 1 also the merge of so many states.
        dcp_rank: This rank.
        cp_interleave: States in one run of a rank.
        unaligned: Also compile for caches and queries that do not begin at, or step by, multiples
            of 16 bytes. Tensors that torch or :func:`new_kv_cache` allocates do, and whole rows
            sliced from them.
        device: A CUDA device, torch's current one when None. On a CPU there is nothing to
            compile, and only the arguments are checked.

    Raises:
        TypeError: A number of the wrong Python type.
        ValueError: An argument out of range, or an unknown record or backend.
        UnsupportedError: The named backend cannot serve this configuration; the message says why.
        RuntimeError: Called while a CUDA graph is captured.
    """
    # Imported here, as the package itself loads no backend.
    from dsv41ops.backend.arguments import require_int
    from dsv41ops.backend.dcp import DCPGeometry

    if require_int("num_heads", num_heads, 1) > MAX_HEADS:
        raise ValueError(f"num_heads: expected at most {MAX_HEADS}, got {num_heads}")
    require_int("window_width", window_width, 1)
    require_int("topk", topk, 1)
    require_int("max_num_tokens", max_num_tokens, 1)
    widths = [window_width]
    if draft_width is not None:
        widths.append(require_int("draft_width", draft_width, 1))
    DCPGeometry(dcp_world_size, dcp_rank, cp_interleave)
    check_backend("backend", backend)
    records = [record_named(swa_cache_dtype).name]
    if cache_dtype is not None:
        records.append(record_named(cache_dtype).name)
    if index_cache_dtype is not None:
        index_record_named(index_cache_dtype)
    for name, number, least, most in (
        ("index_heads", index_heads, 1, MAX_INDEX_HEADS),
        ("num_candidate_blocks", num_candidate_blocks, 0, MAX_SELECTED),
        ("candidate_block_size", candidate_block_size, 1, MAX_BLOCK_SIZE),
    ):
        if require_int(name, number, least) > most:
            raise ValueError(f"{name}: expected at most {most}, got {number}")
    device = _cuda_device(device)
    if device is None:
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("warmup: called while a CUDA graph is captured; call it before")

    dcp = (dcp_world_size, dcp_rank, cp_interleave)
    topk_widths = (0,) if cache_dtype is None else (0, topk)
    num_sms, capability = sms_and_capability(device)
    with torch.no_grad(), torch.cuda.device(device):
        _run_index_ops(window_width, draft_width, topk_widths[-1], dcp, device)
        if index_cache_dtype is not None:
            _run_compressor(index_cache_dtype, device)
        for aligned in (True, False) if unaligned else (True,):
            caches = [_cache(record, aligned, device) for record in records]
            _run_cache_ops(caches, device)
            if index_cache_dtype is not None:
                blocks = (num_candidate_blocks, candidate_block_size)
                _run_indexer(index_cache_dtype, aligned, index_heads, topk, blocks, dcp, device)
            for topk_width in topk_widths:
                problems = [
                    DecodeProblem(
                        num_tokens,
                        num_heads,
                        width,
                        topk_width,
                        num_sms,
                        batch_invariant,
                        capability,
                        records[0],
                        records[-1] if topk_width else None,
                        aligned,
                        rope=inverse_rope,
                    )
                    for width in widths
                    for num_tokens in range(1, max_num_tokens + 1)
                ]
                _run_decode(
                    num_heads,
                    caches[0],
                    caches[-1] if topk_width else None,
                    {attn_sink, attn_sink and dcp_world_size == 1},
                    inverse_rope,
                    _by_backend(dispatch.requested(backend), problems, device),
                )
            if dcp_world_size > 1:
                _run_merge(dcp_world_size, num_heads, attn_sink, aligned, device)
        torch.cuda.synchronize()  # a fault in a kernel is warmup's, not the next call's


def _by_backend(
    backend: str, problems: list[DecodeProblem], device: torch.device
) -> dict[str, list[DecodeProblem]]:
    """The problems that each backend will serve."""
    served: dict[str, list[DecodeProblem]] = {}
    for problem in problems:
        served.setdefault(dispatch.choose(backend, device, problem), []).append(problem)
    return served


def _cuda_device(device: torch.device | str | None) -> torch.device | None:
    """With its index; None for a CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected a CUDA device or a CPU, got {device}")
    if device.type == "cpu":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.device("cuda", index)


def _cache(record: str, aligned: bool, device: torch.device) -> Tensor:
    """One page, an element off its allocation unless ``aligned``."""
    cache = new_kv_cache(1, PAGE_SIZE, record, device)
    if aligned:
        return cache
    storage = cache.new_zeros(cache.stride(0) + 1)
    return storage.as_strided(cache.shape, cache.stride(), 1)


def _run_index_ops(
    window_width: int,
    draft_width: int | None,
    topk: int,
    dcp: tuple[int, int, int],
    device: torch.device,
) -> None:
    """A step of one padding token; ``topk`` 0: no compressed cache."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    starts, seq_lens, table = zeros(2), zeros(1), zeros(1, 1)
    mappings = [zeros(1, dtype=dtype) for dtype in SLOT_DTYPES]
    windows: list[dict[str, Any]] = [{"window": window_width}]
    if draft_width is not None:
        windows.append({"width": draft_width, "causal": False})
    api.token_to_request(starts, 1)
    api.dcp_local_seq_lens(seq_lens, 1, *dcp)
    states_per_page = dcp[2]  # any multiple of the interleave
    # The window's slots are not sharded, nor are a selection's on one rank.
    for shard in {(1, 0, 1), dcp}:
        for mapping in (None, *mappings):
            api.compressed_slot_mapping(
                starts, seq_lens, table, 1, states_per_page, 1, mapping, *shard
            )
        for mapping in mappings:
            # Without a window too: its width makes a variant.
            for window in ({}, *({"swa_block_table": table, **window} for window in windows)):
                api.decode_metadata(
                    starts,
                    seq_lens,
                    1,
                    swa_page_size=PAGE_SIZE,
                    slot_mapping=mapping,
                    dcp_world_size=shard[0],
                    dcp_rank=shard[1],
                    **window,
                )
    for window in windows:
        api.sliding_window_indices(starts, seq_lens, table, 1, PAGE_SIZE, **window)
    for dtype in SLOT_DTYPES if topk else ():
        selected = zeros(1, topk, dtype=dtype)
        api.topk_to_slots(selected, starts, seq_lens, table, states_per_page, 1, *dcp)


def _run_compressor(index_cache_dtype: str, device: torch.device) -> None:
    """A padding token's latent and an index key without a slot."""
    cache = new_index_cache(1, PAGE_SIZE, index_cache_dtype, device)
    kv = torch.zeros(1, HEAD_DIM, device=device)
    ring = torch.zeros(1, 2, 2, HEAD_DIM, device=device)
    key, cos_sin = (torch.zeros(1, size, device=device) for size in (INDEX_HEAD_DIM, ROPE_DIM))
    starts, seq_lens = torch.zeros(3, dtype=torch.int32, device=device).split([2, 1])
    numbers = [torch.full((1,), -1, dtype=dtype, device=device) for dtype in SLOT_DTYPES]
    for weight, dtype in product(F32_OR_BF16, repeat=2):
        norm = kv[0].to(weight)
        api.compress_kv(kv, None, starts, seq_lens, norm, None, None, 1, out_dtype=dtype)
        for slots in numbers:
            api.compress_kv(kv, kv, starts, seq_lens, norm, slots, ring, 2, out_dtype=dtype)
            for positions in numbers:
                api.indexer_k_insert(
                    key.to(dtype), key[0].to(weight), positions, cos_sin, slots, cache
                )


def _run_indexer(
    index_cache_dtype: str,
    aligned: bool,
    num_heads: int,
    topk: int,
    blocks: tuple[int, int],
    dcp: tuple[int, int, int],
    device: torch.device,
) -> None:
    """A padding token, by layers that keep candidates, look inside them, or neither."""
    page_size = 4 * dcp[2] * PAGE_SIZE  # a multiple of the interleave, and of 16 bytes
    cache = new_index_cache(2, page_size, index_cache_dtype, device)
    if not aligned:
        cache = cache.view(-1)[1 : 1 + cache[0].numel()].view(1, *cache.shape[1:])
    q = torch.zeros(1, num_heads, INDEX_HEAD_DIM, dtype=torch.bfloat16, device=device)
    weights = torch.zeros(1, num_heads, device=device)
    starts, seq_lens, table = (
        torch.zeros(shape, dtype=torch.int32, device=device) for shape in (2, 1, (1, 1))
    )
    count, size = blocks
    candidates = torch.zeros(1, count, dtype=torch.int32, device=device)
    module = import_module("dsv41ops.kernels.triton.indexer_topk")
    for given, kept in ((None, 0), (None, count), (candidates, 0))[: 3 if count else 1]:
        for options in module.variants(topk, kept, 0 if given is None else count, size):
            module.launch_indexer_topk(
                q,
                weights,
                cache,
                starts,
                seq_lens,
                table,
                topk,
                1,
                given,
                kept,
                size,
                *dcp,
                **options,
            )
    for width in {topk, count} - {0} if dcp[0] > 1 else ():
        scores = torch.zeros(dcp[0], 1, width, device=device)
        api.merge_topk(scores.to(torch.int32), scores, width)


def _run_cache_ops(caches: list[Tensor], device: torch.device) -> None:
    rows = torch.zeros(1, HEAD_DIM, device=device)
    cos_sin = torch.zeros(1, ROPE_DIM, device=device)
    numbers = [torch.zeros(1, dtype=dtype, device=device) for dtype in SLOT_DTYPES]
    for slots in numbers:
        for cache in caches:
            api.kv_cache_insert(rows.bfloat16(), slots, cache)
            api.kv_cache_gather(cache, slots)
            for kv in (rows.bfloat16(), rows):
                for positions in numbers:
                    api.rope_kv_cache_insert(kv, positions, cos_sin, slots, cache)


def _run_decode(
    num_heads: int,
    swa_cache: Tensor,
    cache: Tensor | None,
    sinks: set[bool],
    inverse_rope: bool,
    served: dict[str, list[DecodeProblem]],
) -> None:
    """One token without a visible row, through the launchers, which take a variant's options."""
    device = swa_cache.device
    q = torch.zeros(1, num_heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
    sink = torch.zeros(num_heads, device=device)
    indices = torch.zeros(1, 1, dtype=torch.int32, device=device)
    lens = torch.zeros(1, dtype=torch.int32, device=device)
    ropes: list[tuple[Tensor | None, Tensor | None]] = [(None, None)]
    if inverse_rope:
        table = torch.zeros(1, ROPE_DIM, device=device)
        ropes = [(torch.zeros(1, dtype=dtype, device=device), table) for dtype in SLOT_DTYPES]
    has_cache = cache is not None
    for backend, problems in served.items():
        module = import_module(f"dsv41ops.kernels.{backend}.sparse_mla_decode")
        for options in module.variants(problems):
            for with_sink, (positions, cos_sin) in product(sinks, ropes):
                module.launch_sparse_mla_decode(
                    q,
                    swa_cache,
                    indices,
                    lens,
                    cache,
                    indices if has_cache else None,
                    lens if has_cache else None,
                    sink if with_sink else None,
                    softmax_scale=1.0,
                    batch_invariant=False,
                    positions=positions,
                    cos_sin=cos_sin,
                    **options,
                )


def _run_merge(
    num_ranks: int, num_heads: int, attn_sink: bool, aligned: bool, device: torch.device
) -> None:
    lses = torch.zeros(num_ranks, 1, num_heads, device=device)
    sink = torch.zeros(num_heads, device=device) if attn_sink else None
    for dtype in (torch.bfloat16, torch.float32):
        shape = (num_ranks, 1, num_heads, HEAD_DIM)
        first = 0 if aligned else 1
        storage = torch.zeros(num_ranks * num_heads * HEAD_DIM + 1, dtype=dtype, device=device)
        outs = storage[first : first + storage.numel() - 1].view(shape)
        api.merge_attention_states(outs, lses, sink)
