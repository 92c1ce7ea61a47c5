"""Plain continuous batching: decodes and prompt chunks share a step, pages come from a pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
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
    max_drafts: int | None = None  # verified in one step at most; None: as many as there are
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
    """A request's share of one step: ``num_tokens`` from position ``first`` on, drafts last."""

    request: Request
    first: int
    num_tokens: int
    num_drafts: int = 0

    @property
    def end(self) -> int:
        return self.first + self.num_tokens

    @property
    def samples(self) -> bool:
        """Does this request get a new token?"""
        return self.end >= len(self.request.prompt)

    def num_kept(self, num_accepted: int) -> int:
        """Tokens whose rows in the caches stay."""
        return self.num_tokens - self.num_drafts + num_accepted


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


def swa_pages_per_request(window: int, page_size: int, max_tokens: int, num_drafts: int = 0) -> int:
    """Window pages that a request may hold at once: window, chunk, drafts, starting anywhere."""
    return (window - 1 + max_tokens + num_drafts - 1) // page_size + 2


class Scheduler:
    """First come, first served. A request gets its compressed pages when it starts, so it can
    always finish; window pages come and go with the window.

    With drafts, a request that samples gets ``geometry.num_drafts`` proposed after its new token
    and verifies them in its next step; its window has the pages of both.
    """

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
            first = request.num_computed
            left = len(request.prompt) - first
            if request.is_decoding:
                left = min(1 + self._num_drafts_of(request), request.num_positions - first)
            num_tokens = min(left, budget)
            if num_tokens > 0:
                num_drafts = num_tokens - 1 if request.is_decoding else 0
                plan.append(Scheduled(request, first, num_tokens, num_drafts))
                self._move_window(plan[-1])
                budget -= num_tokens
        return plan

    def finish_step(self, plan: list[Scheduled], num_accepted: Sequence[int]) -> None:
        """Account for a step that ran; free what finished requests hold.

        The caches hold rejected drafts too; the next step writes those positions again.
        """
        for part, accepted in zip(plan, num_accepted, strict=True):
            request = part.request
            request.num_computed = part.first + part.num_kept(accepted)
            if request.is_finished:
                self.running.remove(request)
                self.slots.append(request.slot)
                self.pool.give_back(request.pages)
                self.swa_pool.give_back(request.swa_pages.values())

    def _num_drafts_of(self, request: Request) -> int:
        if request.max_drafts is None:
            return self.geometry.num_drafts
        return min(request.max_drafts, self.geometry.num_drafts)

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
        # If all drafts are accepted, the next ones are proposed from the step's end on.
        end = part.end + (self.geometry.num_drafts if part.samples else 0)
        for index in range(part.first // page_size, (end - 1) // page_size + 1):
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
                tokens.copy_(torch.arange(-1, -1 - part.num_tokens, -1))
            else:
                tokens.copy_(request.prompt[part.first : part.end])
            start += part.num_tokens
        host.query_start_loc[len(plan) :] = start
        for buffer, tensor in zip(self.inputs, host, strict=True):
            buffer.copy_(tensor)
        return self.inputs
