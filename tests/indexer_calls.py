"""Calls of ``indexer_topk`` on small integers, whose scores are exact, and an oracle in Python."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsv41ops.layouts import INDEX_RECORDS, IndexRecord, new_index_cache
from dsv41ops.reference.index_keys import encode_index_keys
from dsv41ops.reference.records import write_rows
from tests.oracles import ONE_RANK, Shard, positions, slot_in_table
from tests.support import ints

Selection = tuple[list[list[int]], list[list[float]]]
Results = tuple[list[list[int]], list[list[float]], list[list[int]], list[list[float]]]

RECORDS = {record.name: record for record in INDEX_RECORDS.values()}


def filled_cache(keys: Tensor, record: IndexRecord, page_size: int, gap: int = 0) -> Tensor:
    """Keys ``[slots, 128]`` in their slots; pages ``gap`` bytes apart. On the keys' device."""
    num_pages = keys.shape[0] // page_size
    cache = new_index_cache(num_pages, page_size, record.name, keys.device)
    if gap:
        page = cache.stride(0) + gap
        storage = cache.new_full((num_pages * page + 1,), 0xA5)
        cache = storage.as_strided(cache.shape, (page, cache.stride(1), 1), 1)
    slots = torch.arange(num_pages * page_size, device=keys.device)
    write_rows(cache, record, slots, encode_index_keys(keys[: len(slots)].float(), record))
    return cache


@dataclass(frozen=True)
class Call:
    """A step's geometry, and what is asked for."""

    starts: tuple[int, ...] = (0, 1, 4, 4)
    seq_lens: tuple[int, ...] = (40, 33, 0)
    num_tokens: int = 5
    record: str = "fp8"
    heads: int = 4
    page_size: int = 4
    num_pages: int = 40
    columns: int = 12
    rows: int | None = None  # of the table
    holes: bool = False
    topk: int = 5
    ratio: int = 1
    candidates: int | None = None  # width of the filter
    num_blocks: int = 0
    block_size: int = 8
    shard: Shard = ONE_RANK
    spread: int = 2  # of the queries; 0: all scores equal
    gap: int = 0

    def inputs(self) -> dict[str, Any]:
        """Random ones, the same for every rank of a seed."""
        T, H = self.num_tokens, self.heads
        keys = torch.randint(-3, 4, (self.num_pages * self.page_size, 128))
        q = torch.randint(-self.spread, self.spread + 1, (T, H, 128))
        weights = torch.randint(-2, 5, (T, H)) / 4
        rows = len(self.seq_lens) if self.rows is None else self.rows
        table = torch.stack(
            [torch.randperm(self.num_pages)[: self.columns] for _ in range(max(rows, 1))]
        )[:rows]
        if self.holes:
            table[torch.rand(table.shape) < 0.3] = -1
            table[torch.rand(table.shape) < 0.1] = self.num_pages  # past the cache
        blocks = None
        if self.candidates is not None:
            num_states = self.columns * self.page_size * self.shard.world
            most = -(-num_states // self.block_size) + 3
            draws = torch.rand(T, max(most, self.candidates)).argsort(1)[:, : self.candidates]
            blocks = torch.where(torch.rand(draws.shape) < 0.2, -1, draws).int()
        return {"keys": keys, "q": q, "weights": weights, "table": table.int(), "blocks": blocks}

    def arguments(self, inputs: dict[str, Any], device: torch.device) -> tuple[Any, ...]:
        """In the schema's order."""
        cache = filled_cache(
            inputs["keys"].to(device), RECORDS[self.record], self.page_size, self.gap
        )
        blocks = inputs["blocks"]
        return (
            inputs["q"].bfloat16().to(device),
            inputs["weights"].float().to(device),
            cache,
            ints(self.starts, device),
            ints(self.seq_lens, device),
            inputs["table"].to(device),
            self.topk,
            self.ratio,
            None if blocks is None else blocks.to(device),
            self.num_blocks,
            self.block_size,
            self.shard.world,
            self.shard.rank,
            self.shard.interleave,
        )

    def expected(self, inputs: dict[str, Any]) -> Results:
        products = inputs["q"].double() @ inputs["keys"].double().T  # [T, H, slots]
        scores = (products.clamp(min=0) * inputs["weights"].double()[:, :, None]).sum(1)
        table, shard = inputs["table"].tolist(), self.shard
        num_slots = self.num_pages * self.page_size
        results: Results = ([], [], [], [])
        places = positions(self.starts, self.seq_lens, self.num_tokens)
        for token, place in enumerate(places):
            found: dict[int, float] = {}
            blocks: dict[int, float] = {}
            filtered = None if inputs["blocks"] is None else set(inputs["blocks"][token].tolist())
            request, visible = (0, 0) if place is None else (place[0], (place[1] + 1) // self.ratio)
            for state in range(min(visible, self.columns * self.page_size * shard.world)):
                block = state // self.block_size
                if not shard.owns(state) or (filtered is not None and block not in filtered):
                    continue
                slot = slot_in_table(table, request, shard.local(state), self.page_size)
                if not 0 <= slot < num_slots:
                    continue
                found[state] = float(scores[token, slot])
                best = max(blocks.get(block, -torch.inf), found[state])
                newest = block == (visible - 1) // self.block_size
                blocks[block] = torch.inf if newest else best
            for rows, entries, count in (
                (results[:2], found, self.topk),
                (results[2:], blocks, self.num_blocks),
            ):
                for row, values in zip(rows, best_of(entries, count), strict=True):
                    row.append(values)
        return results

    def ranks(self) -> list[Call]:
        return [replace(self, shard=shard) for shard in self.shard.ranks()]


def best_of(entries: dict[int, float], count: int) -> tuple[list[int], list[float]]:
    """By score, ties to the lower number; ascending, padded."""
    kept = sorted(sorted(entries, key=lambda number: (-entries[number], number))[:count])
    padding = count - len(kept)
    return kept + [-1] * padding, [entries[n] for n in kept] + [-torch.inf] * padding


CALLS = {
    "plain": Call(),
    "mxfp4": Call(record="mxfp4", topk=7),
    "one head": Call(heads=1, topk=3),
    "all selected": Call(topk=100),
    "ratio 2": Call(ratio=2, seq_lens=(41, 34, 0)),
    "ties": Call(spread=0),
    "few scores": Call(spread=0, heads=2, topk=11, num_blocks=3, block_size=4),
    "holes": Call(holes=True, topk=9, num_blocks=4),
    "short table": Call(columns=5, topk=9, num_blocks=4),
    "short table, few rows": Call(rows=1, topk=9),
    "no table": Call(columns=0, num_blocks=2),
    "blocks": Call(num_blocks=3),
    "all blocks": Call(num_blocks=50, block_size=3),
    "blocks of 1": Call(num_blocks=4, block_size=1),
    "one block": Call(num_blocks=2, block_size=128),
    "filter": Call(candidates=4),
    "filter, no column": Call(candidates=0, num_blocks=2),
    "filter, blocks of 3": Call(candidates=9, block_size=3, record="mxfp4"),
    "filter and blocks": Call(candidates=6, block_size=4, num_blocks=3, holes=True),
    "odd pages": Call(page_size=7, gap=3),
    "odd pages, mxfp4": Call(page_size=7, gap=3, record="mxfp4"),
    "negative lengths": Call(seq_lens=(-5, 2, 3), num_blocks=1),
    "empty requests": Call(starts=(0, 0, 2, 2, 5, 5), seq_lens=(3, 40, 0, 9, 0), topk=4),
    "no tokens": Call(starts=(0, 0), seq_lens=(9,), num_tokens=0),
    "no requests": Call(starts=(0,), seq_lens=(), num_tokens=3, rows=0),
}
SHARDS = [
    Shard(2, 0, 1),
    Shard(2, 0, 4),
    Shard(3, 0, 1),
    Shard(3, 0, 2),
    Shard(4, 0, 8),
    Shard(5, 0, 16),
]
