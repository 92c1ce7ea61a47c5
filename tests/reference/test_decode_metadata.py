"""The fused op: by hand, and equal to the single ops on every kind of batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dsv41ops
from tests import oracles
from tests.oracles import Shard
from tests.reference.test_properties import Batch, batches
from tests.support import assert_same_bits, ints

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE, PAGE = 16, 8


def test_by_hand(device: torch.device) -> None:
    """Position 9 alone, positions 2 to 4, an empty request, a padding token."""
    metadata = dsv41ops.decode_metadata(
        ints([0, 1, 4, 4], device),
        ints([10, 5, 0], device),
        num_tokens=5,
        swa_block_table=ints([[3, 1], [0, 6], [7, 7]], device),
        swa_page_size=8,
        block_table_c1a=ints([[2], [5], [7]], device),
        block_table_c2a=ints([[4], [1], [7]], device),
        block_size=16,
        window=3,
    )
    assert {name: tensor.tolist() for name, tensor in metadata._asdict().items()} == {
        "req_id_per_token": [0, 1, 1, 1, -1],
        "positions": [9, 2, 3, 4, -1],
        "swa_slot_mapping": [9, 2, 3, 4, -1],
        "swa_indices": [[31, 8, 9], [0, 1, 2], [1, 2, 3], [2, 3, 4], [-1, -1, -1]],
        "swa_lens": [3, 3, 3, 3, 0],
        "compressed_slot_mapping_c1a": [41, 82, 83, 84, -1],
        "compressed_slot_mapping_c2a": [36, -1, 9, -1, -1],
        "dcp_local_seq_lens_c1a": [10, 5, 0],
        "dcp_local_seq_lens_c2a": [5, 2, 0],
    }


def test_what_is_absent_is_empty(device: torch.device) -> None:
    batch = ints([0, 1, 4], device), ints([10, 5], device), 5
    table = ints([[3, 1], [0, 6]], device)
    alone = dsv41ops.decode_metadata(*batch)
    assert alone.positions.tolist() == [9, 2, 3, 4, -1]
    assert alone.swa_indices.shape == (0, 128)
    assert [len(tensor) for tensor in alone] == [5, 5, 0, 0, 0, 0, 0, 0, 0]
    for kind, lengths in (
        ("swa", [5, 5, 5, 5, 5, 0, 0, 0, 0]),
        ("c1a", [5, 5, 0, 0, 0, 5, 0, 2, 0]),
        ("c2a", [5, 5, 0, 0, 0, 0, 5, 0, 2]),
    ):
        name, size = f"block_table_{kind}", "block_size"
        if kind == "swa":
            name, size = "swa_block_table", "swa_page_size"
        metadata = dsv41ops.decode_metadata(*batch, **{name: table, size: 8})
        assert [len(tensor) for tensor in metadata] == lengths


def single_ops(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    tables: tuple[Tensor, Tensor, Tensor],
    shards: tuple[Shard, Shard],
    slot_mapping: Tensor | None,
    window: dict[str, Any],
) -> list[Tensor]:
    """All but the positions, each by its own op."""
    batch = query_start_loc, seq_lens
    swa, *compressed = tables
    found = [
        dsv41ops.token_to_request(query_start_loc, num_tokens),
        dsv41ops.compressed_slot_mapping(*batch, swa, num_tokens, PAGE, 1),
        *dsv41ops.sliding_window_indices(*batch, swa, num_tokens, PAGE, **window),
    ]
    ratios = (1, 2)
    for ratio, table, shard in zip(ratios, compressed, shards, strict=True):
        found.append(
            dsv41ops.compressed_slot_mapping(
                *batch,
                table,
                num_tokens,
                BLOCK_SIZE // ratio,
                ratio,
                slot_mapping,
                **shard.kwargs(),
            )
        )
    for ratio, shard in zip(ratios, shards, strict=True):
        found.append(dsv41ops.dcp_local_seq_lens(seq_lens, ratio, **shard.kwargs()))
    return found


WINDOWS = [
    {"window": 5},
    {"window": 1, "width": 7},
    {"window": 5, "width": 64, "causal": False},
    {"window": 5, "width": 3, "causal": False},
]
INTERLEAVES = st.sampled_from([(1, 1), (2, 1), (8, 4), (16, 8), (4, 4)])


@given(data=st.data(), batch=batches(), window=st.sampled_from(WINDOWS), interleaves=INTERLEAVES)
def test_equals_the_single_ops(
    data: st.DataObject,
    batch: Batch,
    window: dict[str, Any],
    interleaves: tuple[int, int],
    device: torch.device,
) -> None:
    query_start_loc, seq_lens, table = batch.tensors(device)
    num_tokens = batch.num_tokens
    tables = table, table.flip(1), table.flip(0)
    world = data.draw(st.integers(1, 3))
    rank = data.draw(st.integers(0, world - 1))
    shards = tuple(Shard(world, rank, each) for each in interleaves)
    slot_mapping = None
    if data.draw(st.booleans()):
        dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
        slots = data.draw(st.lists(st.integers(-1, 1), min_size=num_tokens, max_size=num_tokens))
        slot_mapping = ints(slots, device, dtype)
    if data.draw(st.booleans()):
        count = len(batch.seq_lens)
        starts = data.draw(st.lists(st.integers(-3, 30), min_size=count, max_size=count))
        window = {**window, "replay_start": ints(starts, device)}
    metadata = dsv41ops.decode_metadata(
        query_start_loc,
        seq_lens,
        num_tokens,
        tables[0],
        PAGE,
        *tables[1:],
        BLOCK_SIZE,
        **window,
        slot_mapping=slot_mapping,
        dcp_world_size=world,
        dcp_rank=rank,
        cp_interleave_c1a=interleaves[0],
        cp_interleave_c2a=interleaves[1],
    )
    positions = metadata.positions.tolist()
    places = oracles.positions(batch.query_start_loc, batch.seq_lens, num_tokens)
    assert positions == [-1 if place is None else place[1] for place in places]
    expected = single_ops(
        query_start_loc, seq_lens, num_tokens, tables, shards, slot_mapping, window
    )
    for mine, single in zip((metadata[0], *metadata[2:]), expected, strict=True):
        assert_same_bits(mine, single)


@pytest.mark.parametrize("present", [True, False])
def test_buffers_are_filled_whole(present: bool, device: torch.device) -> None:
    """Past the tokens and requests, and everywhere for a cache that is absent."""
    table = ints([[3, 1], [0, 6]], device) if present else None
    arguments = (ints([0, 1, 4], device), ints([10, 5], device), 5, table, 8, table, table, 16, 3)
    buffers = {
        name: torch.full((9, *tensor.shape[1:]), 77, dtype=tensor.dtype, device=device)
        for name, tensor in dsv41ops.decode_metadata(*arguments)._asdict().items()
    }
    assert dsv41ops.decode_metadata_out(*arguments, **buffers) is None
    for name, expected in dsv41ops.decode_metadata(*arguments)._asdict().items():
        assert torch.equal(buffers[name][: len(expected)], expected), name
        assert bool((buffers[name][len(expected) :] == (0 if "lens" in name else -1)).all()), name
