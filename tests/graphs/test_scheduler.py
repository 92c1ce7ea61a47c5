"""Continuous batching: what runs when, and which pages it holds."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs.batch import CacheGeometry
from graphs.scheduler import Request, Scheduler, StepBuffers, swa_pages_per_request

WINDOW, MAX_TOKENS = 16, 12


def geometry(num_pages: int = 6, max_requests: int = 3, num_drafts: int = 0) -> CacheGeometry:
    pages = swa_pages_per_request(WINDOW, 4, MAX_TOKENS, num_drafts)
    return CacheGeometry(
        max_requests=max_requests,
        max_positions=48 + num_drafts,
        num_pages=num_pages,
        num_swa_pages=max_requests * pages,
        block_size=8,
        swa_page_size=4,
        num_drafts=num_drafts,
    )


def request(prompt: int, generated: int) -> Request:
    return Request(torch.arange(prompt), generated)


def drain(
    scheduler: Scheduler, buffers: StepBuffers, seed: int = 0
) -> dict[Request, list[tuple[int, int]]]:
    """Run to the end, accepting drafts at random: what was kept of each step. Every invariant
    that a step must keep is checked on the way."""
    generator = random.Random(seed)
    ran: dict[Request, list[tuple[int, int]]] = {}
    sizes = scheduler.geometry
    while plan := scheduler.next_step():
        assert sum(part.num_tokens for part in plan) <= MAX_TOKENS
        assert len(plan) <= sizes.max_requests
        kinds = [part.request.is_decoding for part in plan]
        assert kinds == sorted(kinds, reverse=True), "decodes come first"
        running = scheduler.running
        for owned, free, total in (
            ([r.pages for r in running], scheduler.pool, sizes.num_pages),
            (
                [list(r.swa_pages.values()) for r in running],
                scheduler.swa_pool,
                sizes.num_swa_pages,
            ),
        ):
            pages = [page for held in owned for page in held]
            assert len(set(pages)) == len(pages), "a page has one owner"
            assert len(pages) + len(free) == total, "no page is lost"
        assert len({r.slot for r in running}) == len(running)
        inputs = buffers.fill(plan)
        accepted: list[int] = []
        for row, part in enumerate(plan):
            assert int(inputs.seq_lens[row]) == part.end
            # Drafts that are proposed after the step have window rows too.
            end = part.end + sizes.num_drafts * part.samples
            for position in range(max(part.first - WINDOW + 1, 0), end):
                assert int(inputs.swa_block_table[row, position // 4]) >= 0
            for position in range(part.end):
                assert int(inputs.block_table[row, position // 8]) >= 0
            accepted.append(generator.randint(0, part.num_drafts))
            kept = part.num_kept(accepted[-1])
            ran.setdefault(part.request, []).append((part.first, kept))
        assert (inputs.request_slots[len(plan) :] == sizes.max_requests).all()
        assert (inputs.block_table[len(plan) :] == -1).all()
        scheduler.finish_step(plan, accepted)
    return ran


LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=8)


@given(
    LENGTHS, st.integers(0, 5), st.lists(st.none() | st.integers(0, 6), min_size=8), st.integers()
)
def test_every_token_is_kept_once(
    lengths: list[tuple[int, int]], num_drafts: int, max_drafts: list[int | None], seed: int
) -> None:
    sizes = geometry(num_drafts=num_drafts)
    requests = [request(*pair) for pair in lengths]
    for one, most in zip(requests, max_drafts, strict=False):
        one.max_drafts = most
    scheduler = Scheduler(list(requests), sizes, WINDOW, MAX_TOKENS)
    ran = drain(scheduler, StepBuffers(MAX_TOKENS, sizes, "cpu"), seed)
    for one in requests:
        positions = [p for first, count in ran[one] for p in range(first, first + count)]
        assert positions == list(range(one.num_positions))
    assert len(scheduler.pool) == sizes.num_pages
    assert len(scheduler.swa_pool) == sizes.num_swa_pages
    assert len(scheduler.slots) == sizes.max_requests


def test_waits_for_pages_in_order() -> None:
    sizes = geometry(num_pages=4)
    first, second, third = request(24, 2), request(16, 2), request(4, 1)
    scheduler = Scheduler([first, second, third], sizes, WINDOW, MAX_TOKENS)
    scheduler.next_step()
    assert scheduler.running == [first], "the second does not fit, and the third may not pass it"
    assert scheduler.num_steps_pool_full == 1
    drain(scheduler, StepBuffers(MAX_TOKENS, sizes, "cpu"))


def test_prompt_chunk_and_decode_share_a_step() -> None:
    sizes = geometry()
    scheduler = Scheduler([request(3, 5), request(20, 1)], sizes, WINDOW, MAX_TOKENS)
    plan = scheduler.next_step()
    assert [(part.first, part.num_tokens) for part in plan] == [(0, 3), (0, 9)]
    scheduler.finish_step(plan, [0, 0])
    plan = scheduler.next_step()
    assert [(part.first, part.num_tokens) for part in plan] == [(3, 1), (9, 11)]


def test_rejected_drafts_roll_back() -> None:
    sizes = geometry(num_drafts=5)
    one, two = request(3, 9), request(2, 4)
    two.max_drafts = 2
    scheduler = Scheduler([one, two], sizes, WINDOW, MAX_TOKENS)
    scheduler.finish_step(scheduler.next_step(), [0, 0])
    plan = scheduler.next_step()
    assert [(part.first, part.num_tokens, part.num_drafts) for part in plan] == [
        (3, 6, 5),
        (2, 3, 2),
    ]
    token_ids = StepBuffers(MAX_TOKENS, sizes, "cpu").fill(plan).token_ids
    assert token_ids[:9].tolist() == [-1, -2, -3, -4, -5, -6, -1, -2, -3]
    scheduler.finish_step(plan, [2, 2])
    assert scheduler.running == [one], "two accepted drafts were all that was left"
    plan = scheduler.next_step()
    assert [(part.first, part.num_tokens) for part in plan] == [(6, 5)], "not past the answer's end"
    assert plan[0].end == one.num_positions


def test_decodes_feed_the_sampled_token() -> None:
    sizes = geometry()
    buffers = StepBuffers(MAX_TOKENS, sizes, "cpu")
    addresses = [tensor.data_ptr() for tensor in buffers.inputs]
    scheduler = Scheduler([request(3, 2)], sizes, WINDOW, MAX_TOKENS)
    plan = scheduler.next_step()
    assert buffers.fill(plan).token_ids[:4].tolist() == [0, 1, 2, 0]
    scheduler.finish_step(plan, [0])
    assert buffers.fill(scheduler.next_step()).token_ids[:2].tolist() == [-1, 0]
    assert [tensor.data_ptr() for tensor in buffers.inputs] == addresses
