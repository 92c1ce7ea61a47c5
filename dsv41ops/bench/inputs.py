"""Random inputs of every case: pools far larger than L2, and a set of indices per timed call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import dsv41ops
from dsv41ops.bench.problems import (
    INDEX_HEADS,
    INDEX_PAGE,
    MERGE_HEADS,
    MERGE_RANKS,
    TOPK,
    WINDOW,
    DecodeCase,
    OpCase,
)
from dsv41ops.layouts import HEAD_DIM, INDEX_HEAD_DIM, ROPE_DIM, index_record_named, record_named
from dsv41ops.reference import attention, compressor, index, indexer, kv_cache
from dsv41ops.reference.index_keys import encode_index_keys
from dsv41ops.reference.norm import rms_norm
from dsv41ops.reference.records import encode, read_rows, write_rows
from dsv41ops.reference.rope import rotate_last

CALLS = 40  # of one captured graph, each with its own set of inputs
POOL_ROWS = 2**20
FILL_ROWS = 2**16  # encoded at a time
MAX_TOKENS = 512
WINDOW_PAGE = 32
PAGE = 64  # tokens, and states of a decode case
RATIO = 2  # of index ops
SEQ_LENS = (1024, 32768)
RING_SHARE = 64  # rows of a pool for one of a ring
EPS = 1e-20
DCP = (4, 1, 1)  # world, rank, interleave of dcp_local_seq_lens
MERGE_BYTES = 2**29  # of all its sets: more than L2 holds


@dataclass(frozen=True)
class Prepared:
    """A case ready to run on its i-th set of inputs."""

    run: Callable[[int], Any]
    reference: Callable[[int], Any]
    # What the op before has just written in a real step, hence in L2.
    warm: tuple[Tensor, ...] = ()
    exact: bool = True  # equal to the reference bit for bit
    result: Callable[[int], Any] | None = None  # what to compare where run returns nothing

    def observe(self, i: int) -> Any:
        return (self.result or self.run)(i)


class Inputs:
    """Tensors that the cases share, made on first use."""

    def __init__(
        self,
        device: torch.device,
        pool_rows: int = POOL_ROWS,
        calls: int = CALLS,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self.device = device
        self.pool_rows = pool_rows
        self.calls = calls
        self.max_tokens = max_tokens
        self._pools: dict[tuple[str, int], Tensor] = {}
        self._index_pool_of: tuple[str, Tensor] | None = None

    def pool(self, record: str, page_size: int) -> Tensor:
        """A cache of random rows, all of them written."""
        key = (record, page_size)
        if key not in self._pools:
            cache = dsv41ops.new_kv_cache(
                self.pool_rows // page_size, page_size, record, self.device
            )
            for start in range(0, self.pool_rows, FILL_ROWS):
                stop = min(start + FILL_ROWS, self.pool_rows)
                slots = torch.arange(start, stop, dtype=torch.int32, device=self.device)
                dsv41ops.kv_cache_insert(self._normal(stop - start, HEAD_DIM), slots, cache)
            self._pools[key] = cache
        return self._pools[key]

    def slots(self, count: int) -> Tensor:
        """``[calls, count]`` int32 slots; no row of a pool twice in one set."""
        sets_of_one = self.pool_rows // count
        permutations = [
            torch.randperm(self.pool_rows, dtype=torch.int32, device=self.device)[
                : sets_of_one * count
            ].view(sets_of_one, count)
            for _ in range(-(-self.calls // sets_of_one))
        ]
        return torch.cat(permutations)[: self.calls]

    @cached_property
    def window_indices(self) -> Tensor:
        return self.slots(self.max_tokens * WINDOW).view(self.calls, self.max_tokens, WINDOW)

    @cached_property
    def topk_indices(self) -> Tensor:
        return self.slots(self.max_tokens * TOPK).view(self.calls, self.max_tokens, TOPK)

    def decode_arguments(self, case: DecodeCase) -> Callable[[int], dict[str, Any]]:
        """``arguments(i)`` of ``sparse_mla_decode``."""
        T, H = case.num_tokens, case.num_heads
        shared = {
            "q": self._normal(T, H, HEAD_DIM),
            "swa_cache": self.pool(case.window_record, WINDOW_PAGE),
            "swa_lens": self._filled(T, WINDOW),
            "cache": self.pool(case.record, PAGE),
            "topk_lens": self._filled(T, TOPK),
            "attn_sink": torch.randn(H, device=self.device),
        }

        def arguments(i: int) -> dict[str, Any]:
            window, topk = self.window_indices[i, :T], self.topk_indices[i, :T]
            return {**shared, "swa_indices": window, "topk_indices": topk}

        return arguments

    def decode(self, case: DecodeCase, backend: str = "auto") -> Prepared:
        arguments = self.decode_arguments(case)
        return Prepared(
            run=lambda i: dsv41ops.sparse_mla_decode(**arguments(i), backend=backend),
            reference=lambda i: decode_reference(arguments(i)),
            warm=self.decode_warm(case, arguments(0)["q"]),
            exact=False,
        )

    def decode_warm(self, case: DecodeCase, q: Tensor) -> tuple[Tensor, ...]:
        T = case.num_tokens
        return q, self.window_indices[:, :T], self.topk_indices[:, :T]

    def op(self, case: OpCase) -> Prepared:
        prepare: Callable[[OpCase], Prepared] = getattr(self, f"_{case.op}")
        return prepare(case)

    def prepare(self, case: DecodeCase | OpCase) -> Prepared:
        return self.decode(case) if isinstance(case, DecodeCase) else self.op(case)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device)

    def _filled(self, length: int, value: int) -> Tensor:
        return torch.full((length,), value, dtype=torch.int32, device=self.device)

    def _integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.int32, device=self.device)

    def _batch(self, R: int) -> tuple[Tensor, Tensor]:
        """``query_start_loc`` of one token per request, and ``seq_lens`` of every set."""
        starts = torch.arange(R + 1, dtype=torch.int32, device=self.device)
        return starts, self._integers(*SEQ_LENS, self.calls, R)

    def _table(self, R: int, page_tokens: int, page_rows: int) -> Tensor:
        pages = -(-SEQ_LENS[1] // page_tokens)
        return self._integers(0, self.pool_rows // page_rows, R, pages)

    def _token_to_request(self, case: OpCase) -> Prepared:
        starts = torch.arange(case.size + 1, dtype=torch.int32, device=self.device)
        return Prepared(
            run=lambda i: dsv41ops.token_to_request(starts, case.size),
            reference=lambda i: index.token_to_request(starts, case.size),
            warm=(starts,),
        )

    def _compressed_slot_mapping(self, case: OpCase) -> Prepared:
        starts, seq_lens = self._batch(case.size)
        states = PAGE // RATIO
        table = self._table(case.size, PAGE, states)
        rest = (table, case.size, states, RATIO)
        return Prepared(
            run=lambda i: dsv41ops.compressed_slot_mapping(starts, seq_lens[i], *rest),
            reference=lambda i: index.compressed_slot_mapping(
                starts, seq_lens[i], *rest, None, 1, 0, 1
            ),
            warm=(starts, seq_lens, table),
        )

    def _dcp_local_seq_lens(self, case: OpCase) -> Prepared:
        _, seq_lens = self._batch(case.size)
        return Prepared(
            run=lambda i: dsv41ops.dcp_local_seq_lens(seq_lens[i], RATIO, *DCP),
            reference=lambda i: index.dcp_local_seq_lens(seq_lens[i], RATIO, *DCP),
            warm=(seq_lens,),
        )

    def _sliding_window_indices(self, case: OpCase) -> Prepared:
        starts, seq_lens = self._batch(case.size)
        table = self._table(case.size, WINDOW_PAGE, WINDOW_PAGE)
        rest = (table, case.size, WINDOW_PAGE, WINDOW, None, True, None)
        return Prepared(
            run=lambda i: dsv41ops.sliding_window_indices(starts, seq_lens[i], *rest),
            reference=lambda i: index.sliding_window_indices(starts, seq_lens[i], *rest),
            warm=(starts, seq_lens, table),
        )

    def _topk_to_slots(self, case: OpCase) -> Prepared:
        starts, seq_lens = self._batch(case.size)
        states = PAGE // RATIO
        table = self._table(case.size, PAGE, states)
        draws = torch.rand(self.calls, case.size, TOPK, device=self.device)
        topk = (draws * (seq_lens // RATIO)[:, :, None]).to(torch.int32)
        rest = (table, states, RATIO, 1, 0, 1)
        return Prepared(
            run=lambda i: dsv41ops.topk_to_slots(topk[i], starts, seq_lens[i], *rest),
            reference=lambda i: index.topk_to_slots(topk[i], starts, seq_lens[i], *rest),
            warm=(starts, seq_lens, table, topk),
        )

    def _decode_metadata(self, case: OpCase) -> Prepared:
        """All caches present, one rank, as in a step of the release's model."""
        starts, seq_lens = self._batch(case.size)
        swa_table = self._table(case.size, WINDOW_PAGE, WINDOW_PAGE)
        tables = [self._table(case.size, PAGE, PAGE // ratio) for ratio in (1, 2)]
        caches = (swa_table, WINDOW_PAGE, tables[0], tables[1], PAGE)
        rest = (case.size, *caches, WINDOW, None, True, None, None, 1, 0, 1, 1)
        return Prepared(
            run=lambda i: dsv41ops.decode_metadata(starts, seq_lens[i], *rest),
            reference=lambda i: index.decode_metadata(starts, seq_lens[i], *rest),
            warm=(starts, seq_lens, swa_table, *tables),
        )

    def _rows_of(self, case: OpCase) -> tuple[Tensor, Tensor]:
        assert case.record is not None
        return self.pool(case.record, PAGE), self.slots(case.size)

    def _kv_cache_insert(self, case: OpCase) -> Prepared:
        cache, slots = self._rows_of(case)
        kv = self._normal(case.size, HEAD_DIM)
        record = record_named(case.record or "")

        def run(i: int) -> None:
            dsv41ops.kv_cache_insert(kv, slots[i], cache)

        def written(i: int) -> Tensor:
            run(i)
            return read_rows(cache, record, slots[i].long())

        return Prepared(
            run, reference=lambda i: encode(kv, record), warm=(kv, slots), result=written
        )

    def _rope(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """``cos_sin``, and the positions of every set."""
        angles = torch.rand(SEQ_LENS[1], ROPE_DIM // 2, device=self.device) * 2 * math.pi
        positions = self._integers(0, SEQ_LENS[1], self.calls, num_tokens).long()
        return torch.cat([angles.cos(), angles.sin()], 1), positions

    def _rope_kv_cache_insert(self, case: OpCase) -> Prepared:
        cache, slots = self._rows_of(case)
        kv = self._normal(case.size, HEAD_DIM)
        record = record_named(case.record or "")
        table, positions = self._rope(case.size)

        def run(i: int) -> None:
            dsv41ops.rope_kv_cache_insert(kv, positions[i], table, slots[i], cache)

        def written(i: int) -> Tensor:
            run(i)
            return read_rows(cache, record, slots[i].long())

        def reference(i: int) -> Tensor:
            rotated = rotate_last(kv.float(), positions[i], table)
            return encode(rotated.bfloat16(), record)

        return Prepared(run, reference, warm=(kv, positions, slots), result=written)

    def _compress_kv(self, case: OpCase) -> Prepared:
        """Every token closes a group with the row of its request's ring."""
        T, rows = case.size, max(case.size, self.pool_rows // RING_SHARE)
        ring = torch.randn(rows, 2, 2, HEAD_DIM, device=self.device)
        slots = torch.stack(
            [torch.randperm(rows, device=self.device)[:T].int() for _ in range(self.calls)]
        )
        starts, seq_lens = self._batch(T)
        seq_lens = seq_lens // 2 * 2
        kv, score = torch.randn(2, T, HEAD_DIM, device=self.device).unbind(0)
        weight = torch.randn(HEAD_DIM, device=self.device)

        def arguments(i: int) -> tuple[Any, ...]:
            return kv, score, starts, seq_lens[i], weight, slots[i], ring, 2, EPS, None

        return Prepared(
            run=lambda i: dsv41ops.compress_kv(*arguments(i)),
            reference=lambda i: compressor.compress_kv(*arguments(i)),
            warm=(kv, score, starts, seq_lens, weight, slots),
            exact=False,
        )

    def _indexer_k_insert(self, case: OpCase) -> Prepared:
        record, slots = index_record_named(case.record or ""), self.slots(case.size)
        cache = dsv41ops.new_index_cache(self.pool_rows // PAGE, PAGE, record.name, self.device)
        k = torch.randn(case.size, INDEX_HEAD_DIM, device=self.device)
        weight = torch.randn(INDEX_HEAD_DIM, device=self.device)
        table, positions = self._rope(case.size)

        def run(i: int) -> None:
            dsv41ops.indexer_k_insert(k, weight, positions[i], table, slots[i], cache)

        def written(i: int) -> Tensor:
            run(i)
            return read_rows(cache, record, slots[i].long())

        def reference(i: int) -> Tensor:
            keys = rotate_last(rms_norm(k, weight, EPS), positions[i], table)
            return encode_index_keys(keys, record)

        return Prepared(run, reference, warm=(k, weight, positions, slots), result=written)

    def _index_pool(self, record_name: str, num_rows: int) -> Tensor:
        """A cache of at least so many keys, small integers; only the last is kept."""
        if self._index_pool_of is not None:
            name, cache = self._index_pool_of
            if name == record_name and cache.shape[0] * INDEX_PAGE >= num_rows:
                return cache
        self._index_pool_of = None
        record, fill = index_record_named(record_name), min(FILL_ROWS, self.pool_rows)
        num_pages = max(num_rows, self.pool_rows) // INDEX_PAGE
        cache = dsv41ops.new_index_cache(num_pages, INDEX_PAGE, record_name, self.device)
        for start in range(0, self.pool_rows, fill):
            keys = self._integers(-4, 5, fill, INDEX_HEAD_DIM).float()
            slots = torch.arange(start, start + fill, device=self.device)
            write_rows(cache, record, slots, encode_index_keys(keys, record))
        filled = self.pool_rows // INDEX_PAGE
        for start in range(filled, num_pages, filled):
            cache[start : start + filled] = cache[: min(filled, num_pages - start)]
        self._index_pool_of = record_name, cache
        return cache

    def _indexer_topk(self, case: OpCase) -> Prepared:
        """One token per request, no page of two; integers, so that scores are exact."""
        T, pages = case.size, -(-case.context // INDEX_PAGE)
        cache = self._index_pool(case.record or "", T * pages * INDEX_PAGE)
        q = self._integers(-127, 128, T, INDEX_HEADS, INDEX_HEAD_DIM).bfloat16()
        weights = self._integers(-2, 8, T, INDEX_HEADS) / 8
        starts = torch.arange(T + 1, dtype=torch.int32, device=self.device)
        seq_lens = self._filled(T, case.context)
        tables = [
            torch.randperm(cache.shape[0], device=self.device)[: T * pages].view(T, pages).int()
            for _ in range(self.calls)
        ]

        def arguments(i: int) -> tuple[Any, ...]:
            return q, weights, cache, starts, seq_lens, tables[i], TOPK, 1, None, 0, 8, 1, 0, 1

        return Prepared(
            run=lambda i: dsv41ops.indexer_topk(*arguments(i)),
            reference=lambda i: indexer.indexer_topk(*arguments(i)),
            warm=(q, weights, starts, seq_lens, *tables),
        )

    def _merge_topk(self, case: OpCase) -> Prepared:
        shape = (self.calls, MERGE_RANKS, case.size, TOPK)
        states = torch.rand(*shape[:2], case.size, 4 * TOPK, device=self.device).argsort(3)
        ranks = torch.arange(MERGE_RANKS, device=self.device)[None, :, None, None]
        indices = (states[..., :TOPK].sort(3).values * MERGE_RANKS + ranks).int()
        scores = torch.randn(shape, device=self.device)
        return Prepared(
            run=lambda i: dsv41ops.merge_topk(indices[i], scores[i], TOPK),
            reference=lambda i: indexer.merge_topk(indices[i], scores[i], TOPK),
            warm=(indices, scores),
        )

    def _kv_cache_gather(self, case: OpCase) -> Prepared:
        cache, slots = self._rows_of(case)
        return Prepared(
            run=lambda i: dsv41ops.kv_cache_gather(cache, slots[i]),
            reference=lambda i: kv_cache.kv_cache_gather(cache, slots[i]),
            warm=(slots,),
        )

    def _merge_attention_states(self, case: OpCase) -> Prepared:
        shape = (MERGE_RANKS, case.size, MERGE_HEADS)
        assert case.work is not None
        num_sets = min(self.calls, -(-MERGE_BYTES // case.work.num_bytes))
        outs = [self._normal(*shape, HEAD_DIM) for _ in range(num_sets)]
        lses = torch.randn(num_sets, *shape, device=self.device)
        sink = torch.randn(MERGE_HEADS, device=self.device)

        def arguments(i: int) -> tuple[Tensor, Tensor, Tensor]:
            return outs[i % num_sets], lses[i % num_sets], sink

        return Prepared(
            run=lambda i: dsv41ops.merge_attention_states(*arguments(i)),
            reference=lambda i: attention.merge_attention_states(*arguments(i)),
            exact=False,
        )


def decode_reference(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return attention.sparse_mla_decode(
        **arguments, softmax_scale=HEAD_DIM**-0.5, batch_invariant=False
    )
