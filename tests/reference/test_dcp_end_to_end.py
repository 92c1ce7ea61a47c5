"""Decode context parallelism through every op: the ranks' merge is the single rank's answer.

C18 and C20 as a system: ownership must be the same rule in slot mapping, local lengths and top-k,
and the sink must join after the merge.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dsv41ops
from tests.oracles import ONE_RANK, Shard
from tests.support import HEAD_DIM, assert_attention_close, assert_same_bits, ints

pytestmark = pytest.mark.usefixtures("one_thread")

QUERY_START_LOC, SEQ_LENS = [0, 70, 70, 71, 101], [70, 31, 1, 30]  # whole prompts; one is absent
NUM_TOKENS, HEADS, STATES_PER_PAGE = 103, 4, 8


def fill_cache(rows: Tensor, ratio: int, shard: Shard) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's cache, its block table, and the slot of every token."""
    device = rows.device
    table = torch.randperm(4 * 9, device=device).to(torch.int32).view(4, 9)
    cache = dsv41ops.new_kv_cache(4 * 9, STATES_PER_PAGE, "nvfp4", device)
    slots = dsv41ops.compressed_slot_mapping(
        ints(QUERY_START_LOC, device),
        ints(SEQ_LENS, device),
        table,
        NUM_TOKENS,
        STATES_PER_PAGE,
        ratio,
        **shard.kwargs(),
    )
    dsv41ops.kv_cache_insert(rows, slots, cache)
    return cache, table, slots


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("interleave", [1, 4, 8])
@pytest.mark.parametrize("ratio", [1, 2])
def test_ranks_together_are_one_rank(
    ratio: int, interleave: int, world: int, device: torch.device
) -> None:
    rows = torch.randn(NUM_TOKENS, HEAD_DIM, device=device).bfloat16()
    q = torch.randn(NUM_TOKENS, HEADS, HEAD_DIM, device=device).bfloat16()
    sink = torch.linspace(1, 4, HEADS, device=device)
    topk = torch.randint(-1, 80, (NUM_TOKENS, 40), dtype=torch.int32, device=device)
    batch = ints(QUERY_START_LOC, device), ints(SEQ_LENS, device)
    empty_window = torch.empty(NUM_TOKENS, 0, dtype=torch.int32, device=device)
    nothing = torch.zeros(NUM_TOKENS, dtype=torch.int32, device=device)

    def decode(shard: Shard, attn_sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        cache, table, slots = fill_cache(rows, ratio, shard)
        local = dsv41ops.dcp_local_seq_lens(
            batch[1], ratio, shard.world, shard.rank, shard.interleave
        )
        assert int((slots >= 0).sum()) == int(local[[0, 2, 3]].sum())
        indices, lens = dsv41ops.topk_to_slots(
            topk, *batch, table, STATES_PER_PAGE, ratio, **shard.kwargs()
        )
        out, lse = dsv41ops.sparse_mla_decode(
            q, cache, empty_window, nothing, cache, indices, lens, attn_sink
        )
        return out, lse, lens

    out, lse, lens = decode(ONE_RANK, sink)
    parts = [decode(shard, None) for shard in Shard(world, 0, interleave).ranks()]
    assert torch.stack([part[2] for part in parts]).sum(0).tolist() == lens.tolist()
    merged, merged_lse = dsv41ops.merge_attention_states(
        torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts]), sink
    )
    # Each rank and the merge round to bf16 once.
    assert_attention_close(merged, merged_lse, out, lse, rtol=1e-2)
    unseen = lens == 0
    assert bool(unseen[-2:].all())
    assert_same_bits(merged[unseen], torch.zeros_like(merged[unseen]))
