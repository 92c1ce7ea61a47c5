"""Random inputs of every case: pools far larger than L2, and a set of indices per timed call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import dsv41ops
from dsv41ops.bench.problems import (
    MERGE_HEADS,
    MERGE_RANKS,
    TOPK,
    WINDOW,
    DecodeCase,
    OpCase,
)
from dsv41ops.layouts import HEAD_DIM, record_named
from dsv41ops.reference import attention, index, kv_cache
from dsv41ops.reference.records import encode, read_rows

CALLS = 40  # of one captured graph, each with its own set of inputs
POOL_ROWS = 2**20
FILL_ROWS = 2**16  # encoded at a time
MAX_TOKENS = 512
WINDOW_PAGE = 32
PAGE = 64  # tokens, and states of a decode case
RATIO = 2  # of index ops
SEQ_LENS = (1024, 32768)
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
