"""Public functions: all indices of a step in one launch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dsv41ops.api.call import call


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
        *call(
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
    call(
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
