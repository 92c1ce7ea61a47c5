"""What all layers of a step share, derived on the device from the batch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dsv41ops import api
from dsv41ops.nn.rope import StepRope, step_rope


class StepMetadata(NamedTuple):
    """A step as the layers see it; made by :func:`step_metadata` and only read.

    Absent caches have None for a block table and slots without rows.
    """

    query_start_loc: Tensor  # [R + 1] int32
    seq_lens: Tensor  # [R] int32, after this step
    request_slots: Tensor | None  # [R] int32 or int64, row of the ratio-2 rings
    req_id_per_token: Tensor  # [T] int32, -1 for padding
    positions: Tensor  # [T] int64, -1 for padding
    swa_slots: Tensor  # [T] int64 window row of the token itself, -1: none
    swa_indices: Tensor  # [T, W] int32
    swa_lens: Tensor  # [T] int32
    block_table_c1a: Tensor | None  # [R, P] int32
    block_table_c2a: Tensor | None  # [R, P] int32
    state_slots_c1a: Tensor  # [T] int64, -1: closes no state
    state_slots_c2a: Tensor  # [T] int64
    rope: StepRope  # of layers without a compressed cache
    compressed_rope: StepRope | None  # of all others

    def block_table(self, compress_ratio: int) -> Tensor:
        """Pages of the compressed caches of one ratio."""
        table = self.block_table_c1a if compress_ratio == 1 else self.block_table_c2a
        if table is None:
            raise ValueError(
                f"metadata: expected block_table_c{compress_ratio}a for a layer of compress ratio "
                f"{compress_ratio}, got None"
            )
        return table

    def state_slots(self, compress_ratio: int) -> Tensor:
        """Slots of the states that tokens close, in the compressed caches of one ratio."""
        self.block_table(compress_ratio)  # without one there are no slots either
        return self.state_slots_c1a if compress_ratio == 1 else self.state_slots_c2a

    def rope_of(self, compress_ratio: int) -> StepRope:
        """The RoPE base of layers of one ratio."""
        rope = self.rope if compress_ratio == 0 else self.compressed_rope
        if rope is None:
            raise ValueError(
                "metadata: expected compressed_cos_sin for a layer of compress ratio "
                f"{compress_ratio}, got None"
            )
        return rope


def step_metadata(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    swa_block_table: Tensor,
    swa_page_size: int,
    cos_sin: Tensor,
    block_table_c1a: Tensor | None = None,
    block_table_c2a: Tensor | None = None,
    block_size: int | None = None,
    compressed_cos_sin: Tensor | None = None,
    request_slots: Tensor | None = None,
    window: int = 128,
    width: int | None = None,
    causal: bool = True,
) -> StepMetadata:
    """Metadata of a step, by one :func:`dsv41ops.decode_metadata` and the rows of both RoPE tables.

    Args:
        query_start_loc: ``[R + 1]`` int32; request r owns the tokens ``query_start_loc[r] ..
            query_start_loc[r + 1] - 1``, tokens past the last are padding.
        seq_lens: ``[R]`` int32, tokens of each request after this step.
        num_tokens: ``T``, padding included.
        swa_block_table: ``[R, P]`` int32 pages of the window caches, -1: none.
        swa_page_size: Rows in one page of them.
        cos_sin: ``[num_positions, 64]`` float32 :func:`rope_table` of ratio-0 layers.
        block_table_c1a: ``[R, P]`` int32 pages of the ratio-1 caches, or None without such layers.
        block_table_c2a: The same of the ratio-2 caches.
        block_size: Tokens (not states) in one page of them; given with either.
        compressed_cos_sin: As ``cos_sin``, of layers with a compressed cache.
        request_slots: ``[R]`` int32 or int64 row of each request in the rings of ratio-2 kv
            sources, unique among requests with tokens; below 0 or past the ring: none.
        window: Positions that a token sees, itself included.
        width: ``W``, columns of the window indices; None: ``window``.
        causal: False for draft blocks, whose ``width`` must be given.

    Returns:
        A :class:`StepMetadata`.

    Raises:
        ValueError: An argument breaks the shapes, dtypes, strides or ranges above.
    """
    shared = api.decode_metadata(
        query_start_loc,
        seq_lens,
        num_tokens,
        swa_block_table=swa_block_table,
        swa_page_size=swa_page_size,
        block_table_c1a=block_table_c1a,
        block_table_c2a=block_table_c2a,
        block_size=block_size,
        window=window,
        width=width,
        causal=causal,
    )
    compressed_rope = None
    if compressed_cos_sin is not None:
        compressed_rope = step_rope(compressed_cos_sin, shared.positions)
    return StepMetadata(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        request_slots=request_slots,
        req_id_per_token=shared.req_id_per_token,
        positions=shared.positions,
        swa_slots=shared.swa_slot_mapping,
        swa_indices=shared.swa_indices,
        swa_lens=shared.swa_lens,
        block_table_c1a=block_table_c1a,
        block_table_c2a=block_table_c2a,
        state_slots_c1a=shared.compressed_slot_mapping_c1a,
        state_slots_c2a=shared.compressed_slot_mapping_c2a,
        rope=step_rope(cos_sin, shared.positions),
        compressed_rope=compressed_rope,
    )
