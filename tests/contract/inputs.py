"""Valid argument sets of every op, shared by the contract, compile and export tests.

``argument_sets(op)`` gives ``{name: maker}``; ``maker(device)`` returns fresh keyword arguments,
the same ones each time. Together the sets of an op give and omit every optional argument, use
T = 0, 1, 2 and 17, and view strided storage wherever an op promises to take it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

import dsv41ops
from dsv41ops.schemas import SCHEMAS

Arguments = dict[str, Any]
Maker = Callable[[torch.device], Arguments]

OPS = list(SCHEMAS)
TOKENS = (0, 1, 2, 17)

PAGE = 8  # rows of a page; small, so that a few hundred tokens reach many pages
PAGES = 6  # pages in every pool
TABLE_WIDTH = 40
HEADS = 2


def overload(op: str) -> torch._ops.OpOverload:
    """The op that the dispatcher runs for ``torch.ops.dsv41.<op>``."""
    return getattr(torch.ops.dsv41, op).default


def public(op: str) -> Callable[..., Any]:
    """The public function of an op."""
    return getattr(dsv41ops, op)


def written(op: str) -> list[str]:
    """Names of the arguments that the schema declares as written."""
    return [a.name for a in overload(op)._schema.arguments if a.alias_info is not None]


def generator(seed: int = 0) -> torch.Generator:
    """A CPU generator, so that every device gets the same numbers."""
    return torch.Generator().manual_seed(seed)


def integers(
    low: int,
    high: int,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype = torch.int32,
) -> Tensor:
    """Random integers in ``low..high-1``."""
    return torch.randint(low, high, shape, generator=generator(), dtype=dtype).to(device)


def normal(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Normally distributed values."""
    return torch.randn(shape, generator=generator()).to(dtype).to(device)


def wide_rows(tensor: Tensor, extra: int = 3) -> Tensor:
    """The same values as a view of wider rows, one element in: strided and offset."""
    storage = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + extra)
    view = storage[..., 1 : 1 + tensor.shape[-1]]
    return view.copy_(tensor)


def batch(T: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``query_start_loc, seq_lens`` of a step of T tokens: chunks, empty requests and padding."""
    starts, lengths = {
        0: ([0, 0, 0], [0, 5]),
        1: ([0, 1], [9]),
        2: ([0, 1, 2], [9, 300]),
        17: ([0, 1, 1, 9, 14, 14], [9, 5, 40, 150, 0]),
    }[T]
    ints = partial(torch.tensor, dtype=torch.int32, device=device)
    return ints(starts), ints(lengths)


def geometry(T: int, device: torch.device, strided: bool = False) -> Arguments:
    """Batch geometry with a block table, whose last row is missing a page."""
    query_start_loc, seq_lens = batch(T, device)
    table = integers(0, PAGES, (seq_lens.shape[0], TABLE_WIDTH), device)
    table[-1, 1] = -1
    return {
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
        "block_table": wide_rows(table) if strided else table,
    }


@lru_cache
def _filled(kv_cache_dtype: str, pages: int, device: torch.device) -> Tensor:
    pool = dsv41ops.new_kv_cache(pages, PAGE, kv_cache_dtype, device)
    slots = torch.arange(pages * PAGE, dtype=torch.int64, device=device)
    dsv41ops.kv_cache_insert(normal((pages * PAGE, 512), device), slots, pool)
    return pool


def cache(kv_cache_dtype: str, device: torch.device, guard_pages: int = 0) -> Tensor:
    """A pool of PAGES pages of random rows; with guards, a view into the middle of a bigger one."""
    pages = PAGES + 2 * guard_pages
    pool = dsv41ops.new_kv_cache(pages, PAGE, kv_cache_dtype, device)
    pool.copy_(_filled(kv_cache_dtype, pages, device))
    return pool[guard_pages : pages - guard_pages]


def page_strided(pool: Tensor) -> Tensor:
    """The same pool with twice the distance between pages."""
    span = pool[:1].numel() * 2
    storage = pool.new_zeros(pool.shape[0], span)
    view = storage.as_strided(pool.shape, (span, *pool.contiguous().stride()[1:]))
    return view.copy_(pool)


def _token_to_request(T: int, device: torch.device) -> Arguments:
    return {"query_start_loc": batch(T, device)[0], "num_tokens": T}


def _no_requests(device: torch.device) -> Arguments:
    start = torch.zeros(1, dtype=torch.int32, device=device)
    return {"query_start_loc": start, "num_tokens": 3}


def _compressed_slot_mapping(
    T: int, device: torch.device, strided: bool = False, **extra: Any
) -> Arguments:
    sizes = {"num_tokens": T, "states_per_page": PAGE, "compress_ratio": 2}
    return {**geometry(T, device, strided), **sizes, **extra}


def _with_slot_mapping(T: int, dtype: torch.dtype, device: torch.device, **extra: Any) -> Arguments:
    arguments = _compressed_slot_mapping(T, device, **extra)
    slots = integers(-1, PAGE, (T + 2,), device, dtype)
    return {**arguments, "slot_mapping": slots}


def _dcp_local_seq_lens(device: torch.device, R: int = 5, **extra: Any) -> Arguments:
    arguments = {"compress_ratio": 2, "dcp_world_size": 2, "dcp_rank": 1}
    return {"seq_lens": batch(17, device)[1][:R], **arguments, **extra}


def _sliding_window_indices(
    T: int, device: torch.device, strided: bool = False, **extra: Any
) -> Arguments:
    sizes = {"num_tokens": T, "page_size": PAGE}
    return {**geometry(T, device, strided), **sizes, **extra}


def _with_replay_start(device: torch.device) -> Arguments:
    arguments = _sliding_window_indices(17, device)
    arguments["replay_start"] = torch.tensor([0, 2, 35, 140, 0], dtype=torch.int32, device=device)
    return arguments


def _topk_to_slots(
    T: int,
    device: torch.device,
    K: int = 5,
    dtype: torch.dtype = torch.int32,
    strided: bool = False,
    **extra: Any,
) -> Arguments:
    selected = integers(-1, 80, (T, K), device, dtype)
    sizes = {"states_per_page": PAGE, "compress_ratio": 2}
    return {
        "topk_indices": wide_rows(selected) if strided else selected,
        **geometry(T, device, strided),
        **sizes,
        **extra,
    }


def _decode_metadata(
    T: int, device: torch.device, present: str = "swa c2a", **extra: Any
) -> Arguments:
    """A step with the window's cache, C1A's and C2A's as ``present``, each with its own pages."""
    common = geometry(T, device)
    table = common.pop("block_table")
    arguments = {**common, "num_tokens": T}
    if "swa" in present:
        arguments |= {"swa_block_table": table, "swa_page_size": PAGE}
    for place, kind in enumerate(("c1a", "c2a")):
        if kind in present:
            arguments[f"block_table_{kind}"] = wide_rows(table.roll(place + 1, 1))
            arguments["block_size"] = 2 * PAGE
    return {**arguments, **extra}


def _decode_metadata_replay(device: torch.device, dtype: torch.dtype, **extra: Any) -> Arguments:
    arguments = _decode_metadata(17, device, "swa c1a c2a", **extra)
    replay_start = _with_replay_start(device)["replay_start"]
    slots = integers(-1, PAGE, (17 + 2,), device, dtype)
    return {**arguments, "replay_start": replay_start, "slot_mapping": slots}


def _kv_cache_insert(
    T: int,
    kv_cache_dtype: str,
    dtype: torch.dtype,
    device: torch.device,
    guard_pages: int = 0,
    strided: bool = False,
) -> Arguments:
    kv = normal((T, 512), device) * 3
    slots = torch.arange(5, 5 + T, dtype=dtype, device=device)
    slots[1:2] = -1
    slots[2:3] = PAGES * PAGE
    pool = cache(kv_cache_dtype, device, guard_pages)
    if strided:
        kv, pool = wide_rows(kv, 8), page_strided(pool)
    return {"kv": kv, "slot_mapping": slots, "cache": pool}


def _insert_bytes(device: torch.device) -> Arguments:
    """The bf16 record in a uint8 cache of 1024 bytes a row."""
    arguments = _kv_cache_insert(17, "bf16", torch.int64, device)
    return {**arguments, "cache": arguments["cache"].view(torch.uint8)}


def rope_table(num_positions: int, device: torch.device) -> Tensor:
    """``cos_sin`` of random angles, in wider rows."""
    angles = torch.rand(num_positions, 32, generator=generator()) * 6.3
    return wide_rows(torch.cat([angles.cos(), angles.sin()], 1).to(device))


def _rope_kv_cache_insert(
    T: int,
    kv_cache_dtype: str,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype = torch.bfloat16,
    compress_ratio: int = 1,
    **extra: Any,
) -> Arguments:
    arguments = _kv_cache_insert(T, kv_cache_dtype, torch.int64, device, **extra)
    return {
        **arguments,
        "kv": arguments["kv"].to(kv_dtype),
        "positions": torch.arange(-1, T - 1, dtype=dtype, device=device),  # one below, one past
        "cos_sin": rope_table(max(1, T - 2), device),
        "compress_ratio": compress_ratio,
    }


def _compress_kv(
    T: int,
    device: torch.device,
    compress_ratio: int = 2,
    slots: torch.dtype = torch.int64,
    weight: torch.dtype = torch.float32,
    strided: bool = False,
    capacity: int = 4,
    **extra: Any,
) -> Arguments:
    """The second request has no row of the ring, the last one's is past it."""
    query_start_loc, seq_lens = batch(T, device)
    R = seq_lens.shape[0]
    kv = normal((T, 512), device, torch.float32)
    arguments: Arguments = {
        "kv": wide_rows(kv) if strided else kv,
        "score": None,
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
        "norm_weight": normal((512,), device, weight),
        "ring_slots": None,
        "ring": None,
        "compress_ratio": compress_ratio,
        **extra,
    }
    if compress_ratio == 2:
        ring_slots = torch.arange(R, dtype=slots, device=device).flip(0)
        ring_slots[1:2] = -1
        ring_slots[2:][-1:] = R + 3
        ring = normal((R, capacity, 2, 512), device, torch.float32)
        arguments |= {
            "score": kv.flip(1),
            "ring_slots": ring_slots,
            "ring": page_strided(ring) if strided else ring,
        }
    return arguments


def _compress_kv_empty_ring(device: torch.device) -> Arguments:
    """What the public function makes of no ring."""
    ring = torch.empty(0, 2, 2, 512, device=device)
    return {**_compress_kv(17, device, compress_ratio=1), "ring": ring}


@lru_cache
def _filled_index(index_cache_dtype: str, pages: int, device: torch.device) -> Tensor:
    pool = dsv41ops.new_index_cache(pages, PAGE, index_cache_dtype, device)
    keys = normal((pages * PAGE, 128), device, torch.float32)
    slots = torch.arange(pages * PAGE, device=device)
    one = torch.ones(128, device=device)
    dsv41ops.indexer_k_insert(keys, one, slots, rope_table(pages * PAGE, device), slots, pool)
    return pool


def index_cache(index_cache_dtype: str, device: torch.device, guard_pages: int = 0) -> Tensor:
    """A pool of PAGES pages of random index keys; with guards, a view as of :func:`cache`."""
    pages = PAGES + 2 * guard_pages
    pool = _filled_index(index_cache_dtype, pages, device).clone()
    return pool[guard_pages : pages - guard_pages]


def _indexer_k_insert(
    T: int,
    index_cache_dtype: str,
    dtype: torch.dtype,
    device: torch.device,
    k: torch.dtype = torch.float32,
    weight: torch.dtype = torch.float32,
    guard_pages: int = 0,
    strided: bool = False,
    **extra: Any,
) -> Arguments:
    keys = normal((T, 128), device, k)
    slots = torch.arange(5, 5 + T, dtype=dtype, device=device)
    slots[1:2] = -1
    slots[2:3] = PAGES * PAGE
    pool = index_cache(index_cache_dtype, device, guard_pages)
    return {
        "k": wide_rows(keys) if strided else keys,
        "norm_weight": normal((128,), device, weight),
        "positions": torch.arange(T, dtype=dtype, device=device) - T // 8,
        "cos_sin": rope_table(max(1, T - 4), device),
        "slot_mapping": slots,
        "cache": page_strided(pool) if strided else pool,
        **extra,
    }


def _gather_bytes(device: torch.device) -> Arguments:
    arguments = _kv_cache_gather(17, "bf16", torch.int64, device)
    return {**arguments, "cache": arguments["cache"].view(torch.uint8)}


def _kv_cache_gather(
    N: int, kv_cache_dtype: str, dtype: torch.dtype, device: torch.device, guard_pages: int = 0
) -> Arguments:
    slots = integers(-1, PAGES * PAGE + 1, (N,), device, dtype)
    return {"cache": cache(kv_cache_dtype, device, guard_pages), "slots": slots}


def _indexer_topk(
    T: int,
    device: torch.device,
    index_cache_dtype: str = "fp8",
    heads: int = HEADS,
    candidates: int | None = None,
    strided: bool = False,
    guard_pages: int = 0,
    **extra: Any,
) -> Arguments:
    """Few of the states that are there; candidates in any order, with holes and unknown ones."""
    q, weights = normal((T, heads, 128), device), normal((T, heads), device, torch.float32)
    pool = index_cache(index_cache_dtype, device, guard_pages)
    arguments = {
        "q": wide_rows(q, 8) if strided else q,
        "weights": wide_rows(weights) if strided else weights,
        "cache": page_strided(pool) if strided else pool,
        **geometry(T, device, strided),
        "topk": 5,
        "compress_ratio": 2,
        **extra,
    }
    if candidates is not None:
        draws = torch.rand(T, 30 + candidates, generator=generator()).argsort(1)[:, :candidates]
        blocks = torch.where(draws % 7 == 3, -1, draws).to(torch.int32).to(device)
        arguments["candidate_blocks"] = wide_rows(blocks) if strided else blocks
    return arguments


def _merge_topk(
    T: int, device: torch.device, N: int = 3, K: int = 6, strided: bool = False, **extra: Any
) -> Arguments:
    """Numbers of several ranks, ties, holes and NaN."""
    indices = integers(-1, 15, (N, T, K), device)
    scores = integers(-3, 4, (N, T, K), device).flip(2).to(torch.float32)
    scores[:1, :, :1] = torch.nan
    if strided:
        indices, scores = wide_rows(indices), wide_rows(scores)
    return {"indices": indices, "scores": scores, "topk": 5, **extra}


def attention(
    T: int,
    device: torch.device,
    *,
    heads: int = HEADS,
    swa: str = "mxfp8",
    compressed: str | None = None,
    sink: bool = False,
    rope: bool = False,
    strided: bool = False,
    W: int = 12,
    K: int = 6,
    **extra: Any,
) -> Arguments:
    """Arguments of one sparse attention step over pools of random rows."""

    def rows(width: int) -> tuple[Tensor, Tensor]:
        indices = integers(-1, PAGES * PAGE, (T, width), device)
        lens = integers(0, width + 1, (T,), device)
        return (wide_rows(indices) if strided else indices), lens

    q = (
        normal((T, 2 * heads, 512), device)[:, :heads]
        if strided
        else normal((T, heads, 512), device)
    )
    swa_cache = cache(swa, device)
    swa_indices, swa_lens = rows(W)
    arguments: Arguments = {
        "q": q,
        "swa_cache": page_strided(swa_cache) if strided else swa_cache,
        "swa_indices": swa_indices,
        "swa_lens": swa_lens,
    }
    if compressed is not None:
        arguments["cache"] = cache(compressed, device)
        arguments["topk_indices"], arguments["topk_lens"] = rows(K)
    if sink:
        arguments["attn_sink"] = normal((heads,), device, torch.float32)
    if rope:
        arguments["positions"] = torch.arange(-1, T - 1, dtype=torch.int64, device=device)
        arguments["cos_sin"] = rope_table(max(1, T - 2), device)
    return {**arguments, **extra}


def _merge_attention_states(
    T: int,
    device: torch.device,
    N: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    sink: bool = False,
    strided: bool = False,
) -> Arguments:
    outs = normal((N, T, HEADS, 512), device, dtype)
    lses = normal((N, T, HEADS), device, torch.float32)
    lses[0, :1] = -torch.inf
    if strided:  # ranks side by side, as an all-gather along the heads leaves them
        outs = outs.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)
        lses = lses.permute(1, 0, 2).contiguous().permute(1, 0, 2)
    arguments: Arguments = {"outs": outs, "lses": lses}
    if sink:
        arguments["attn_sink"] = normal((HEADS,), device, torch.float32)
    return arguments


def _over_tokens(make: Callable[..., Arguments], *rest: Any, **extra: Any) -> dict[str, Maker]:
    return {f"T{T}": partial(make, T, *rest, **extra) for T in TOKENS}


_DCP = {"dcp_world_size": 2, "dcp_rank": 1, "cp_interleave": 2}
_RECORDS = ("fp8_ds_mla", "mxfp8", "nvfp4", "bf16")

_FUNCTIONAL: dict[str, dict[str, Maker]] = {
    "token_to_request": {**_over_tokens(_token_to_request), "no_requests": _no_requests},
    "compressed_slot_mapping": {
        **_over_tokens(_compressed_slot_mapping),
        "strided_table": partial(_compressed_slot_mapping, 17, strided=True),
        "ratio1": partial(_compressed_slot_mapping, 17, compress_ratio=1),
        "slot_mapping_int64": partial(_with_slot_mapping, 17, torch.int64),
        "slot_mapping_int32": partial(_with_slot_mapping, 2, torch.int32),
        "dcp": partial(_compressed_slot_mapping, 17, **_DCP),
        "dcp_slot_mapping": partial(_with_slot_mapping, 17, torch.int64, **_DCP),
    },
    "dcp_local_seq_lens": {
        "default_interleave": _dcp_local_seq_lens,
        "interleave4": partial(_dcp_local_seq_lens, cp_interleave=4),
        "one_rank": partial(_dcp_local_seq_lens, dcp_world_size=1, dcp_rank=0),
        "no_requests": partial(_dcp_local_seq_lens, R=0),
    },
    "sliding_window_indices": {
        **_over_tokens(_sliding_window_indices),
        "strided_table": partial(_sliding_window_indices, 17, strided=True),
        "window1": partial(_sliding_window_indices, 17, window=1),
        "window1_T1": partial(_sliding_window_indices, 1, window=1),
        "wide": partial(_sliding_window_indices, 17, window=20, width=64),
        "not_causal": partial(_sliding_window_indices, 17, width=192, causal=False),
        "replay_start": _with_replay_start,
    },
    "topk_to_slots": {
        **_over_tokens(_topk_to_slots),
        "strided": partial(_topk_to_slots, 17, strided=True),
        "int64": partial(_topk_to_slots, 17, dtype=torch.int64),
        "K1": partial(_topk_to_slots, 17, K=1),
        "K1_T1": partial(_topk_to_slots, 1, K=1),
        "K0": partial(_topk_to_slots, 2, K=0),
        "dcp": partial(_topk_to_slots, 17, **_DCP),
    },
    "decode_metadata": {
        **_over_tokens(_decode_metadata),
        "all": partial(
            _decode_metadata_replay,
            dtype=torch.int64,
            dcp_world_size=2,
            dcp_rank=1,
            cp_interleave_c1a=4,
            cp_interleave_c2a=2,
        ),
        "replay_start": partial(_decode_metadata_replay, dtype=torch.int32, window=20, width=33),
        "nothing": partial(_decode_metadata, 17, present=""),
        "window_only": partial(_decode_metadata, 17, present="swa"),
        "window_only_T1": partial(_decode_metadata, 1, present="swa", window=1),
        "c1a": partial(_decode_metadata, 17, present="c1a"),
        "c2a_T1": partial(_decode_metadata, 1, present="c2a"),
        "draft": partial(_decode_metadata, 17, present="swa c1a c2a", width=192, causal=False),
    },
    "kv_cache_insert": {
        **{
            f"{record}_T{T}": partial(_kv_cache_insert, T, record, dtype)
            for record, T, dtype in zip(
                _RECORDS, TOKENS, (torch.int64, torch.int32, torch.int64, torch.int32), strict=True
            )
        },
        **{
            f"{record}_T17": partial(_kv_cache_insert, 17, record, torch.int64)
            for record in _RECORDS
        },
        "guarded": partial(_kv_cache_insert, 17, "fp8_ds_mla", torch.int64, guard_pages=1),
        "strided": partial(_kv_cache_insert, 17, "mxfp8", torch.int32, strided=True),
        "bf16_as_bytes": _insert_bytes,
    },
    "rope_kv_cache_insert": {
        **{
            f"{record}_T{T}": partial(_rope_kv_cache_insert, T, record, dtype)
            for record, T, dtype in zip(
                _RECORDS, TOKENS, (torch.int64, torch.int32, torch.int64, torch.int32), strict=True
            )
        },
        **{
            f"{record}_float32": partial(
                _rope_kv_cache_insert, 17, record, torch.int64, kv_dtype=torch.float32
            )
            for record in _RECORDS
        },
        "guarded": partial(_rope_kv_cache_insert, 17, "fp8_ds_mla", torch.int64, guard_pages=1),
        "strided": partial(_rope_kv_cache_insert, 17, "mxfp8", torch.int32, strided=True),
        "ratio2": partial(_rope_kv_cache_insert, 17, "nvfp4", torch.int64, compress_ratio=2),
    },
    "compress_kv": {
        **_over_tokens(_compress_kv),
        "all": partial(
            _compress_kv, 17, slots=torch.int32, weight=torch.bfloat16, out_dtype=torch.float32
        ),
        "strided": partial(_compress_kv, 17, strided=True),
        "capacity2": partial(_compress_kv, 17, capacity=2, out_dtype=torch.bfloat16),
        "ratio1": partial(_compress_kv, 17, compress_ratio=1),
        "ratio1_empty_ring": _compress_kv_empty_ring,
        "ratio1_float32_T1": partial(
            _compress_kv, 1, compress_ratio=1, eps=1e-6, out_dtype=torch.float32
        ),
    },
    "indexer_k_insert": {
        **{
            f"{record}_T{T}": partial(_indexer_k_insert, T, record, dtype)
            for T, record, dtype in (
                (0, "fp8", torch.int64),
                (1, "mxfp4", torch.int32),
                (2, "fp8", torch.int32),
                (17, "fp8", torch.int64),
                (17, "mxfp4", torch.int64),
            )
        },
        "bfloat16": partial(
            _indexer_k_insert, 17, "fp8", torch.int32, k=torch.bfloat16, weight=torch.bfloat16
        ),
        "ratio2": partial(_indexer_k_insert, 17, "mxfp4", torch.int64, compress_ratio=2, eps=1e-6),
        "guarded": partial(_indexer_k_insert, 17, "fp8", torch.int64, guard_pages=1),
        "strided": partial(_indexer_k_insert, 17, "mxfp4", torch.int32, strided=True),
    },
    "indexer_topk": {
        **_over_tokens(_indexer_topk),
        "mxfp4": partial(_indexer_topk, 17, index_cache_dtype="mxfp4", compress_ratio=1, topk=40),
        "blocks": partial(_indexer_topk, 17, num_candidate_blocks=3),
        "candidates": partial(_indexer_topk, 17, candidates=9),
        "no_candidates": partial(_indexer_topk, 2, candidates=0),
        "strided": partial(_indexer_topk, 17, candidates=9, strided=True, num_candidate_blocks=4),
        "guarded": partial(_indexer_topk, 17, index_cache_dtype="mxfp4", guard_pages=1),
        "dcp": partial(_indexer_topk, 17, num_candidate_blocks=4, **_DCP),
        "all": partial(
            _indexer_topk,
            17,
            index_cache_dtype="mxfp4",
            heads=3,
            candidates=9,
            num_candidate_blocks=4,
            candidate_block_size=3,
            **_DCP,
        ),
    },
    "merge_topk": {
        **_over_tokens(_merge_topk),
        "strided": partial(_merge_topk, 17, strided=True),
        "one_rank": partial(_merge_topk, 2, N=1, topk=9),
        "no_columns": partial(_merge_topk, 2, K=0),
    },
    "kv_cache_gather": {
        **{
            f"{record}_N{N}": partial(_kv_cache_gather, N, record, dtype)
            for record, N, dtype in zip(
                _RECORDS, TOKENS, (torch.int64, torch.int32, torch.int64, torch.int32), strict=True
            )
        },
        "nvfp4_N17": partial(_kv_cache_gather, 17, "nvfp4", torch.int32),
        "guarded": partial(_kv_cache_gather, 17, "fp8_ds_mla", torch.int64, guard_pages=1),
        "bf16_as_bytes": _gather_bytes,
    },
    "sparse_mla_decode": {
        **_over_tokens(attention),
        "dual": partial(attention, 17, compressed="nvfp4"),
        "dual_sink_T2": partial(attention, 2, compressed="mxfp8", swa="fp8_ds_mla", sink=True),
        "sink": partial(attention, 1, swa="bf16", sink=True),
        "all": partial(attention, 17, compressed="nvfp4", sink=True, rope=True),
        "rope_T1": partial(attention, 1, rope=True),
        "strided_64_of_128_heads": partial(
            attention, 2, heads=64, compressed="nvfp4", sink=True, strided=True
        ),
        "one_head": partial(attention, 17, heads=1, compressed="bf16"),
        "one_row": partial(attention, 1, heads=1, W=1, K=1, compressed="nvfp4"),
        "no_columns": partial(attention, 2, W=0, K=0, compressed="nvfp4"),
        "scale": partial(attention, 2, softmax_scale=0.5),
        "batch_invariant": partial(attention, 17, compressed="nvfp4", batch_invariant=True),
    },
    "merge_attention_states": {
        **_over_tokens(_merge_attention_states),
        "sink": partial(_merge_attention_states, 17, sink=True),
        "float32": partial(_merge_attention_states, 17, dtype=torch.float32),
        "one_rank": partial(_merge_attention_states, 17, N=1),
        "one_rank_float32_T1": partial(_merge_attention_states, 1, N=1, dtype=torch.float32),
        "strided": partial(_merge_attention_states, 17, strided=True, sink=True),
    },
}


def _with_buffers(op: str, make: Maker, extra_rows: int, device: torch.device) -> Arguments:
    """The functional form's arguments plus caller-owned buffers full of a sentinel."""
    arguments = make(device)
    outputs = overload(op)(**{name: as_meta(value) for name, value in arguments.items()})
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for name, like in zip(written(op + "_out"), outputs, strict=True):
        shape = (like.shape[0] + extra_rows, *like.shape[1:])
        arguments[name] = torch.full(shape, 77, dtype=like.dtype, device=device)
    return arguments


def argument_sets(op: str) -> dict[str, Maker]:
    """Named valid argument sets of an op. A twin's buffers are longer than T in its T sets."""
    if not op.endswith("_out"):
        return _FUNCTIONAL[op]
    functional = op.removesuffix("_out")
    return {
        name: partial(_with_buffers, functional, make, 5 if name.startswith("T") else 0)
        for name, make in _FUNCTIONAL[functional].items()
    }


def each_set(ops: list[str] | None = None) -> list[tuple[str, str]]:
    """Every (op, argument set name), for parametrize."""
    return [(op, name) for op in ops or OPS for name in argument_sets(op)]


def schema_order(op: str, arguments: Arguments) -> tuple[tuple[Any, ...], Arguments]:
    """Arguments as opcheck takes them: positional ones in the schema's order, then keywords."""
    schema = overload(op)._schema.arguments
    positional = [arguments.get(a.name, a.default_value) for a in schema if not a.kwarg_only]
    return tuple(positional), {a.name: arguments[a.name] for a in schema if a.kwarg_only}


def tensors_of(arguments: Arguments) -> dict[str, Tensor]:
    """The tensors among the arguments."""
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def storage_bytes(tensor: Tensor) -> Tensor:
    """A copy of the whole storage that a tensor views, guards and gaps included."""
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return storage.set_(tensor.untyped_storage()).clone()


def as_meta(value: Any) -> Any:
    """A tensor of the same layout without data; anything else unchanged."""
    if not isinstance(value, Tensor):
        return value
    elements = value.untyped_storage().nbytes() // value.element_size()
    storage = torch.empty(elements, dtype=value.dtype, device="meta")
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())
