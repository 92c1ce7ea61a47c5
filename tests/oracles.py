"""The index ops of SPEC section 4 as loops over tokens and Python integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

Table = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Shard:
    """One rank of decode context parallelism; ``interleave`` counts states."""

    world: int = 1
    rank: int = 0
    interleave: int = 1

    def owns(self, state: int) -> bool:
        return state // self.interleave % self.world == self.rank

    def local(self, state: int) -> int:
        stripe = self.interleave * self.world
        return state // stripe * self.interleave + state % self.interleave

    def ranks(self) -> list[Shard]:
        return [replace(self, rank=rank) for rank in range(self.world)]

    def kwargs(self) -> dict[str, int]:
        return {
            "dcp_world_size": self.world,
            "dcp_rank": self.rank,
            "cp_interleave": self.interleave,
        }


ONE_RANK = Shard()


def token_to_request(query_start_loc: Sequence[int], num_tokens: int) -> list[int]:
    owners = [-1] * num_tokens
    for request in range(len(query_start_loc) - 1):
        for token in range(query_start_loc[request], query_start_loc[request + 1]):
            if token < num_tokens:
                owners[token] = request
    return owners


def positions(
    query_start_loc: Sequence[int], seq_lens: Sequence[int], num_tokens: int
) -> list[tuple[int, int] | None]:
    """Per token its request and position; None for padding and for a position below 0."""
    found: list[tuple[int, int] | None] = []
    for token, request in enumerate(token_to_request(query_start_loc, num_tokens)):
        if request < 0:
            found.append(None)
            continue
        start, end = query_start_loc[request], query_start_loc[request + 1]
        position = seq_lens[request] - (end - start) + (token - start)
        found.append((request, position) if position >= 0 else None)
    return found


def slot_in_table(table: Table, request: int, index: int, page_size: int) -> int:
    """``index`` (a token or local state of the request) through the block table, -1 outside it."""
    column = index // page_size
    if request >= len(table) or column >= len(table[request]) or table[request][column] < 0:
        return -1
    return table[request][column] * page_size + index % page_size


def compressed_slot_mapping(
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    table: Table,
    num_tokens: int,
    states_per_page: int,
    ratio: int,
    slot_mapping: Sequence[int] | None = None,
    shard: Shard = ONE_RANK,
) -> list[int]:
    slots = [-1] * num_tokens
    for token, place in enumerate(positions(query_start_loc, seq_lens, num_tokens)):
        if place is None or (slot_mapping is not None and slot_mapping[token] == -1):
            continue
        request, position = place
        state = position // ratio
        if (position + 1) % ratio == 0 and shard.owns(state):
            slots[token] = slot_in_table(table, request, shard.local(state), states_per_page)
    return slots


def dcp_local_seq_lens(seq_lens: Sequence[int], ratio: int, shard: Shard) -> list[int]:
    """Counted, not computed: how many of the request's states this rank owns."""
    return [sum(shard.owns(state) for state in range(length // ratio)) for length in seq_lens]


def sliding_window_indices(
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    table: Table,
    num_tokens: int,
    page_size: int,
    window: int = 128,
    width: int | None = None,
    causal: bool = True,
    replay_start: Sequence[int] | None = None,
) -> tuple[list[list[int]], list[int]]:
    width = window if width is None else width
    rows = []
    for place in positions(query_start_loc, seq_lens, num_tokens):
        seen: list[int] = []
        if place is not None:
            request, position = place
            if causal:
                first, last = max(position - window + 1, 0), position
                if replay_start is not None:
                    first = max(first, replay_start[request])
            else:
                queries = query_start_loc[request + 1] - query_start_loc[request]
                last = seq_lens[request] - 1
                first = max(seq_lens[request] - queries - window, 0)
            newest = range(max(first, last + 1 - width), last + 1)
            seen = [slot_in_table(table, request, index, page_size) for index in newest]
        rows.append(packed(seen, width))
    return [row for row, _ in rows], [count for _, count in rows]


def topk_to_slots(
    topk: Sequence[Sequence[int]],
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    table: Table,
    states_per_page: int,
    ratio: int,
    shard: Shard = ONE_RANK,
) -> tuple[list[list[int]], list[int]]:
    rows = []
    for states, place in zip(topk, positions(query_start_loc, seq_lens, len(topk)), strict=True):
        kept: list[int] = []
        if place is not None:
            request, position = place
            visible = (position + 1) // ratio
            kept = [
                slot_in_table(table, request, shard.local(state), states_per_page)
                for state in states
                if 0 <= state < visible and shard.owns(state)
            ]
        rows.append(packed(kept, len(states)))
    return [row for row, _ in rows], [count for _, count in rows]


def packed(slots: Sequence[int], width: int) -> tuple[list[int], int]:
    """Valid slots first, in order. One that int32 cannot hold is invalid: it names no row."""
    kept = [slot for slot in slots if 0 <= slot < 2**31]
    return kept + [-1] * (width - len(kept)), len(kept)
