"""The public functions: one op call each, with defaults, types and documentation.

Dimension letters: ``T`` tokens of this step (padding included), ``R`` requests, ``H`` query heads
on this rank, ``P`` pages per request, ``K`` selected positions per token, ``W`` window width.
Definitions: DeepSeek-V4.1 release; slot mapping and metadata as vLLM, attention as FlashMLA.

Every function also raises ``TypeError`` for an argument of the wrong Python type.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import dsv41ops.ops  # noqa: F401  (registers the ops)
from dsv41ops.layouts import HEAD_DIM
from dsv41ops.schemas import SCHEMAS

Tensor = torch.Tensor

# Schema type -> what a caller may pass, and its name in a message. A size may be symbolic.
_ACCEPTED: dict[str, tuple[tuple[type, ...], str]] = {
    "Tensor": ((Tensor,), "a torch.Tensor"),
    "int": ((int, torch.SymInt), "an int"),
    "SymInt": ((int, torch.SymInt), "an int"),
    "float": ((float, int, torch.SymFloat), "a float"),
    "bool": ((bool,), "a bool"),
    "str": ((str,), "a str"),
    "ScalarType": ((torch.dtype,), "a torch.dtype"),
}


def _parameters(op: str) -> list[tuple[str, tuple[type, ...], str]]:
    """Name, accepted types and their description of every argument of an op."""
    found = []
    for argument in getattr(torch.ops.dsv41, op).default._schema.arguments:
        kind = str(argument.real_type)
        types, accepted = _ACCEPTED[kind.removeprefix("Optional[").removesuffix("]")]
        if kind.startswith("Optional"):
            types, accepted = (*types, type(None)), f"{accepted} or None"
        found.append((argument.name, types, accepted))
    return found


_PARAMETERS = {op: _parameters(op) for op in SCHEMAS}


def _call(op: str, *args: object, **buffers: object) -> Any:
    """Call an op; a wrong Python type is a TypeError before the dispatcher sees it.

    A tensor passed for an int would otherwise be read back from its device, a host sync.
    """
    for (name, types, accepted), value in zip(
        _PARAMETERS[op], (*args, *buffers.values()), strict=True
    ):
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise TypeError(f"{name}: expected {accepted}, got {type(value).__name__}")
    return getattr(torch.ops.dsv41, op)(*args, **buffers)


def token_to_request(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """Request index of each token of a step.

    Args:
        query_start_loc: ``[R + 1]`` int32, non-decreasing; request r owns the tokens
            ``query_start_loc[r] .. query_start_loc[r + 1] - 1``. Requests may be empty.
        num_tokens: ``T``, padding included.

    Returns:
        ``[T]`` int32; -1 for a token at or past ``query_start_loc[R]``.

    Raises:
        ValueError: An argument breaks the shapes, dtypes or strides above, or ``num_tokens < 0``.
    """
    result: Tensor = _call("token_to_request", query_start_loc, num_tokens)
    return result


def compressed_slot_mapping(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_tokens: int,
    states_per_page: int,
    compress_ratio: int,
    slot_mapping: Tensor | None = None,
    dcp_world_size: int = 1,
    dcp_rank: int = 0,
    cp_interleave: int = 1,
) -> Tensor:
    """Slot in the compressed cache for each token that closes a state.

    A token at position p closes state ``p // ratio`` iff ``(p + 1) % ratio == 0``. Under decode
    context parallelism (DCP) rank ``(s // I) % world`` owns state s, as its local state
    ``s // (I * world) * I + s % I``; the interleave ``I`` counts states. Only the owner gets the
    slot ``block_table[r, local // states_per_page] * states_per_page + local % states_per_page``.

    Args:
        query_start_loc: ``[R + 1]`` int32, as in :func:`token_to_request`.
        seq_lens: ``[R]`` int32, tokens of each request after this step. Token t of request r has
            position ``seq_lens[r] - query_len[r] + t - query_start_loc[r]``.
        block_table: ``[rows, P]`` int32 page numbers, any row stride; read within bounds only.
        num_tokens: ``T``, padding included.
        states_per_page: States (not tokens) in one page of one rank.
        compress_ratio: Tokens per state, at least 1.
        slot_mapping: ``[>= T]`` int32 or int64, or None. -1 marks a replayed token, whose state
            is cached already. For caches that every rank writes: a mapping whose -1 means
            "another rank's token" must not be passed.
        dcp_world_size: DCP ranks, at least 1.
        dcp_rank: This rank.
        cp_interleave: ``I``; must divide ``states_per_page`` when ``dcp_world_size > 1``.

    Returns:
        ``[T]`` int64 slots; -1 for every other token: no state closed, another rank's state,
        replayed, padding, a negative position, or no page in the table.

    Raises:
        ValueError: An argument breaks the shapes, dtypes, strides or ranges above.
    """
    result: Tensor = _call(
        "compressed_slot_mapping",
        query_start_loc,
        seq_lens,
        block_table,
        num_tokens,
        states_per_page,
        compress_ratio,
        slot_mapping,
        dcp_world_size,
        dcp_rank,
        cp_interleave,
    )
    return result


def compressed_slot_mapping_out(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_tokens: int,
    states_per_page: int,
    compress_ratio: int,
    slot_mapping: Tensor | None = None,
    dcp_world_size: int = 1,
    dcp_rank: int = 0,
    cp_interleave: int = 1,
    *,
    out: Tensor,
) -> None:
    """:func:`compressed_slot_mapping` into a caller's buffer.

    Args:
        out: ``[>= T]`` int64; written whole, -1 past T. The others are as in the functional form.
    """
    _call(
        "compressed_slot_mapping_out",
        query_start_loc,
        seq_lens,
        block_table,
        num_tokens,
        states_per_page,
        compress_ratio,
        slot_mapping,
        dcp_world_size,
        dcp_rank,
        cp_interleave,
        out=out,
    )


def dcp_local_seq_lens(
    seq_lens: Tensor,
    compress_ratio: int,
    dcp_world_size: int,
    dcp_rank: int,
    cp_interleave: int = 1,
) -> Tensor:
    """States of each request that this DCP rank owns.

    Of ``n = seq_lens // ratio`` states, ``n // (I * world) * I + clamp(n % (I * world) - rank * I,
    0, I)``.

    Args:
        seq_lens: ``[R]`` int32, in tokens; negative counts as 0.
        compress_ratio: Tokens per state, at least 1.
        dcp_world_size: DCP ranks, at least 1.
        dcp_rank: This rank.
        cp_interleave: ``I``, in states, at least 1.

    Returns:
        ``[R]`` int32, a new tensor also for one rank.

    Raises:
        ValueError: An argument breaks the shapes, dtypes, strides or ranges above.
    """
    result: Tensor = _call(
        "dcp_local_seq_lens",
        seq_lens,
        compress_ratio,
        dcp_world_size,
        dcp_rank,
        cp_interleave,
    )
    return result


def sliding_window_indices(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_tokens: int,
    page_size: int,
    window: int = 128,
    width: int | None = None,
    causal: bool = True,
    replay_start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Slots of the sliding window that each token attends to.

    A causal token at position p sees ``max(p - window + 1, replay_start[r], 0) .. p``. With
    ``causal=False`` (draft blocks) every token of a request sees
    ``max(first query position - window, 0) .. seq_len - 1``. Where that is more than ``width``
    positions, the newest are kept.

    Args:
        query_start_loc: ``[R + 1]`` int32, as in :func:`token_to_request`.
        seq_lens: ``[R]`` int32, tokens of each request after this step.
        block_table: ``[rows, P]`` int32 pages of the window cache, indexed by
            ``position // page_size``; any row stride, read within bounds only.
        num_tokens: ``T``, padding included.
        page_size: Rows in one page of the window cache.
        window: Positions that a token sees, itself included.
        width: ``W``, columns of the result. Causal: at least ``window``, which None stands for.
            Non-causal: must be given; window plus the draft block, rounded up to 64.
        causal: False for draft blocks.
        replay_start: ``[R]`` int32 oldest position whose window row is cached, or None. Has no
            effect on draft blocks.

    Returns:
        ``[T, W]`` int32 slots, oldest first and packed left (a position without a page is left
        out), -1 beyond; and ``[T]`` int32, how many. Padding tokens: all -1 and 0.

    Raises:
        ValueError: An argument breaks the shapes, dtypes, strides or ranges above.
    """
    result: tuple[Tensor, Tensor] = _call(
        "sliding_window_indices",
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
    return result


def sliding_window_indices_out(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_tokens: int,
    page_size: int,
    window: int = 128,
    width: int | None = None,
    causal: bool = True,
    replay_start: Tensor | None = None,
    *,
    out: Tensor,
    lens: Tensor,
) -> None:
    """:func:`sliding_window_indices` into a caller's buffers.

    Args:
        out: ``[>= T, W]`` int32, any row stride; written whole, -1 past T.
        lens: ``[len(out)]`` int32; written whole, 0 past T. The others are as in the functional
            form.
    """
    _call(
        "sliding_window_indices_out",
        query_start_loc,
        seq_lens,
        block_table,
        num_tokens,
        page_size,
        window,
        width,
        causal,
        replay_start,
        out=out,
        lens=lens,
    )


def topk_to_slots(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    states_per_page: int,
    compress_ratio: int,
    dcp_world_size: int = 1,
    dcp_rank: int = 0,
    cp_interleave: int = 1,
) -> tuple[Tensor, Tensor]:
    """Slots in the compressed cache of each token's selected states.

    Args:
        topk_indices: ``[T, K]`` int32 or int64 state numbers of the token's request, -1 for none,
            anywhere in a row. Under DCP they are global. A number at or past what the token may
            see, ``(p + 1) // ratio``, is skipped.
        query_start_loc: ``[R + 1]`` int32, as in :func:`token_to_request`.
        seq_lens: ``[R]`` int32, tokens of each request after this step.
        block_table: ``[rows, P]`` int32 page numbers, any row stride; read within bounds only.
        states_per_page: States (not tokens) in one page of one rank.
        compress_ratio: Tokens per state, at least 1.
        dcp_world_size: DCP ranks, at least 1.
        dcp_rank: This rank; only states that it owns are kept, as its local slots.
        cp_interleave: In states; must divide ``states_per_page`` when ``dcp_world_size > 1``.

    Returns:
        ``[T, K]`` int32 slots, packed left in the given order, -1 beyond; and ``[T]`` int32, how
        many. Padding tokens: all -1 and 0.

    Raises:
        ValueError: An argument breaks the shapes, dtypes, strides or ranges above.
    """
    result: tuple[Tensor, Tensor] = _call(
        "topk_to_slots",
        topk_indices,
        query_start_loc,
        seq_lens,
        block_table,
        states_per_page,
        compress_ratio,
        dcp_world_size,
        dcp_rank,
        cp_interleave,
    )
    return result


def topk_to_slots_out(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    states_per_page: int,
    compress_ratio: int,
    dcp_world_size: int = 1,
    dcp_rank: int = 0,
    cp_interleave: int = 1,
    *,
    out: Tensor,
    lens: Tensor,
) -> None:
    """:func:`topk_to_slots` into a caller's buffers.

    Args:
        out: ``[>= T, K]`` int32, any row stride; written whole, -1 past T.
        lens: ``[len(out)]`` int32; written whole, 0 past T. The others are as in the functional
            form.
    """
    _call(
        "topk_to_slots_out",
        topk_indices,
        query_start_loc,
        seq_lens,
        block_table,
        states_per_page,
        compress_ratio,
        dcp_world_size,
        dcp_rank,
        cp_interleave,
        out=out,
        lens=lens,
    )


class DecodeMetadata(NamedTuple):
    """What :func:`decode_metadata` gives; an absent cache's tensors have no rows."""

    req_id_per_token: Tensor  # [T] int32, -1 for padding
    positions: Tensor  # [T] int64, -1 for padding and where it would be negative
    swa_slot_mapping: Tensor  # [T] int64, the window row of the token itself
    swa_indices: Tensor  # [T, W] int32, packed left, -1 beyond
    swa_lens: Tensor  # [T] int32
    compressed_slot_mapping_c1a: Tensor  # [T] int64, -1: no state goes anywhere
    compressed_slot_mapping_c2a: Tensor  # [T] int64
    dcp_local_seq_lens_c1a: Tensor  # [R] int32, this rank's states
    dcp_local_seq_lens_c2a: Tensor  # [R] int32


def decode_metadata(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    swa_block_table: Tensor | None = None,
    swa_page_size: int | None = None,
    block_table_c1a: Tensor | None = None,
    block_table_c2a: Tensor | None = None,
    block_size: int | None = None,
    window: int = 128,
    width: int | None = None,
    causal: bool = True,
    replay_start: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    dcp_world_size: int = 1,
    dcp_rank: int = 0,
    cp_interleave_c1a: int = 1,
    cp_interleave_c2a: int = 1,
) -> DecodeMetadata:
    """Everything that the layers of a step share, in one launch.

    Each result is, bit for bit, that of an op of its own: :func:`token_to_request`,
    :func:`sliding_window_indices`, :func:`compressed_slot_mapping` (for the window's rows, of
    ratio 1 and on every rank) and :func:`dcp_local_seq_lens`. A cache is present if its block
    table is given: the window's, C1A's (ratio 1), C2A's (ratio 2).

    Args:
        query_start_loc: ``[R + 1]`` int32, as in :func:`token_to_request`.
        seq_lens: ``[R]`` int32, tokens of each request after this step.
        num_tokens: ``T``, padding included.
        swa_block_table: ``[rows, P]`` int32 pages of the window cache, any row stride, or None.
        swa_page_size: Rows in one page of it; given with ``swa_block_table``.
        block_table_c1a: ``[rows, P]`` int32 pages of the C1A cache, any row stride, or None.
        block_table_c2a: The same of the C2A cache.
        block_size: Tokens (not states) in one compressed page of one rank, which holds
            ``block_size / ratio`` states; given with either table.
        window: Positions that a token sees, itself included.
        width: ``W``, as in :func:`sliding_window_indices`.
        causal: False for draft blocks.
        replay_start: ``[R]`` int32 or None, as in :func:`sliding_window_indices`.
        slot_mapping: ``[>= T]`` int32 or int64, or None. -1 marks a replayed token, whose states
            are cached already; its window row is not.
        dcp_world_size: DCP ranks, at least 1.
        dcp_rank: This rank.
        cp_interleave_c1a: In states of C1A; under DCP a page must hold whole runs of them.
        cp_interleave_c2a: In states of C2A, likewise.

    Returns:
        A :class:`DecodeMetadata`. Padding: -1, and 0 for lengths.

    Raises:
        ValueError: An argument breaks the shapes, dtypes, strides or ranges above.
    """
    return DecodeMetadata(
        *_call(
            "decode_metadata",
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
            causal,
            replay_start,
            slot_mapping,
            dcp_world_size,
            dcp_rank,
            cp_interleave_c1a,
            cp_interleave_c2a,
        )
    )


def decode_metadata_out(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    swa_block_table: Tensor | None = None,
    swa_page_size: int | None = None,
    block_table_c1a: Tensor | None = None,
    block_table_c2a: Tensor | None = None,
    block_size: int | None = None,
    window: int = 128,
    width: int | None = None,
    causal: bool = True,
    replay_start: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    dcp_world_size: int = 1,
    dcp_rank: int = 0,
    cp_interleave_c1a: int = 1,
    cp_interleave_c2a: int = 1,
    *,
    req_id_per_token: Tensor,
    positions: Tensor,
    swa_slot_mapping: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    compressed_slot_mapping_c1a: Tensor,
    compressed_slot_mapping_c2a: Tensor,
    dcp_local_seq_lens_c1a: Tensor,
    dcp_local_seq_lens_c2a: Tensor,
) -> None:
    """:func:`decode_metadata` into a caller's buffers.

    A buffer may be longer than its result: it is written whole, with -1 (lengths: 0) past the
    tokens or requests, and everywhere if the cache is absent. One of length 0 is left out. Which
    are left out, or longer, makes no other kernel variant.

    Args:
        req_id_per_token: ``[>= T]`` int32.
        positions: ``[>= T]`` int64.
        swa_slot_mapping: ``[>= T]`` int64.
        swa_indices: ``[>= T, W]`` int32, any row stride.
        swa_lens: ``[len(swa_indices)]`` int32.
        compressed_slot_mapping_c1a: ``[>= T]`` int64.
        compressed_slot_mapping_c2a: ``[>= T]`` int64.
        dcp_local_seq_lens_c1a: ``[>= R]`` int32.
        dcp_local_seq_lens_c2a: ``[>= R]`` int32. The others are as in the functional form.
    """
    _call(
        "decode_metadata_out",
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
        causal,
        replay_start,
        slot_mapping,
        dcp_world_size,
        dcp_rank,
        cp_interleave_c1a,
        cp_interleave_c2a,
        req_id_per_token=req_id_per_token,
        positions=positions,
        swa_slot_mapping=swa_slot_mapping,
        swa_indices=swa_indices,
        swa_lens=swa_lens,
        compressed_slot_mapping_c1a=compressed_slot_mapping_c1a,
        compressed_slot_mapping_c2a=compressed_slot_mapping_c2a,
        dcp_local_seq_lens_c1a=dcp_local_seq_lens_c1a,
        dcp_local_seq_lens_c2a=dcp_local_seq_lens_c2a,
    )


def kv_cache_insert(kv: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
    """Encode latent rows into a paged cache.

    The record follows from the cache's dtype and last dimension (584 ``fp8_ds_mla``, 528
    ``mxfp8``, 288 ``nvfp4``, 1024 or bfloat16 ``bf16``). RoPE has been applied already.

    Args:
        kv: ``[T, 512]`` bfloat16, any row stride. A non-finite value makes its own scale group
            NaN and nothing else.
        slot_mapping: ``[T]`` int32 or int64 slots ``page * page_size + row``. A slot below 0 or
            past the cache means no write. Slots of one call are unique; of duplicates one row
            is left, possibly torn.
        cache: ``[pages, page_size, bytes]`` uint8 or ``[pages, page_size, 512]`` bfloat16, any
            page stride (``stride(0)``). Written: the bytes of the named rows only.

    Raises:
        ValueError: An argument breaks the shapes, dtypes or strides above.
    """
    _call("kv_cache_insert", kv, slot_mapping, cache)


def rope_kv_cache_insert(
    kv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    compress_ratio: int = 1,
) -> None:
    """Rotate the last 64 columns of latent rows, then :func:`kv_cache_insert`, in one launch.

    The pairs are interleaved: columns ``2i`` and ``2i + 1`` of the 64 become
    ``even * cos - odd * sin`` and ``even * sin + odd * cos``, in float32, each product rounded.
    The result is rounded to the dtype of ``kv``, then encoded.

    Args:
        kv: ``[T, 512]`` bfloat16 or float32, any row stride, not rotated yet. float32 rows are
            encoded as they are, without a rounding to bfloat16 but for what the record holds as
            bfloat16.
        positions: ``[T]`` int32 or int64, of the token that closes the row's state (or, of ratio
            1, of the token itself); what is applied is that of its group's first token,
            ``positions // compress_ratio * compress_ratio``. Below 0 or without a row in
            ``cos_sin``: no write.
        cos_sin: ``[num_positions, 64]`` float32, any row stride: 32 cosines, then 32 sines.
        slot_mapping: ``[T]`` int32 or int64, as in :func:`kv_cache_insert`.
        cache: As in :func:`kv_cache_insert`. Written: the bytes of the named rows only.
        compress_ratio: Tokens per state, at least 1.

    Raises:
        ValueError: An argument breaks the shapes, dtypes, strides or ranges above.
    """
    _call("rope_kv_cache_insert", kv, positions, cos_sin, slot_mapping, cache, compress_ratio)


def compress_kv(
    kv: Tensor,
    score: Tensor | None,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    norm_weight: Tensor,
    ring_slots: Tensor | None,
    ring: Tensor | None,
    compress_ratio: int,
    eps: float = 1e-20,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Latent of the group of tokens that each token closes, across steps.

    Of ratio 1 every token is a group: ``latent = kv * rsqrt(mean(kv^2) + eps) * norm_weight``. Of
    ratio 2 a token at an odd position closes one with the token before it, and the same norm is
    taken of ``sum kv * softmax(score)`` over the two, per column. The token before is in this step
    or in the request's ring, which then gets the newest rows of this step: after rejected drafts
    the next step just begins at an earlier position.

    Args:
        kv: ``[T, 512]`` float32, any row stride.
        score: ``[T, 512]`` float32, any row stride, of ratio 2; None of ratio 1.
        query_start_loc: ``[R + 1]`` int32, as in :func:`token_to_request`.
        seq_lens: ``[R]`` int32, tokens of each request after this step.
        norm_weight: ``[512]`` float32 or bfloat16.
        ring_slots: ``[R]`` int32 or int64, each request's row of the ring, unique among those with
            tokens; None of ratio 1. One below 0 or past the ring is neither read nor written: a
            first token at an odd position is then pooled alone.
        ring: ``[rows, capacity, 2, 512]`` float32, the last three dimensions dense: kv and score of
            the token at ``position % capacity``; None of ratio 1. Written: the newest ``capacity``
            tokens of each request. The capacity is a power of two, at least 2 more than the tokens
            that may be rejected.
        compress_ratio: Tokens per group, 1 or 2.
        eps: Added to the mean of squares.
        out_dtype: ``torch.float32``, or bfloat16, which None stands for.

    Returns:
        ``[T, 512]``; zeros for a token that closes no group: padding, a negative position, or of
        ratio 2 an even one. A NaN stays in its group, and so does what two equal infinite scores
        make.

    Raises:
        ValueError: An argument breaks the shapes, dtypes or strides above, or ``score``,
            ``ring_slots`` and ``ring`` do not go with the ratio.
    """
    if ring is None and compress_ratio == 1 and isinstance(kv, Tensor):
        # Inductor fails where the one argument that an op writes is None and it has a result.
        ring = kv.new_empty((0, 2, 2, HEAD_DIM))
    result: Tensor = _call(
        "compress_kv",
        kv,
        score,
        query_start_loc,
        seq_lens,
        norm_weight,
        ring_slots,
        ring,
        compress_ratio,
        eps,
        out_dtype,
    )
    return result


def indexer_k_insert(
    k: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    compress_ratio: int = 1,
    eps: float = 1e-20,
) -> None:
    """Norm, rotate and encode index keys into their paged cache, in place.

    ``key = rope(k * rsqrt(mean(k^2) + eps) * norm_weight)``, with the last 64 columns rotated as in
    :func:`rope_kv_cache_insert`, in float32 up to the record's own codes. :func:`new_index_cache`
    allocates a cache.

    Args:
        k: ``[T, 128]`` float32 or bfloat16, any row stride: the key's projection of a latent.
        norm_weight: ``[128]`` float32 or bfloat16.
        positions: ``[T]`` int32 or int64, of the token that closes the key's group; the key is
            rotated to the group's first token, ``positions // compress_ratio * compress_ratio``.
            Below 0 or without a row in ``cos_sin``: no write.
        cos_sin: ``[num_positions, 64]`` float32, any row stride: 32 cosines, then 32 sines.
        slot_mapping: ``[T]`` int32 or int64 slots ``page * page_size + row``. Below 0 or past the
            cache means no write. Slots of one call are unique; of duplicates one row is left,
            possibly torn.
        cache: ``[pages, page_size, bytes]`` uint8, any page stride, 132 bytes (fp8) or 68 (mxfp4).
            Written: the bytes of the named rows only.
        compress_ratio: Tokens per group, at least 1.
        eps: Added to the mean of squares.

    Raises:
        ValueError: An argument breaks the shapes, dtypes, strides or ranges above.
    """
    _call(
        "indexer_k_insert",
        k,
        norm_weight,
        positions,
        cos_sin,
        slot_mapping,
        cache,
        compress_ratio,
        eps,
    )


def indexer_topk(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk: int,
    compress_ratio: int,
    candidate_blocks: Tensor | None = None,
    num_candidate_blocks: int = 0,
    candidate_block_size: int = 8,
    dcp_world_size: int = 1,
    dcp_rank: int = 0,
    cp_interleave: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Score the states that each token may see, and select the best.

    ``score(s) = sum_h weights[h] * relu(q[h] . k[s])`` in float32, for the states
    ``s < (position + 1) // compress_ratio`` that have a page. Of them the ``topk`` of best score
    are selected, of equal scores those of lower number; NaN is never selected.

    Args:
        q: ``[T, H, 128]`` bfloat16, rotated, H from 1 to 64, last dimension contiguous.
        weights: ``[T, H]`` float32, scaled (``128**-0.5 * H**-0.5`` in the release).
        cache: Index keys, see :func:`indexer_k_insert`; ``cache.shape[1]`` states per page.
        query_start_loc: ``[R + 1]`` int32.
        seq_lens: ``[R]`` int32, lengths after this step.
        block_table: ``[rows, P]`` int32, any row stride; -1: no page, its states are absent.
        topk: 1 to 2048.
        compress_ratio: Tokens per state, at least 1.
        candidate_blocks: ``[T, C']`` int32, C' up to 2048, in any order, or None. Only states of
            these blocks are looked at; -1 is none. No block twice in a row.
        num_candidate_blocks: ``C``, 0 to 2048. Above 0 also the best ``C`` blocks are returned: a
            block's score is its best state's; that of the newest visible state's block is +inf.
        candidate_block_size: States of a block, 1 to 128.
        dcp_world_size: DCP ranks. This one looks at the states it owns; numbers stay global.
        dcp_rank: This rank.
        cp_interleave: States in one run of a rank; divides ``cache.shape[1]`` under DCP.

    Returns:
        topk_indices ``[T, topk]`` int32, ascending, -1 beyond; their scores float32, -inf beyond;
        and alike the candidate blocks and their scores, ``[T, C]``. :func:`merge_topk` merges
        those of several ranks.

    Raises:
        ValueError: An argument breaks the shapes, dtypes, strides or ranges above.
    """
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _call(
        "indexer_topk",
        q,
        weights,
        cache,
        query_start_loc,
        seq_lens,
        block_table,
        topk,
        compress_ratio,
        candidate_blocks,
        num_candidate_blocks,
        candidate_block_size,
        dcp_world_size,
        dcp_rank,
        cp_interleave,
    )
    return result


def merge_topk(indices: Tensor, scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Merge the selections of several ranks: the best of all, ties to the lower number.

    Ranks' lists of at least ``topk`` states or blocks give what one rank would have selected,
    bit for bit.

    Args:
        indices: ``[N, T, K]`` int32 numbers of states or blocks, any K; -1: no entry. A number of
            several ranks (a block, of which each owns some states) is one entry.
        scores: ``[N, T, K]`` float32; the largest of a number counts. NaN: no entry.
        topk: 1 to 2048.

    Returns:
        indices ``[T, topk]`` int32, ascending, -1 beyond; scores ``[T, topk]`` float32, -inf
        beyond.

    Raises:
        ValueError: An argument breaks the shapes, dtypes, strides or ranges above.
    """
    result: tuple[Tensor, Tensor] = _call("merge_topk", indices, scores, topk)
    return result


def kv_cache_gather(cache: Tensor, slots: Tensor) -> Tensor:
    """Decode rows of a paged cache.

    Args:
        cache: As in :func:`kv_cache_insert`; only read.
        slots: ``[N]`` int32 or int64 slots ``page * page_size + row``.

    Returns:
        ``[N, 512]`` bfloat16, exact; zeros for a slot below 0 or past the cache.

    Raises:
        ValueError: An argument breaks the shapes, dtypes or strides above.
    """
    result: Tensor = _call("kv_cache_gather", cache, slots)
    return result


def sparse_mla_decode(
    q: Tensor,
    swa_cache: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    cache: Tensor | None = None,
    topk_indices: Tensor | None = None,
    topk_lens: Tensor | None = None,
    attn_sink: Tensor | None = None,
    softmax_scale: float = HEAD_DIM**-0.5,
    batch_invariant: bool = False,
    backend: str = "auto",
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sparse MLA: one softmax over a token's window rows and its selected compressed rows.

    A cached row is both key and value. ``lse = log sum exp(scale * q . k)`` (natural logarithm,
    without the sink) and ``out = sum softmax * v / (1 + exp(sink - lse))``. Decode and prompt
    tokens mix freely: rows do not depend on each other.

    Args:
        q: ``[T, H, 512]`` bfloat16, H from 1 to 128, last dimension contiguous.
        swa_cache: Window cache, any record; see :func:`kv_cache_insert`.
        swa_indices: ``[T, W]`` int32 slots in ``swa_cache``. One below 0 or past the cache is
            skipped and never read.
        swa_lens: ``[T]`` int32; entries past it are never looked at. Clamped to ``0 .. W``.
        cache: Compressed cache, any record, or None with the next two for window-only layers.
        topk_indices: ``[T, K]`` int32 slots in ``cache``, as ``swa_indices``.
        topk_lens: ``[T]`` int32, as ``swa_lens``.
        attn_sink: ``[H]`` float32 logits that join the denominator only, or None. -inf has no
            effect, +inf gives 0.
        softmax_scale: Multiplies ``q . k``.
        batch_invariant: True: a row's bits depend on its own inputs and the static widths only,
            not on T or its neighbours.
        backend: On CUDA, who computes it: ``auto``, the fastest that can, or one that
            :func:`backends` lists, which runs or raises. On a CPU ``auto`` is the only one.
        positions: ``[T]`` int32 or int64, of the queries, or None with the next: the last 64
            columns of ``out`` are rotated back by these, in float32, before ``out`` is rounded. One
            below 0 or without a row in ``cos_sin`` leaves its token's as they are.
        cos_sin: ``[num_positions, 64]`` float32, as in :func:`rope_kv_cache_insert`.

    Returns:
        out ``[T, H, 512]`` bfloat16 and lse ``[T, H]`` float32, both contiguous. A token without
        a visible row: 0 and -inf.

    Raises:
        ValueError: An argument breaks the shapes, dtypes or strides above, or only some of
            ``cache``, ``topk_indices`` and ``topk_lens``, or of ``positions`` and ``cos_sin``, are
            given.
        UnsupportedError: The named backend cannot serve this call here; the message says why.
    """
    result: tuple[Tensor, Tensor] = _call(
        "sparse_mla_decode",
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
        backend,
        positions,
        cos_sin,
    )
    return result


def sparse_mla_decode_out(
    q: Tensor,
    swa_cache: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    cache: Tensor | None = None,
    topk_indices: Tensor | None = None,
    topk_lens: Tensor | None = None,
    attn_sink: Tensor | None = None,
    softmax_scale: float = HEAD_DIM**-0.5,
    batch_invariant: bool = False,
    backend: str = "auto",
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    *,
    out: Tensor,
    lse: Tensor,
) -> None:
    """:func:`sparse_mla_decode` into a caller's buffers.

    Args:
        out: ``[>= T, H, 512]`` bfloat16, last dimension contiguous; rows past T are left alone.
        lse: ``[>= T, H]`` float32; rows past T are left alone. The others are as in the
            functional form.
    """
    _call(
        "sparse_mla_decode_out",
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
        backend,
        positions,
        cos_sin,
        out=out,
        lse=lse,
    )


def merge_attention_states(
    outs: Tensor, lses: Tensor, attn_sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge partial attention results of several ranks, then apply the sink once.

    ``LSE = log sum exp(lse_i)``, ``out = sum exp(lse_i - LSE) * out_i / (1 + exp(sink - LSE))``.

    Args:
        outs: ``[N, T, H, 512]`` bfloat16 or float32, each computed without a sink.
        lses: ``[N, T, H]`` float32, natural logarithm. -inf: the rank had no row; its ``out`` is
            ignored, even NaN.
        attn_sink: ``[H]`` float32 or None, as in :func:`sparse_mla_decode`.

    Returns:
        out ``[T, H, 512]`` in the dtype of ``outs`` and lse ``[T, H]`` float32 without the sink.
        All ranks empty: 0 and -inf. One non-empty rank, no sink: its rows, bit for bit.

    Raises:
        ValueError: An argument breaks the shapes, dtypes or strides above.
    """
    result: tuple[Tensor, Tensor] = _call("merge_attention_states", outs, lses, attn_sink)
    return result
