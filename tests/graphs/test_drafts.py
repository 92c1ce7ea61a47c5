"""Drafts that are accepted and rejected: the tokens are those of plain greedy decoding."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

import pytest
import torch
from torch import Tensor

from graphs import decode
from graphs.batch import StepInputs
from graphs.check import Checker, Comparison
from graphs.config import ModelConfig, load_config
from graphs.dense import DenseReference
from graphs.scheduler import Request, Scheduled, Scheduler, StepBuffers
from graphs.trace import TraceRow
from graphs.verify import fed_tokens, verify
from graphs.weights import randomise
from tests.graphs.tiny import draft_config

NUM_DRAFTS = 5
# Prompts and answers of both parities; one prompt is longer than a step, and some requests take
# fewer drafts than there are, or none.
LENGTHS = [(5, 24), (150, 17), (1, 30), (8, 1), (41, 12), (3, 2), (64, 26), (12, 21), (33, 9)]
MAX_DRAFTS = [None, None, 3, None, 0, None, None, 4, 1]


def new_requests(config: ModelConfig) -> list[Request]:
    generator = torch.Generator().manual_seed(7)
    return [
        Request(torch.randint(config.vocab_size, (prompt,), generator=generator), answer, drafts)
        for (prompt, answer), drafts in zip(LENGTHS, MAX_DRAFTS, strict=True)
    ]


@dataclass
class Oracle:
    """Proposes what plain decoding gave, with wrong tokens at random places."""

    answers: list[list[int]]
    wrong: float  # how often
    generator: random.Random = field(default_factory=lambda: random.Random(3))

    def drafts(self, number: int, first: int, vocab_size: int) -> Tensor:
        """Of the request of this number, the tokens after its first ``first`` answers."""
        right = (self.answers[number] + [0] * NUM_DRAFTS)[first : first + NUM_DRAFTS]
        shift = [int(self.generator.random() < self.wrong) for _ in right]
        return (torch.tensor(right) + torch.tensor(shift)) % vocab_size


@dataclass
class Ran:
    """What a run gave, and what its steps were."""

    answers: list[list[int]]
    comparison: Comparison
    accepted: Counter[int]
    plans: list[list[tuple[Scheduled, int]]]  # with the drafts accepted
    logits: list[Tensor]  # of each request, before each of its answers


TINY = ModelConfig.from_dict(draft_config(dspark_block_size=NUM_DRAFTS))


def run(
    device: torch.device,
    num_drafts: int,
    oracle: Oracle | None = None,
    config: ModelConfig = TINY,
) -> Ran:
    """Decode the requests by the main job's loop, without compiling."""
    requests = new_requests(config)
    rows = [TraceRow(prompt, answer, "") for prompt, answer in LENGTHS]
    geometry = decode.plan_geometry(config, rows, 512, num_drafts)
    with torch.device(device):
        models = decode.build_models(config, geometry, torch.float32)
    for number, part in enumerate(models.parts):
        randomise(part, number)

    class Buffers(StepBuffers):
        """The oracle's drafts in the place of the draft layers'."""

        def fill(self, plan: list[Scheduled]) -> StepInputs:
            for part in plan if oracle else ():
                if part.num_drafts:
                    number = requests.index(part.request)
                    first = part.first - len(part.request.prompt) + 1
                    drafts = oracle.drafts(number, first, config.vocab_size)
                    models.stack.pending[part.request.slot, 1:] = drafts.to(device)
            return super().fill(plan)

    plans = []

    class KeepPlans(Scheduler):
        def finish_step(self, plan: list[Scheduled], num_accepted: list[int]) -> None:
            plans.append(list(zip(plan, num_accepted, strict=True)))
            super().finish_step(plan, num_accepted)

    sizes = decode.pick_buckets(num_drafts)
    buffers: dict[int, StepBuffers] = {size: Buffers(size, geometry, device) for size in sizes}
    checker = Checker(requests)
    with torch.no_grad():
        run_bucket, _ = decode.capture(decode.Steps(*models), buffers, device)
        window = config.sliding_window
        scheduler = KeepPlans(list(requests), geometry, window, sizes[-1])
        loop = decode.DecodeLoop(run_bucket, buffers, scheduler, checker)
        loop.run(sum(request.num_positions for request in requests))
        weights = dict(chain.from_iterable(part.named_parameters() for part in models.parts))
        types = models.stack.types
        reference = DenseReference(config, weights, types.swa_cache, types.cache)
        comparison = checker.compare(config, weights, reference)
    assert len(scheduler.pool) == geometry.num_pages
    assert len(scheduler.swa_pool) == geometry.num_swa_pages
    assert loop.num_tokens == sum(request.num_positions for request in requests)
    histories = [checker.history[request] for request in requests]
    last = [torch.cat([part[-1] for part in history.hidden]).to(device) for history in histories]
    with torch.no_grad():
        logits = [
            models.stack.head(models.stack.norm(hidden[len(request.prompt) - 1 :])).cpu()
            for hidden, request in zip(last, requests, strict=True)
        ]
    answers = [history.sampled for history in histories]
    return Ran(answers, comparison, loop.accepted, plans, logits)


@functools.cache
def run_plain(device: str, config: ModelConfig = TINY) -> Ran:
    return run(torch.device(device), 0, config=config)


@pytest.fixture
def plain(device: torch.device) -> Ran:
    return run_plain(str(device))


def assert_greedy(ran: Ran, plain: Ran) -> None:
    """Every row within tolerance of the dense reference, every token greedy; and the same tokens
    as plain decoding gives, but after a near tie: the rounding of a matrix product depends on its
    batch, and may move a code of a record."""
    assert ran.comparison.attention <= decode.TOLERANCE
    assert ran.comparison.wrong_tokens == 0
    assert [len(answer) for answer in ran.answers] == [answer for _, answer in LENGTHS]
    num_same = 0
    for came, expected, logits in zip(ran.answers, plain.answers, plain.logits, strict=True):
        num_same += came == expected
        if came != expected:
            first = next(
                n for n, pair in enumerate(zip(came, expected, strict=True)) if len({*pair}) > 1
            )
            row = logits[first]
            assert row[expected[first]] - row[came[first]] < 0.02 * row.abs().max()
    assert num_same > len(LENGTHS) / 2


def test_plain(plain: Ran) -> None:
    assert_greedy(plain, plain)
    assert not plain.accepted


def test_random_draft_layers(device: torch.device, plain: Ran) -> None:
    ran = run(device, NUM_DRAFTS)
    assert_greedy(ran, plain)
    assert ran.accepted[0] > ran.accepted.total() / 2


@pytest.mark.parametrize("wrong", [0.0, 0.15, 0.5])
def test_oracle(wrong: float, device: torch.device, plain: Ran) -> None:
    ran = run(device, NUM_DRAFTS, Oracle(plain.answers, wrong))
    assert_greedy(ran, plain)
    rows = [(part, accepted) for plan in ran.plans for part, accepted in plan if part.num_drafts]
    assert {part.num_drafts for part, _ in rows} >= {1, 3, 4, 5}
    assert any(len({part.num_drafts for part, _ in plan}) >= 3 for plan in ran.plans)
    if wrong == 0:
        assert len(ran.plans) < len(plain.plans) / 2
        return
    assert ran.accepted.keys() == set(range(NUM_DRAFTS + 1))
    # Groups of two close in accepted and in rejected drafts, and are cut in two by a rejection.
    new = [part.end - part.num_drafts + accepted for part, accepted in rows]
    assert {position % 2 for position in new} == {0, 1}
    assert any(position < part.end - 1 for position, (part, _) in zip(new, rows, strict=True))
    last = {part.request: part for part, _ in rows}
    assert any(0 < part.num_drafts < NUM_DRAFTS for part in last.values())


def test_small_config(device: torch.device) -> None:
    """Layers that read another layer's cache and selection, and candidates."""
    config = load_config("small")
    plain = run_plain(str(device), config)
    ran = run(device, NUM_DRAFTS, Oracle(plain.answers, 0.15), config)
    assert_greedy(ran, plain)
    assert ran.accepted.keys() == set(range(NUM_DRAFTS + 1))


def test_drafts_are_pending(device: torch.device) -> None:
    """What the draft step returns is what the next step verifies."""
    with torch.device(device):
        geometry = decode.plan_geometry(TINY, [TraceRow(9, 9, "")], 128, NUM_DRAFTS)
        models = decode.build_models(TINY, geometry, torch.float32)
    for number, part in enumerate(models.parts):
        randomise(part, number)
    request = new_requests(TINY)[0]
    window = TINY.sliding_window
    scheduler = Scheduler([request], geometry, window, 8)
    buffers = StepBuffers(8, geometry, device)
    with torch.no_grad():
        outputs, draft = decode.Steps(*models)(buffers.fill(scheduler.next_step()))
    assert draft is not None
    pending = models.stack.pending[request.slot]
    assert pending[0] == outputs.verified.tokens[0, 0]
    assert torch.equal(pending[1:], draft.tokens[0])
    assert outputs.verified.position[0] == len(request.prompt)


def step_inputs(
    token_ids: list[int], starts: list[int], lens: list[int], slots: list[int]
) -> StepInputs:
    table = torch.zeros(len(lens), 1, dtype=torch.int32)
    return StepInputs(
        token_ids=torch.tensor(token_ids),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        request_slots=torch.tensor(slots),
        swa_block_table=table,
        block_table=table,
    )


def test_verify_by_hand() -> None:
    """Two accepted of three; none of one; a request without drafts; a prompt; padding."""
    pending = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33], [0] * 4, [0] * 4])
    inputs = step_inputs(
        [-1, -2, -3, -4, -1, -2, -1, 7, 8, 0, 0],
        [0, 4, 6, 7, 9, 9],
        [14, 6, 3, 2, 0],
        [0, 1, 2, 3, 4],
    )
    request = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3, 3, -1, -1], dtype=torch.int32)
    fed = fed_tokens(inputs, request, pending)
    assert fed.tolist() == [10, 11, 12, 13, 20, 21, 30, 7, 8, 0, 0]
    greedy = torch.tensor([11, 12, 50, 51, 60, 61, 70, 80, 81, 90, 91])
    verified = verify(inputs, fed, pending, lambda rows: greedy[rows])
    assert verified.num_accepted[:4].tolist() == [2, 0, 0, 0]
    assert verified.position[:4].tolist() == [13, 5, 3, 2]
    assert verified.tokens[0, :3].tolist() == [11, 12, 50]
    assert pending[:4, 0].tolist() == [50, 60, 70, 81]
    assert pending[:3, 1:].tolist() == [[11, 12, 13], [21, 22, 23], [31, 32, 33]]


def test_right_draft_after_a_wrong_one_is_rejected() -> None:
    pending = torch.tensor([[1, 2, 3, 4], [0] * 4])
    inputs = step_inputs([-1, -2, -3, -4], [0, 4], [9], [0])
    greedy = torch.tensor([5, 3, 4, 6])
    verified = verify(inputs, pending[0], pending, lambda rows: greedy[rows])
    assert verified.num_accepted.tolist() == [0]
    assert verified.position.tolist() == [6]
