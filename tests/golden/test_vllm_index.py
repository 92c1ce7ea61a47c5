"""Index ops against vLLM's kernels. What differs on purpose is undone here, on vLLM's side:

padding is -1, not request 0; top-k rows are packed; a number that its token may not see yet is
dropped (vLLM never looks); draft-window and top-k rows past the real tokens are all -1; ranks
write only the states they own, where vLLM relies on another rank's token having slot -1, and the
interleave counts states where vLLM counts tokens.
"""

from __future__ import annotations

import pytest
import torch

import dsv41ops
from tests.golden.npz import Golden
from tests.oracles import Shard, packed, positions

FILES = range(5)


@pytest.fixture(params=FILES)
def golden(request: pytest.FixtureRequest, device: torch.device) -> Golden:
    return Golden(f"vllm_index_{request.param}", device)


def batch(golden: Golden) -> tuple[torch.Tensor, torch.Tensor]:
    return golden.tensor("query_start_loc"), golden.tensor("seq_lens")


def sizes(golden: Golden) -> tuple[int, int]:
    return int(golden.scalar("num_tokens")), int(golden.scalar("padded_tokens"))


def interleave_in_states(golden: Golden) -> int:
    """An interleave of one token stays one state; every other recorded one is a whole number."""
    tokens, ratio = int(golden.scalar("cp_interleave_tokens")), int(golden.scalar("compress_ratio"))
    return max(tokens // ratio, 1)


def test_token_to_request(golden: Golden) -> None:
    real, padded = sizes(golden)
    owners = dsv41ops.token_to_request(golden.tensor("query_start_loc"), padded).tolist()
    assert owners[:real] == golden.lists("token_to_req")[:real]
    assert owners[real:] == [-1] * (padded - real)


def test_compressed_slot_mapping(golden: Golden, device: torch.device) -> None:
    real, padded = sizes(golden)
    recorded = golden.lists("compressed_slot_mapping")
    ratio = int(golden.scalar("compress_ratio"))
    slot_mapping = torch.full((padded,), -1, dtype=torch.int64, device=device)
    slot_mapping[:real] = golden.tensor("slot_mapping")
    ranks = Shard(int(golden.scalar("dcp_world_size")), 0, interleave_in_states(golden)).ranks()
    by_rank = [
        dsv41ops.compressed_slot_mapping(
            *batch(golden),
            golden.tensor("block_table"),
            padded,
            int(golden.scalar("states_per_page")),
            ratio,
            slot_mapping,
            **shard.kwargs(),
        ).tolist()
        for shard in ranks
    ]
    # Random slots were recorded, so every rank's local slot stands in one list.
    for token, slots in enumerate(zip(*by_rank, strict=True)):
        owned = [slot for slot in slots if slot != -1]
        assert len(owned) <= 1
        assert (owned or [-1]) == [recorded[token]]
    places = positions(golden.lists("query_start_loc"), golden.lists("seq_lens"), padded)
    for shard, slots in zip(ranks, by_rank, strict=True):
        for place, slot in zip(places, slots, strict=True):
            assert slot == -1 or (place is not None and shard.owns(place[1] // ratio))


def test_window(golden: Golden) -> None:
    _, padded = sizes(golden)
    indices, lens = dsv41ops.sliding_window_indices(
        *batch(golden),
        golden.tensor("swa_block_table"),
        padded,
        int(golden.scalar("swa_page_size")),
        window=int(golden.scalar("window")),
        replay_start=golden.tensor("replay_start"),
    )
    assert indices.tolist() == golden.lists("swa_indices")
    assert lens.tolist() == golden.lists("swa_lens")


def test_draft_window(golden: Golden) -> None:
    real, padded = sizes(golden)
    width = int(golden.scalar("dspark_width"))
    indices, lens = dsv41ops.sliding_window_indices(
        *batch(golden),
        golden.tensor("swa_block_table"),
        padded,
        int(golden.scalar("swa_page_size")),
        window=int(golden.scalar("window")),
        width=width,
        causal=False,
    )
    assert indices[:real].tolist() == golden.lists("dspark_indices")[:real]
    assert lens[:real].tolist() == golden.lists("dspark_lens")[:real]
    assert indices[real:].tolist() == [[-1] * width] * (padded - real)
    assert lens[real:].tolist() == [0] * (padded - real)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_topk_to_slots(golden: Golden, dtype: torch.dtype, device: torch.device) -> None:
    real, padded = sizes(golden)
    topk, query_start_loc = golden.lists("topk_local"), golden.lists("query_start_loc")
    recorded, recorded_lens = golden.lists("topk_slots")[:real], golden.lists("topk_lens")[:real]
    page_size, width = int(golden.scalar("topk_page_size")), len(topk[0])

    def slots(seq_lens: torch.Tensor) -> tuple[list, list]:
        indices, lens = dsv41ops.topk_to_slots(
            golden.tensor("topk_local").to(dtype),
            golden.tensor("query_start_loc"),
            seq_lens,
            golden.tensor("block_table"),
            page_size,
            1,
        )
        assert indices[real:].tolist() == [[-1] * width] * (padded - real)
        assert lens[real:].tolist() == [0] * (padded - real)
        return indices[:real].tolist(), lens[:real].tolist()

    everything_visible = torch.full_like(golden.tensor("seq_lens"), 1 << 20)
    assert slots(everything_visible) == ([packed(row, width)[0] for row in recorded], recorded_lens)

    seen = []
    for token, place in enumerate(positions(query_start_loc, golden.lists("seq_lens"), real)):
        assert place is not None
        pairs = zip(topk[token], recorded[token], strict=True)
        seen.append(packed([slot for state, slot in pairs if state <= place[1]], width))
    assert slots(golden.tensor("seq_lens")) == ([row for row, _ in seen], [n for _, n in seen])
