"""Builders and ops together: DCP ranks over their own caches give what one rank gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import dsv41ops
from dsv41ops.backend import (
    CommonAttentionMetadata,
    DCPGeometry,
    FlashMLASparseDSV41MetadataBuilder,
    SlidingWindowMetadataBuilder,
)
from tests.backend.batches import make_batch

HEADS = 2
TOPK = 16
BLOCK_SIZE = 16
PAGE = 8
WINDOW = 24
PAGES = 100  # make_batch draws page numbers below 2 * 4 requests * 12 pages + 1
CAPACITY = 128
QUERY_LENS, SEQ_LENS = [1, 4, 0, 9], [50, 33, 0, 9]
DRAFTS = 4


def engine_slots(batch: CommonAttentionMetadata, rows: int, dcp: DCPGeometry) -> Tensor:
    """An engine's own token slots: with ``dcp``, only this rank's."""
    return dsv41ops.compressed_slot_mapping(
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_table_tensor,
        len(batch.slot_mapping),
        rows,
        1,
        **vars(dcp),
    )


def step(
    ratio: int, causal: bool, dcp: DCPGeometry, device: torch.device, query_lens: list[int]
) -> tuple[Tensor, Tensor]:
    """One rank: cache everything in a first step of whole prompts, then attend with ``query_lens``.

    Without a sink, so that ranks can be merged.
    """
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(sum(SEQ_LENS), 512, generator=generator).bfloat16().to(device)
    torch.manual_seed(1)  # the same pages on every rank
    prompts = make_batch(SEQ_LENS, SEQ_LENS, device=device)
    window_prompts = make_batch(SEQ_LENS, SEQ_LENS, device=device)
    builder = FlashMLASparseDSV41MetadataBuilder(
        block_size=BLOCK_SIZE,
        compress_ratio=ratio,
        max_num_batched_tokens=CAPACITY,
        index_topk=TOPK,
        dcp=dcp,
        device=device,
    )
    window_builder = SlidingWindowMetadataBuilder(
        max_num_batched_tokens=CAPACITY,
        compress_ratios=[0, ratio],
        block_size=BLOCK_SIZE,
        index_topk=TOPK,
        page_size=PAGE,
        window=WINDOW,
        num_speculative_tokens=DRAFTS,
        dcp=dcp,
        device=device,
    )

    # The compressed cache's slots follow DCP, the window's do not.
    prompts = replace(prompts, slot_mapping=engine_slots(prompts, BLOCK_SIZE, dcp))
    window_prompts = replace(
        window_prompts, slot_mapping=engine_slots(window_prompts, PAGE, DCPGeometry())
    )
    window_cache = dsv41ops.new_kv_cache(PAGES, PAGE, "bf16", device)
    cache = dsv41ops.new_kv_cache(PAGES, BLOCK_SIZE // ratio, "bf16", device)
    # A state is, for this test, the latent of the token that closes it.
    dsv41ops.kv_cache_insert(
        latents, window_builder.build(window_prompts).slot_mapping, window_cache
    )
    dsv41ops.kv_cache_insert(latents, builder.build(prompts).slot_mapping, cache)

    batch = make_batch(query_lens, SEQ_LENS, causal=causal, device=device)
    metadata = builder.build(replace(batch, block_table_tensor=prompts.block_table_tensor))
    plan = window_builder.build(
        replace(batch, block_table_tensor=window_prompts.block_table_tensor)
    ).plan(ratio)
    num_tokens = sum(query_lens)
    selected = torch.stack(
        [torch.randperm(25, generator=generator)[:TOPK] for _ in range(num_tokens)]
    )
    assert plan.states_per_page is not None
    assert metadata.seq_lens is not None
    slots, lens = dsv41ops.topk_to_slots(
        selected.to(device),
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.block_table,
        plan.states_per_page,
        ratio,
        dcp.dcp_world_size,
        dcp.dcp_rank,
        metadata.cp_kv_cache_interleave_size,
    )
    q = torch.randn(num_tokens, HEADS, 512, generator=generator).bfloat16().to(device)
    return dsv41ops.sparse_mla_decode(
        q, window_cache, plan.swa_indices, plan.swa_lens, cache, slots, lens, softmax_scale=0.05
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (3, 4)])
def test_ranks_merge_to_one(
    world: int, interleave: int, ratio: int, causal: bool, device: torch.device
) -> None:
    query_lens = QUERY_LENS if causal else [1, 4, 0, 5]
    single_out, single_lse = step(ratio, causal, DCPGeometry(), device, query_lens)
    ranks = [
        step(ratio, causal, DCPGeometry(world, rank, interleave), device, query_lens)
        for rank in range(world)
    ]
    outs = torch.stack([out for out, _ in ranks])
    lses = torch.stack([lse for _, lse in ranks])
    assert torch.isfinite(single_lse).all()
    assert not torch.allclose(lses[0], single_lse, atol=1e-3)  # the other ranks do contribute
    out, lse = dsv41ops.merge_attention_states(outs, lses)
    torch.testing.assert_close(lse, single_lse, rtol=1e-5, atol=1e-5)
    # Each partial result is rounded to bf16 once, the merged one once more.
    torch.testing.assert_close(out.float(), single_out.float(), rtol=0.02, atol=0.01)
