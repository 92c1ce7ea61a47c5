"""Properties on generated batches; garbage on the device: no crash and no stray address."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dsv41ops
from tests import oracles
from tests.oracles import Shard
from tests.support import (
    GUARD,
    HEAD_DIM,
    assert_attention_close,
    dense_attention,
    empty_cache,
    ints,
    random_cache,
)

pytestmark = pytest.mark.usefixtures("one_thread")

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
POISON = 1_000_003  # page number outside every generated table


@dataclass(frozen=True)
class Batch:
    """Geometry of one step, plain lists; ``table`` is laid inside a bigger, poisoned one."""

    query_start_loc: list[int]
    seq_lens: list[int]
    table: list[list[int]]
    num_tokens: int
    columns: int

    def lists(self) -> tuple[list[int], list[int], list[list[int]]]:
        return self.query_start_loc, self.seq_lens, self.table

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        rows = len(self.table)
        storage = torch.full((rows + 2, self.columns + 3), POISON, dtype=torch.int32, device=device)
        table = storage[1 : rows + 1, 2 : self.columns + 2]
        if rows and self.columns:
            table.copy_(ints(self.table, device))
        return ints(self.query_start_loc, device), ints(self.seq_lens, device), table


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Empty, padded and dummy requests among real ones; a table that may be short or lack pages."""
    queries = draw(st.lists(st.sampled_from([0, 0, 1, 1, 2, 7]), max_size=5))
    query_start_loc = [0]
    for count in queries:
        query_start_loc.append(query_start_loc[-1] + count)
    seq_lens = [draw(st.integers(0, 60)) for _ in queries]
    columns = draw(st.integers(0, 9))
    rows = draw(st.integers(max(len(queries) - 1, 0), len(queries) + 1))
    pages = iter(draw(st.permutations(range(60))))  # a page belongs to one request
    table = [
        [next(pages) if draw(st.integers(0, 7)) else -1 for _ in range(columns)]
        for _ in range(rows)
    ]
    num_tokens = max(query_start_loc[-1] + draw(st.integers(-2, 4)), 0)
    return Batch(query_start_loc, seq_lens, table, num_tokens, columns)


@st.composite
def garbage(draw: st.DrawFn) -> Batch:
    """Any lengths, any pages, starts that need not even ascend."""
    requests = draw(st.integers(0, 4))
    columns = draw(st.integers(0, 3))
    starts = st.one_of(st.integers(-3, 12), INT32)
    lengths = st.one_of(st.integers(-5, 40), INT32)
    pages = st.one_of(st.integers(-2, 9), INT32)
    return Batch(
        [draw(starts) for _ in range(requests + 1)],
        [draw(lengths) for _ in range(requests)],
        [[draw(pages) for _ in range(columns)] for _ in range(requests)],
        draw(st.integers(0, 12)),
        columns,
    )


STATES_PER_PAGE = st.sampled_from([1, 2, 4, 8])
RATIOS = st.sampled_from([1, 2, 3, 128])


@st.composite
def shards(draw: st.DrawFn, states_per_page: int) -> Shard:
    divisors = [i for i in (1, 2, 4, 8) if states_per_page % i == 0]
    return Shard(draw(st.integers(1, 4)), 0, draw(st.sampled_from(divisors)))


@given(data=st.data(), batch=batches(), states_per_page=STATES_PER_PAGE, ratio=RATIOS)
def test_slot_mapping_over_ranks(
    data: st.DataObject, batch: Batch, states_per_page: int, ratio: int, device: torch.device
) -> None:
    """Each rank as the loop says; a state has one owner; a page of one rank holds its own states.

    The union over ranks is the single rank's mapping: same tokens, given tables long enough.
    """
    shard = data.draw(shards(states_per_page))
    replayed = data.draw(
        st.none() | st.lists(st.sampled_from([-1, 0, 5]), min_size=batch.num_tokens, max_size=40)
    )
    options = None if replayed is None else ints(replayed, device, torch.int64)
    arguments = batch.tensors(device)

    def mapped(rank: Shard) -> list[int]:
        slots = dsv41ops.compressed_slot_mapping(
            *arguments, batch.num_tokens, states_per_page, ratio, options, **rank.kwargs()
        ).tolist()
        assert slots == oracles.compressed_slot_mapping(
            *batch.lists(), batch.num_tokens, states_per_page, ratio, replayed, rank
        )
        table_pages = {page for row in batch.table for page in row if page >= 0}
        assert {slot // states_per_page for slot in slots if slot != -1} <= table_pages
        return slots

    single = mapped(Shard())
    by_rank = [mapped(rank) for rank in shard.ranks()]
    for token, slots in enumerate(zip(*by_rank, strict=True)):
        owners = [rank for rank, slot in enumerate(slots) if slot != -1]
        assert len(owners) <= 1
        # A rank's table reaches further than the single rank's, never less far; only a page that
        # is missing (-1) can take a token away from one and not from the other.
        if not any(-1 in row for row in batch.table) and single[token] != -1:
            assert len(owners) == 1
    if shard.world == 1:
        assert by_rank == [single]
    for slots in by_rank:
        written = [slot for slot in slots if slot != -1]
        assert len(written) == len(set(written))


@given(
    seq_lens=st.lists(st.integers(0, 2**31 - 1), max_size=6),
    ratio=RATIOS,
    world=st.integers(1, 9),
    interleave=st.sampled_from([1, 2, 3, 4, 64, 1000]),
)
def test_local_lengths_over_ranks(
    seq_lens: list[int], ratio: int, world: int, interleave: int, device: torch.device
) -> None:
    total = torch.zeros(len(seq_lens), dtype=torch.int64)
    for rank in range(world):
        local = dsv41ops.dcp_local_seq_lens(
            ints(seq_lens, device), ratio, world, rank, interleave
        ).cpu()
        assert bool((local >= 0).all())
        total += local
    assert total.tolist() == [length // ratio for length in seq_lens]


@given(data=st.data(), batch=batches(), page_size=st.sampled_from([1, 3, 8, 32]))
def test_window(data: st.DataObject, batch: Batch, page_size: int, device: torch.device) -> None:
    window = data.draw(st.integers(1, 20), "window")
    causal = data.draw(st.booleans(), "causal")
    width = data.draw(st.integers(window if causal else 1, 40), "width")
    replay = data.draw(
        st.none()
        | st.lists(st.integers(-3, 70), min_size=len(batch.seq_lens), max_size=len(batch.seq_lens)),
        "replay_start",
    )
    rows, lens = dsv41ops.sliding_window_indices(
        *batch.tensors(device), batch.num_tokens, page_size, window, width, causal,
        None if replay is None else ints(replay, device),
    )  # fmt: skip
    assert (rows.tolist(), lens.tolist()) == oracles.sliding_window_indices(
        *batch.lists(), batch.num_tokens, page_size, window, width, causal, replay
    )


@given(data=st.data(), batch=batches(), states_per_page=STATES_PER_PAGE, ratio=RATIOS)
def test_topk_over_ranks(
    data: st.DataObject, batch: Batch, states_per_page: int, ratio: int, device: torch.device
) -> None:
    shard = data.draw(shards(states_per_page))
    width = data.draw(st.integers(0, 9), "K")
    state = st.one_of(st.integers(-2, 70), INT32)
    topk = [[data.draw(state) for _ in range(width)] for _ in range(batch.num_tokens)]
    ids = torch.tensor(topk, dtype=torch.int64, device=device).view(batch.num_tokens, width)
    counts = torch.zeros(batch.num_tokens, dtype=torch.int64)
    for rank in shard.ranks():
        rows, lens = dsv41ops.topk_to_slots(
            ids, *batch.tensors(device), states_per_page, ratio, **rank.kwargs()
        )
        expected = oracles.topk_to_slots(topk, *batch.lists(), states_per_page, ratio, rank)
        assert (rows.tolist(), lens.tolist()) == expected
        assert ((rows >= 0).sum(1) == lens).all()
        counts += lens.cpu()
    whole, single = dsv41ops.topk_to_slots(ids, *batch.tensors(device), states_per_page, ratio)
    assert whole.shape == ids.shape
    if shard.world == 1 or not any(-1 in row for row in batch.table):
        assert bool((counts >= single.cpu()).all())


@given(data=st.data(), batch=garbage())
def test_garbage_geometry(data: st.DataObject, batch: Batch, device: torch.device) -> None:
    """Whatever the device holds: slots lie in the table's own pages, counts match, lengths >= 0."""
    arguments = batch.tensors(device)
    num_tokens, requests = batch.num_tokens, len(batch.seq_lens)
    ids = data.draw(st.lists(INT64, min_size=3 * num_tokens, max_size=3 * num_tokens))
    topk = torch.tensor(ids, dtype=torch.int64, device=device).view(num_tokens, 3)
    replay = ints(data.draw(st.lists(INT32, min_size=requests, max_size=requests)), device)
    pages = {page for row in batch.table for page in row if page >= 0}

    owners = dsv41ops.token_to_request(arguments[0], num_tokens).tolist()
    assert all(-1 <= owner < requests for owner in owners)
    slots = dsv41ops.compressed_slot_mapping(*arguments, num_tokens, 4, 2).tolist()
    assert all(slot == -1 or slot // 4 in pages for slot in slots)
    windows = [
        dsv41ops.sliding_window_indices(
            *arguments, num_tokens, 4, 5, width=7, causal=causal, replay_start=replay
        )
        for causal in (True, False)
    ]
    narrow = topk.clamp(-(2**31), 2**31 - 1).to(torch.int32)
    for rows, lens in (
        *windows,
        dsv41ops.topk_to_slots(topk, *arguments, 4, 1),
        dsv41ops.topk_to_slots(narrow, *arguments, 4, 2, 2, 1, 2),
    ):
        for row, count in zip(rows.tolist(), lens.tolist(), strict=True):
            assert 0 <= count <= len(row)
            assert all(slot // 4 in pages for slot in row[:count])
            assert row[count:] == [-1] * (len(row) - count)


@given(
    queries=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    data=st.data(),
    ratio=RATIOS,
)
def test_garbage_values_in_a_sound_layout(
    queries: list[int], data: st.DataObject, ratio: int, device: torch.device
) -> None:
    """With ascending starts even garbage lengths, pages and ids have one right answer."""
    starts = [sum(queries[:r]) for r in range(len(queries) + 1)]
    seq_lens = [data.draw(st.one_of(st.integers(0, 30), INT32)) for _ in queries]
    table = [[data.draw(INT32) for _ in range(3)] for _ in queries]
    batch = Batch(starts, seq_lens, table, starts[-1] + 1, 3)
    arguments = batch.tensors(device)
    topk = [[data.draw(st.one_of(st.integers(-3, 40), INT64)) for _ in range(4)]] * batch.num_tokens
    slots = dsv41ops.compressed_slot_mapping(*arguments, batch.num_tokens, 8, ratio).tolist()
    assert slots == oracles.compressed_slot_mapping(*batch.lists(), batch.num_tokens, 8, ratio)
    rows, lens = dsv41ops.topk_to_slots(
        torch.tensor(topk, dtype=torch.int64, device=device), *arguments, 8, ratio
    )
    assert (rows.tolist(), lens.tolist()) == oracles.topk_to_slots(topk, *batch.lists(), 8, ratio)
    for causal in (True, False):
        rows, lens = dsv41ops.sliding_window_indices(
            *arguments, batch.num_tokens, 8, 5, width=9, causal=causal
        )
        assert (rows.tolist(), lens.tolist()) == oracles.sliding_window_indices(
            *batch.lists(), batch.num_tokens, 8, 5, 9, causal
        )


@given(slots=st.lists(st.one_of(st.integers(-3, 14), INT64), max_size=8, unique=True))
def test_garbage_slots(slots: list[int], device: torch.device) -> None:
    """Insert touches the pages that valid slots name, and gather reads nothing else."""
    cache, pool = empty_cache("mxfp8", 3, 4, device)
    rows = torch.randn(len(slots), HEAD_DIM, device=device).bfloat16()
    named = torch.tensor(slots, dtype=torch.int64, device=device)
    dsv41ops.kv_cache_insert(rows, named, cache)
    changed = (pool[1:-1].view(12, 528) != GUARD).any(1).nonzero().flatten().tolist()
    assert changed == sorted(slot for slot in slots if 0 <= slot < 12)
    assert bool((pool[[0, -1]] == GUARD).all())
    gathered = dsv41ops.kv_cache_gather(cache, named)
    for slot, row in zip(slots, gathered, strict=True):
        assert bool(row.any()) == (0 <= slot < 12)


@settings(max_examples=15)
@given(data=st.data(), width=st.sampled_from([1, 4, 7]))
def test_garbage_indices(data: st.DataObject, width: int, device: torch.device) -> None:
    """Decode with any int32 as index or length is attention over the entries that name a row."""
    parts = []
    for record in ("mxfp8", "nvfp4"):
        cache = random_cache(record, 2, 3, device)
        entry = st.one_of(st.integers(-2, 7), INT32)
        indices = [[data.draw(entry) for _ in range(width)] for _ in range(2)]
        lens = [data.draw(st.one_of(st.integers(-1, width + 1), INT32)) for _ in range(2)]
        parts.append((cache, ints(indices, device), ints(lens, device)))
    q = torch.randn(2, 3, HEAD_DIM, device=device).bfloat16()
    out, lse = dsv41ops.sparse_mla_decode(q, *parts[0], *parts[1])
    assert_attention_close(out, lse, *dense_attention(q, parts))
