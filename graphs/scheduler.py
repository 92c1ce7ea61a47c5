"""Plain continuous batching: decodes and prompt chunks share a step, pages come from a pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphs.batch import CacheGeometry, StepInputs
from graphs.trace import TraceRow


class PagePool:
    """Page numbers that are free, handed out most recently freed first."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(reversed(range(num_pages)))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, pages: Iterable[int]) -> None:
        self._free.extend(pages)


@dataclass(eq=False)
class Request:
    """One request and what it holds while it runs."""

    prompt: Tensor  # [n] int64 on the host
    num_to_generate: int
    slot: int = -1  # row of the per-request state
    num_computed: int = 0  # tokens in the caches
    pages: list[int] = field(default_factory=list)  # compressed caches, whole length
    swa_pages: dict[int, int] = field(default_factory=dict)  # page index -> page, window only

    @property
    def num_positions(self) -> int:
        return len(self.prompt) + self.num_to_generate - 1

    @property
    def is_decoding(self) -> bool:
        return self.num_computed >= len(self.prompt)

    @property
    def is_finished(self) -> bool:
        return self.num_computed >= self.num_positions


@dataclass(frozen=True)
class Scheduled:
    """A request's share of one step: ``num_tokens`` from position ``first`` on."""

    request: Request
    first: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.first + self.num_tokens

    @property
    def samples(self) -> bool:
        """Does the step's last token of this request give a new token?"""
        return self.end >= len(self.request.prompt)


def make_requests(rows: list[TraceRow], vocab_size: int, seed: int) -> list[Request]:
    """Requests with random prompts of the trace's lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Request(
            torch.randint(vocab_size, (row.context_tokens,), generator=generator),
            row.generated_tokens,
        )
        for row in rows
    ]


def swa_pages_per_request(window: int, page_size: int, max_tokens: int) -> int:
    """Window pages that a request may hold at once: window and chunk, starting anywhere."""
    return (window - 1 + max_tokens - 1) // page_size + 2


class Scheduler:
    """First come, first served. A request gets its compressed pages when it starts, so it can
    always finish; window pages come and go with the window."""

    def __init__(
        self, requests: list[Request], geometry: CacheGeometry, window: int, max_tokens: int
    ) -> None:
        self.geometry, self.window, self.max_tokens = geometry, window, max_tokens
        self.waiting = deque(requests)
        self.running: list[Request] = []
        self.slots = list(reversed(range(geometry.max_requests)))
        self.pool = PagePool(geometry.num_pages)
        self.swa_pool = PagePool(geometry.num_swa_pages)
        self.num_steps_pool_full = 0

    def next_step(self) -> list[Scheduled]:
        """What to run next, decodes first; empty when everything is done."""
        self._admit()
        budget = self.max_tokens
        plan: list[Scheduled] = []
        for request in sorted(self.running, key=lambda r: not r.is_decoding):
            left = 1 if request.is_decoding else len(request.prompt) - request.num_computed
            num_tokens = min(left, budget)
            if num_tokens > 0:
                plan.append(Scheduled(request, request.num_computed, num_tokens))
                self._move_window(plan[-1])
                budget -= num_tokens
        return plan

    def finish_step(self, plan: list[Scheduled]) -> None:
        """Account for a step that ran; free what finished requests hold."""
        for part in plan:
            request = part.request
            request.num_computed = part.end
            if request.is_finished:
                self.running.remove(request)
                self.slots.append(request.slot)
                self.pool.give_back(request.pages)
                self.swa_pool.give_back(request.swa_pages.values())

    def _admit(self) -> None:
        pool_full = False
        while self.waiting and self.slots and not pool_full:
            num_pages = -(-self.waiting[0].num_positions // self.geometry.block_size)
            pool_full = num_pages > len(self.pool)
            if not pool_full:
                request = self.waiting.popleft()
                request.slot = self.slots.pop()
                request.pages = [self.pool.take() for _ in range(num_pages)]
                self.running.append(request)
        self.num_steps_pool_full += pool_full

    def _move_window(self, part: Scheduled) -> None:
        page_size, pages = self.geometry.swa_page_size, part.request.swa_pages
        oldest = max(part.first - self.window + 1, 0) // page_size
        for index in [index for index in pages if index < oldest]:
            self.swa_pool.give_back([pages.pop(index)])
        for index in range(part.first // page_size, (part.end - 1) // page_size + 1):
            if index not in pages:
                pages[index] = self.swa_pool.take()


class StepBuffers:
    """The static inputs of one bucket, filled anew for every step; addresses never change."""

    def __init__(self, bucket: int, geometry: CacheGeometry, device: torch.device | str) -> None:
        num_requests = geometry.max_requests
        widths = [
            -(-geometry.max_positions // size)
            for size in (geometry.swa_page_size, geometry.block_size)
        ]
        self._host = StepInputs(
            token_ids=torch.zeros(bucket, dtype=torch.int64),
            query_start_loc=torch.zeros(num_requests + 1, dtype=torch.int32),
            seq_lens=torch.zeros(num_requests, dtype=torch.int32),
            request_slots=torch.zeros(num_requests, dtype=torch.int64),
            swa_block_table=torch.zeros(num_requests, widths[0], dtype=torch.int32),
            block_table=torch.zeros(num_requests, widths[1], dtype=torch.int32),
        )
        self.inputs = StepInputs(*(tensor.to(device, copy=True) for tensor in self._host))
        self.fill([])

    def fill(self, plan: list[Scheduled]) -> StepInputs:
        """Write a step, padded: no token, no page, and the spare row of per-request state."""
        host = self._host
        host.token_ids.zero_()
        host.seq_lens.zero_()
        host.request_slots.fill_(len(host.request_slots))
        host.swa_block_table.fill_(-1)
        host.block_table.fill_(-1)
        start = 0
        for row, part in enumerate(plan):
            request = part.request
            host.query_start_loc[row] = start
            host.seq_lens[row] = part.end
            host.request_slots[row] = request.slot
            host.block_table[row, : len(request.pages)] = torch.tensor(request.pages)
            for index, page in request.swa_pages.items():
                host.swa_block_table[row, index] = page
            tokens = host.token_ids[start : start + part.num_tokens]
            if request.is_decoding:
                tokens.fill_(-1)
            else:
                tokens.copy_(request.prompt[part.first : part.end])
            start += part.num_tokens
        host.query_start_loc[len(plan) :] = start
        for buffer, tensor in zip(self.inputs, host, strict=True):
            buffer.copy_(tensor)
        return self.inputs
