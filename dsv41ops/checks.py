"""One ``check_<op>`` per op: dtype, shape, stride, device and host values, never tensor values.

Eager kernels and fakes run the same check, so bad input gets the same ``ValueError`` in both. Sizes
may be symbolic: relations between them go through ``torch._check_value``, which states them to the
tracer instead of branching on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsv41ops.configs import AUTO, BACKENDS
from dsv41ops.layouts import (
    HEAD_DIM,
    INDEX_HEAD_DIM,
    INDEX_RECORDS,
    RECORDS,
    ROPE_DIM,
    find_record,
)

INT32 = (torch.int32,)
F32 = (torch.float32,)
F32_OR_BF16 = (torch.float32, torch.bfloat16)
SLOT_DTYPES = (torch.int32, torch.int64)
MAX_HEADS = 128
MAX_INDEX_HEADS = 64
MAX_SELECTED = 2048  # states or blocks
MAX_BLOCK_SIZE = 128


def _expect(condition: bool | torch.SymBool, name: str, describe: Callable[[], str]) -> None:
    """``describe`` says "<accepted>, got <what came>"; it runs only when it is needed."""
    if condition is not True:
        torch._check_value(condition, lambda: f"{name}: expected {describe()}")


def _shape(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"


def _check_tensor(
    name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], ndim: int, device: torch.device
) -> None:
    """Dtype, rank, device, and a last dimension that lies densely."""
    _expect(
        tensor.dtype in dtypes,
        name,
        lambda: f"{' or '.join(map(str, dtypes))}, got {tensor.dtype}",
    )
    _expect(tensor.dim() == ndim, name, lambda: f"{ndim} dimensions, got {_shape(tensor)}")
    _check_device(name, tensor, device)
    _check_dense(name, tensor)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    came = tensor.device
    _expect(came == device, name, lambda: f"a tensor on {device}, got {came}")


def _expect_stride(
    name: str,
    holds: bool | torch.SymBool,
    size: int | torch.SymInt,
    accepted: Callable[[], str],
    tensor: Tensor,
) -> None:
    # The stride of a dimension of one element is never used, so it may be anything.
    condition = size <= 1 if holds is False else holds
    _expect(
        condition, name, lambda: f"{accepted()}, got {_shape(tensor)}, stride {tensor.stride()}"
    )


def _check_dense(name: str, tensor: Tensor) -> None:
    holds = tensor.stride(-1) == 1
    _expect_stride(name, holds, tensor.shape[-1], lambda: "stride 1 in the last dimension", tensor)


def _check_size(name: str, tensor: Tensor, dim: int, size: int | torch.SymInt, what: str) -> None:
    _expect(
        tensor.shape[dim] == size,
        name,
        lambda: f"{what} = {size} in dimension {dim}, got {_shape(tensor)}",
    )


def _check_at_least(name: str, value: int | torch.SymInt, bound: int) -> None:
    _expect(value >= bound, name, lambda: f"at least {bound}, got {value}")


def _check_holds(name: str, tensor: Tensor, num_tokens: int | torch.SymInt) -> None:
    """A per-token buffer may be longer than this step's tokens, not shorter."""
    holds = tensor.shape[0] >= num_tokens
    _expect(holds, name, lambda: f"at least {num_tokens} rows, got {_shape(tensor)}")


def _check_batch(query_start_loc: Tensor, seq_lens: Tensor) -> None:
    device = query_start_loc.device
    _check_tensor("query_start_loc", query_start_loc, INT32, 1, device)
    _check_at_least("query_start_loc's length", query_start_loc.shape[0], 1)
    _check_tensor("seq_lens", seq_lens, INT32, 1, device)
    _check_size("seq_lens", seq_lens, 0, query_start_loc.shape[0] - 1, "len(query_start_loc) - 1")


def _check_states(
    states_per_page: int, compress_ratio: int, world: int, rank: int, interleave: int
) -> None:
    _check_at_least("states_per_page", states_per_page, 1)
    _check_at_least("compress_ratio", compress_ratio, 1)
    _check_dcp(world, rank, interleave)
    if world > 1:
        # A page would otherwise hold states of a block that is not allocated yet.
        _expect(
            states_per_page % interleave == 0,
            "states_per_page",
            lambda: f"a multiple of cp_interleave = {interleave} under DCP, got {states_per_page}",
        )


def _check_dcp(
    world: int, rank: int, interleave: int, interleave_name: str = "cp_interleave"
) -> None:
    _check_at_least("dcp_world_size", world, 1)
    _expect(
        0 <= rank < world,
        "dcp_rank",
        lambda: f"0 <= rank < dcp_world_size = {world}, got {rank}",
    )
    _check_at_least(interleave_name, interleave, 1)


def _check_cache(name: str, cache: Tensor, device: torch.device) -> None:
    _expect(cache.dim() == 3, name, lambda: f"3 dimensions, got {_shape(cache)}")
    _check_device(name, cache, device)
    width = int(cache.shape[2])
    _expect(
        find_record(cache.dtype, width) is not None,
        name,
        lambda: f"a last dimension of {_accepted_records()}, got {width} {cache.dtype}",
    )
    _check_dense(name, cache)
    _check_pages(name, cache, width)


def _check_pages(name: str, cache: Tensor, width: int) -> None:
    """Rows that adjoin, in pages that do not overlap."""
    pages, page_size, _ = cache.shape
    _check_at_least(f"{name}'s page size", page_size, 1)
    rows_adjoin = cache.stride(1) == width
    _expect_stride(name, rows_adjoin, page_size, lambda: f"rows {width} elements apart", cache)
    page = page_size * width
    pages_apart = cache.stride(0) >= page
    _expect_stride(name, pages_apart, pages, lambda: f"pages at least {page} elements apart", cache)


def _accepted_records() -> str:
    accepted = [f"{record.row_bytes} torch.uint8 ({record.name})" for record in RECORDS]
    return ", ".join([*accepted, f"{HEAD_DIM} torch.bfloat16 (bf16)"])


def check_token_to_request(query_start_loc: Tensor, num_tokens: int) -> None:
    _check_tensor("query_start_loc", query_start_loc, INT32, 1, query_start_loc.device)
    _check_at_least("query_start_loc's length", query_start_loc.shape[0], 1)
    _check_at_least("num_tokens", num_tokens, 0)


def check_compressed_slot_mapping(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_tokens: int,
    states_per_page: int,
    compress_ratio: int,
    slot_mapping: Tensor | None,
    dcp_world_size: int,
    dcp_rank: int,
    cp_interleave: int,
) -> None:
    _check_batch(query_start_loc, seq_lens)
    _check_tensor("block_table", block_table, INT32, 2, query_start_loc.device)
    _check_at_least("num_tokens", num_tokens, 0)
    _check_states(states_per_page, compress_ratio, dcp_world_size, dcp_rank, cp_interleave)
    if slot_mapping is not None:
        _check_tensor("slot_mapping", slot_mapping, SLOT_DTYPES, 1, query_start_loc.device)
        _check_holds("slot_mapping", slot_mapping, num_tokens)


def check_compressed_slot_mapping_out(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_tokens: int,
    *options: object,
    out: Tensor,
) -> None:
    check_compressed_slot_mapping(query_start_loc, seq_lens, block_table, num_tokens, *options)  # type: ignore[arg-type]
    _check_tensor("out", out, (torch.int64,), 1, query_start_loc.device)
    _check_holds("out", out, num_tokens)


def check_dcp_local_seq_lens(
    seq_lens: Tensor, compress_ratio: int, dcp_world_size: int, dcp_rank: int, cp_interleave: int
) -> None:
    _check_tensor("seq_lens", seq_lens, INT32, 1, seq_lens.device)
    _check_at_least("compress_ratio", compress_ratio, 1)
    _check_dcp(dcp_world_size, dcp_rank, cp_interleave)


def check_sliding_window_indices(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_tokens: int,
    page_size: int,
    window: int,
    width: int | None,
    causal: bool,
    replay_start: Tensor | None,
) -> None:
    _check_batch(query_start_loc, seq_lens)
    _check_tensor("block_table", block_table, INT32, 2, query_start_loc.device)
    _check_at_least("num_tokens", num_tokens, 0)
    _check_at_least("page_size", page_size, 1)
    _check_window(window, width, causal)
    _check_replay_start(replay_start, seq_lens)


def _check_window(window: int, width: int | None, causal: bool) -> None:
    _check_at_least("window", window, 1)
    if causal:
        holds = width is None or width >= window
        _expect(holds, "width", lambda: f"at least window = {window}, or None, got {width}")
    else:
        # The least that is right depends on the longest query, which is not known here.
        holds = width is not None and width >= 1
        accepted = "window plus the draft block, rounded up to 64, when causal=False"
        _expect(holds, "width", lambda: f"{accepted}, got {width}")


def _check_replay_start(replay_start: Tensor | None, seq_lens: Tensor) -> None:
    if replay_start is not None:
        _check_tensor("replay_start", replay_start, INT32, 1, seq_lens.device)
        _check_size("replay_start", replay_start, 0, seq_lens.shape[0], "len(seq_lens)")


def check_sliding_window_indices_out(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_tokens: int,
    page_size: int,
    window: int,
    width: int | None,
    causal: bool,
    replay_start: Tensor | None,
    *,
    out: Tensor,
    lens: Tensor,
) -> None:
    check_sliding_window_indices(
        query_start_loc,
        seq_lens,
        block_table,
        num_tokens,
        page_size,
        window,
        width,
        causal,
        replay_start,
    )
    _check_index_out(out, lens, num_tokens, window if width is None else width, seq_lens.device)


def _check_index_out(
    out: Tensor, lens: Tensor, num_tokens: int, width: int, device: torch.device
) -> None:
    _check_tensor("out", out, INT32, 2, device)
    _check_holds("out", out, num_tokens)
    _check_size("out", out, 1, width, "index width")
    _check_tensor("lens", lens, INT32, 1, device)
    _check_size("lens", lens, 0, out.shape[0], "rows of out")


def check_topk_to_slots(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    states_per_page: int,
    compress_ratio: int,
    dcp_world_size: int,
    dcp_rank: int,
    cp_interleave: int,
) -> None:
    _check_tensor("topk_indices", topk_indices, SLOT_DTYPES, 2, query_start_loc.device)
    _check_batch(query_start_loc, seq_lens)
    _check_tensor("block_table", block_table, INT32, 2, query_start_loc.device)
    _check_states(states_per_page, compress_ratio, dcp_world_size, dcp_rank, cp_interleave)


def check_topk_to_slots_out(
    topk_indices: Tensor, *options: object, out: Tensor, lens: Tensor
) -> None:
    check_topk_to_slots(topk_indices, *options)  # type: ignore[arg-type]
    num_tokens, width = topk_indices.shape
    _check_index_out(out, lens, num_tokens, width, topk_indices.device)


def check_decode_metadata(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    swa_block_table: Tensor | None,
    swa_page_size: int | None,
    block_table_c1a: Tensor | None,
    block_table_c2a: Tensor | None,
    block_size: int | None,
    window: int,
    width: int | None,
    causal: bool,
    replay_start: Tensor | None,
    slot_mapping: Tensor | None,
    dcp_world_size: int,
    dcp_rank: int,
    cp_interleave_c1a: int,
    cp_interleave_c2a: int,
) -> None:
    _check_batch(query_start_loc, seq_lens)
    device = query_start_loc.device
    _check_at_least("num_tokens", num_tokens, 0)
    if swa_block_table is not None:
        _check_tensor("swa_block_table", swa_block_table, INT32, 2, device)
        _check_given_with("swa_page_size", swa_page_size, "swa_block_table")
    _check_window(window, width, causal)
    _check_replay_start(replay_start, seq_lens)
    if slot_mapping is not None:
        _check_tensor("slot_mapping", slot_mapping, SLOT_DTYPES, 1, device)
        _check_holds("slot_mapping", slot_mapping, num_tokens)
    for kind, ratio, table, interleave in (
        ("c1a", 1, block_table_c1a, cp_interleave_c1a),
        ("c2a", 2, block_table_c2a, cp_interleave_c2a),
    ):
        _check_dcp(dcp_world_size, dcp_rank, interleave, f"cp_interleave_{kind}")
        if table is not None:
            _check_tensor(f"block_table_{kind}", table, INT32, 2, device)
            size = _check_given_with("block_size", block_size, f"block_table_{kind}")
            # Whole states, and under DCP whole runs of them: see _check_states.
            _check_multiple("block_size", size, ratio * (interleave if dcp_world_size > 1 else 1))


def _check_multiple(name: str, value: int, step: int) -> None:
    _expect(value % step == 0, name, lambda: f"a multiple of {step} tokens, got {value}")


def _check_given_with(name: str, value: int | None, owner: str) -> int:
    holds = value is not None and value >= 1
    _expect(holds, name, lambda: f"at least 1 with {owner}, got {value}")
    return 1 if value is None else value


def check_decode_metadata_out(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    swa_block_table: Tensor | None,
    swa_page_size: int | None,
    block_table_c1a: Tensor | None,
    block_table_c2a: Tensor | None,
    block_size: int | None,
    window: int,
    width: int | None,
    *options: object,
    swa_indices: Tensor,
    swa_lens: Tensor,
    **buffers: Tensor,
) -> None:
    check_decode_metadata(
        query_start_loc,
        seq_lens,
        num_tokens,
        swa_block_table,
        swa_page_size,
        block_table_c1a,
        block_table_c2a,
        block_size,
        window,
        width,
        *options,  # type: ignore[arg-type]
    )
    device = query_start_loc.device
    present = {"swa": swa_block_table, "c1a": block_table_c1a, "c2a": block_table_c2a}
    for name, buffer in buffers.items():
        owner = next((kind for kind in present if kind in name), None)
        absent = owner is not None and present[owner] is None
        lengths = name.startswith("dcp_local_seq_lens")
        num_rows = 0 if absent else seq_lens.shape[0] if lengths else num_tokens
        wide = name == "positions" or "slot_mapping" in name
        _check_tensor(name, buffer, (torch.int64,) if wide else INT32, 1, device)
        _check_wanted(name, buffer, num_rows)
    _check_tensor("swa_indices", swa_indices, INT32, 2, device)
    _check_wanted("swa_indices", swa_indices, 0 if swa_block_table is None else num_tokens)
    _check_size("swa_indices", swa_indices, 1, window if width is None else width, "index width")
    _check_tensor("swa_lens", swa_lens, INT32, 1, device)
    _check_size("swa_lens", swa_lens, 0, swa_indices.shape[0], "rows of swa_indices")


def _check_wanted(name: str, buffer: Tensor, num_rows: int) -> None:
    """An empty buffer is one that the caller does without."""
    size = buffer.shape[0]
    holds = (size >= num_rows) | (size == 0)
    _expect(holds, name, lambda: f"at least {num_rows} rows or none, got {_shape(buffer)}")


def check_kv_cache_insert(kv: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
    _check_tensor("kv", kv, (torch.bfloat16,), 2, cache.device)
    _check_size("kv", kv, 1, HEAD_DIM, "head_dim")
    _check_tensor("slot_mapping", slot_mapping, SLOT_DTYPES, 1, cache.device)
    _check_size("slot_mapping", slot_mapping, 0, kv.shape[0], "rows of kv")
    _check_cache("cache", cache, cache.device)


def check_rope_kv_cache_insert(
    kv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    compress_ratio: int,
) -> None:
    _check_tensor("kv", kv, (torch.bfloat16, torch.float32), 2, cache.device)
    _check_size("kv", kv, 1, HEAD_DIM, "head_dim")
    _check_rope(positions, cos_sin, kv.shape[0], "rows of kv", cache.device)
    _check_tensor("slot_mapping", slot_mapping, SLOT_DTYPES, 1, cache.device)
    _check_size("slot_mapping", slot_mapping, 0, kv.shape[0], "rows of kv")
    _check_cache("cache", cache, cache.device)
    _check_at_least("compress_ratio", compress_ratio, 1)


def _check_rope(
    positions: Tensor,
    cos_sin: Tensor,
    num_tokens: int | torch.SymInt,
    what: str,
    device: torch.device,
) -> None:
    _check_tensor("positions", positions, SLOT_DTYPES, 1, device)
    _check_size("positions", positions, 0, num_tokens, what)
    _check_tensor("cos_sin", cos_sin, (torch.float32,), 2, device)
    _check_size("cos_sin", cos_sin, 1, ROPE_DIM, "cosines and sines")


def check_compress_kv(
    kv: Tensor,
    score: Tensor | None,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    norm_weight: Tensor,
    ring_slots: Tensor | None,
    ring: Tensor | None,
    compress_ratio: int,
    eps: float,
    out_dtype: torch.dtype | None,
) -> None:
    _check_batch(query_start_loc, seq_lens)
    device = query_start_loc.device
    _check_tensor("kv", kv, F32, 2, device)
    _check_size("kv", kv, 1, HEAD_DIM, "head_dim")
    _check_tensor("norm_weight", norm_weight, F32_OR_BF16, 1, device)
    _check_size("norm_weight", norm_weight, 0, HEAD_DIM, "head_dim")
    _expect(compress_ratio in (1, 2), "compress_ratio", lambda: f"1 or 2, got {compress_ratio}")
    _check_given("score", score, compress_ratio)
    _check_given("ring_slots", ring_slots, compress_ratio)
    if ring is None or compress_ratio == 2:
        _check_given("ring", ring, compress_ratio)
    else:  # see api.compress_kv
        no_rows = ring.shape[0] == 0
        _expect(no_rows, "ring", lambda: f"None with compress_ratio = 1, got {_shape(ring)}")
    if score is not None and ring_slots is not None and ring is not None:
        _check_tensor("score", score, F32, 2, device)
        for dim, what in enumerate(("rows of kv", "head_dim")):
            _check_size("score", score, dim, kv.shape[dim], what)
        _check_tensor("ring_slots", ring_slots, SLOT_DTYPES, 1, device)
        _check_size("ring_slots", ring_slots, 0, seq_lens.shape[0], "len(seq_lens)")
        _check_ring(ring, device)
    _expect(
        out_dtype in (None, *F32_OR_BF16),
        "out_dtype",
        lambda: f"torch.float32, torch.bfloat16 or None, got {out_dtype}",
    )


def _check_given(name: str, tensor: Tensor | None, compress_ratio: int) -> None:
    accepted = "a tensor" if compress_ratio == 2 else "None"
    came = "None" if tensor is None else _shape(tensor)
    given = (tensor is not None) == (compress_ratio == 2)
    _expect(given, name, lambda: f"{accepted} with compress_ratio = {compress_ratio}, got {came}")


def _check_ring(ring: Tensor, device: torch.device) -> None:
    _check_tensor("ring", ring, F32, 4, device)
    _check_size("ring", ring, 2, 2, "kv and score")
    _check_size("ring", ring, 3, HEAD_DIM, "head_dim")
    rows, capacity = ring.shape[0], int(ring.shape[1])
    _expect(
        capacity >= 2 and capacity.bit_count() == 1,
        "ring",
        lambda: f"a capacity (dimension 1) of a power of two, 2 or more, got {_shape(ring)}",
    )
    apart = 2 * HEAD_DIM
    dense = ring.stride(1) == apart and ring.stride(2) == HEAD_DIM
    _expect_stride("ring", dense, 2, lambda: "the last three dimensions dense", ring)
    size = capacity * apart
    rows_apart = ring.stride(0) >= size
    _expect_stride("ring", rows_apart, rows, lambda: f"rows at least {size} elements apart", ring)


def check_indexer_k_insert(
    k: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    compress_ratio: int,
    eps: float,
) -> None:
    device = cache.device
    _check_tensor("k", k, F32_OR_BF16, 2, device)
    _check_size("k", k, 1, INDEX_HEAD_DIM, "index_head_dim")
    _check_tensor("norm_weight", norm_weight, F32_OR_BF16, 1, device)
    _check_size("norm_weight", norm_weight, 0, INDEX_HEAD_DIM, "index_head_dim")
    _check_rope(positions, cos_sin, k.shape[0], "rows of k", device)
    _check_tensor("slot_mapping", slot_mapping, SLOT_DTYPES, 1, device)
    _check_size("slot_mapping", slot_mapping, 0, k.shape[0], "rows of k")
    check_index_cache("cache", cache, device)
    _check_at_least("compress_ratio", compress_ratio, 1)


def check_index_cache(name: str, cache: Tensor, device: torch.device) -> None:
    """A paged cache of index keys, of either record."""
    _check_tensor(name, cache, (torch.uint8,), 3, device)
    accepted = " or ".join(f"{width} ({record.name})" for width, record in INDEX_RECORDS.items())
    width = int(cache.shape[2])
    _expect(
        width in INDEX_RECORDS, name, lambda: f"a last dimension of {accepted}, got {_shape(cache)}"
    )
    _check_pages(name, cache, width)


def check_indexer_topk(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk: int,
    compress_ratio: int,
    candidate_blocks: Tensor | None,
    num_candidate_blocks: int,
    candidate_block_size: int,
    dcp_world_size: int,
    dcp_rank: int,
    cp_interleave: int,
) -> None:
    _check_batch(query_start_loc, seq_lens)
    device = query_start_loc.device
    _check_tensor("q", q, (torch.bfloat16,), 3, device)
    num_tokens, num_heads, _ = q.shape
    _check_size("q", q, 2, INDEX_HEAD_DIM, "index_head_dim")
    _check_range("q's number of heads", num_heads, 1, MAX_INDEX_HEADS)
    _check_tensor("weights", weights, F32, 2, device)
    _check_size("weights", weights, 0, num_tokens, "tokens")
    _check_size("weights", weights, 1, num_heads, "heads")
    check_index_cache("cache", cache, device)
    _check_tensor("block_table", block_table, INT32, 2, device)
    _check_range("topk", topk, 1, MAX_SELECTED)
    _check_at_least("compress_ratio", compress_ratio, 1)
    if candidate_blocks is not None:
        _check_tensor("candidate_blocks", candidate_blocks, INT32, 2, device)
        _check_size("candidate_blocks", candidate_blocks, 0, num_tokens, "tokens")
        _check_range("candidate_blocks' width", candidate_blocks.shape[1], 0, MAX_SELECTED)
    _check_range("num_candidate_blocks", num_candidate_blocks, 0, MAX_SELECTED)
    _check_range("candidate_block_size", candidate_block_size, 1, MAX_BLOCK_SIZE)
    _check_dcp(dcp_world_size, dcp_rank, cp_interleave)
    if dcp_world_size > 1:
        # As in _check_states.
        states = cache.shape[1]
        _expect(
            states % cp_interleave == 0,
            "cache",
            lambda: (
                f"pages of a multiple of cp_interleave = {cp_interleave} rows under DCP, "
                f"got {states}"
            ),
        )


def _check_range(name: str, value: int | torch.SymInt, least: int, most: int) -> None:
    _expect(value >= least, name, lambda: f"{least} to {most}, got {value}")
    _expect(value <= most, name, lambda: f"{least} to {most}, got {value}")


def check_merge_topk(indices: Tensor, scores: Tensor, topk: int) -> None:
    _check_tensor("indices", indices, INT32, 3, indices.device)
    _check_tensor("scores", scores, F32, 3, indices.device)
    for dim, what in enumerate(("ranks", "tokens", "columns")):
        _check_size("scores", scores, dim, indices.shape[dim], what)
    _check_range("topk", topk, 1, MAX_SELECTED)


def check_kv_cache_gather(cache: Tensor, slots: Tensor) -> None:
    _check_cache("cache", cache, cache.device)
    _check_tensor("slots", slots, SLOT_DTYPES, 1, cache.device)


def check_sparse_mla_decode(
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
    positions: Tensor | None,
    cos_sin: Tensor | None,
) -> None:
    _check_tensor("q", q, (torch.bfloat16,), 3, q.device)
    num_tokens, num_heads, _ = q.shape
    _check_size("q", q, 2, HEAD_DIM, "head_dim")
    _check_at_least("q's number of heads", num_heads, 1)
    _expect(num_heads <= MAX_HEADS, "q", lambda: f"1 to {MAX_HEADS} heads, got {_shape(q)}")
    _check_cache("swa_cache", swa_cache, q.device)
    _check_rows("swa_indices", swa_indices, "swa_lens", swa_lens, num_tokens, q.device)
    if cache is not None and topk_indices is not None and topk_lens is not None:
        _check_cache("cache", cache, q.device)
        _check_rows("topk_indices", topk_indices, "topk_lens", topk_lens, num_tokens, q.device)
    else:
        given = {"cache": cache, "topk_indices": topk_indices, "topk_lens": topk_lens}
        missing = [name for name, tensor in given.items() if tensor is None]
        _expect(
            len(missing) == len(given),
            " and ".join(missing),
            lambda: "cache, topk_indices and topk_lens together, or none of them, got None",
        )
    if attn_sink is not None:
        _check_tensor("attn_sink", attn_sink, (torch.float32,), 1, q.device)
        _check_size("attn_sink", attn_sink, 0, num_heads, "heads")
    if positions is not None and cos_sin is not None:
        _check_rope(positions, cos_sin, num_tokens, "tokens", q.device)
    else:
        _expect(
            positions is cos_sin,
            "positions" if positions is None else "cos_sin",
            lambda: "positions and cos_sin together, or neither, got None",
        )
    if backend != AUTO:
        check_backend("backend", backend)
        _expect(
            q.device.type != "cpu",
            "backend",
            lambda: f"{AUTO} on a CPU, got {backend!r}, which needs a CUDA device",
        )


def check_backend(name: str, backend: str) -> None:
    accepted = (AUTO, *BACKENDS)
    _expect(backend in accepted, name, lambda: f"one of {', '.join(accepted)}, got {backend!r}")


def _check_rows(
    name: str, indices: Tensor, lens_name: str, lens: Tensor, num_tokens: int, device: torch.device
) -> None:
    _check_tensor(name, indices, INT32, 2, device)
    _check_size(name, indices, 0, num_tokens, "tokens")
    _check_tensor(lens_name, lens, INT32, 1, device)
    _check_size(lens_name, lens, 0, num_tokens, "tokens")


def check_sparse_mla_decode_out(q: Tensor, *options: object, out: Tensor, lse: Tensor) -> None:
    check_sparse_mla_decode(q, *options)  # type: ignore[arg-type]
    num_tokens, num_heads, _ = q.shape
    _check_tensor("out", out, (torch.bfloat16,), 3, q.device)
    _check_holds("out", out, num_tokens)
    _check_size("out", out, 1, num_heads, "heads")
    _check_size("out", out, 2, HEAD_DIM, "head_dim")
    _check_tensor("lse", lse, (torch.float32,), 2, q.device)
    _check_holds("lse", lse, num_tokens)
    _check_size("lse", lse, 1, num_heads, "heads")


def check_merge_attention_states(outs: Tensor, lses: Tensor, attn_sink: Tensor | None) -> None:
    _check_tensor("outs", outs, (torch.bfloat16, torch.float32), 4, outs.device)
    _check_size("outs", outs, 3, HEAD_DIM, "head_dim")
    _check_tensor("lses", lses, (torch.float32,), 3, outs.device)
    for dim, what in enumerate(("ranks", "tokens", "heads")):
        _check_size("lses", lses, dim, outs.shape[dim], what)
    if attn_sink is not None:
        _check_tensor("attn_sink", attn_sink, (torch.float32,), 1, outs.device)
        _check_size("attn_sink", attn_sink, 0, outs.shape[2], "heads")
