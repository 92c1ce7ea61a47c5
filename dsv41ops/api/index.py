"""Public functions: which request a token is of, and which slots and rows it has."""

from __future__ import annotations

from torch import Tensor

from dsv41ops.api.call import call


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
    result: Tensor = call("token_to_request", query_start_loc, num_tokens)
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
    result: Tensor = call(
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
    call(
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
    result: Tensor = call(
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
    result: tuple[Tensor, Tensor] = call(
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
    call(
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
    result: tuple[Tensor, Tensor] = call(
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
    call(
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
