"""One graph of a whole step serves every batch, and computes what eager computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import ReinplaceCounters, counters

from tests.compile.toy import Step, Toy, make_step, needs_cxx, no_graph_cache

# T of each step; requests and table widths change as well, values always do.
TOKENS = (3, 2, 16, 17, 64, 257)
ERROR_ON_RECOMPILE = torch._dynamo.config.patch(error_on_recompile=True)


def sized_step(T: int, device: torch.device) -> Step:
    return make_step(T, R=2 + T % 3, P=10 + T % 4, seed=T, device=device)


def free_dims(step: Step) -> list[tuple[Tensor, int]]:
    """T, R and the table widths."""
    rows = [(tensor, 0) for tensor in step.tensors()]
    return [*rows, (step.window_table, 1), (step.block_table, 1)]


class Pair:
    """The same step compiled and eager, each with caches of its own."""

    def __init__(self, backend: str, device: torch.device, dynamic: bool | None = None) -> None:
        self.compiled, self.eager = Toy().to(device), Toy().to(device)
        self.counter = CompileCounterWithBackend(backend)
        self.run: Callable[..., tuple[Tensor, ...]] = torch.compile(
            self.compiled, backend=self.counter, fullgraph=True, dynamic=dynamic
        )

    def step(self, step: Step) -> None:
        """Run both; results and every byte of every cache must be equal."""
        got, want = self.run(*step.tensors()), self.eager(*step.tensors())
        assert all(torch.isfinite(t).all() for t in want)
        for one, other in zip(
            [*got, *self.compiled.caches()], [*want, *self.eager.caches()], strict=True
        ):
            assert torch.equal(one, other)

    @property
    def graphs(self) -> int:
        assert sum(counters["graph_break"].values()) == 0
        return self.counter.frame_count


def test_the_toy_does_something(device: torch.device) -> None:
    toy = Toy().to(device)
    hidden, request, local_lens = toy(*sized_step(17, device).tensors())
    assert request.unique().numel() > 2
    assert bool((local_lens > 0).any())
    assert all(bool(cache.any()) for cache in toy.caches())
    assert hidden.shape == (17, 32)


def test_unbacked_sizes_compile_once(device: torch.device) -> None:
    pair = Pair("aot_eager", device)
    first = sized_step(TOKENS[0], device)
    for tensor, dim in free_dims(first):
        mark_unbacked(tensor, dim)
    pair.step(first)
    with ERROR_ON_RECOMPILE:
        for T in (*TOKENS[1:], 1, 0):
            pair.step(sized_step(T, device))
        pair.step(make_step(5, R=1, P=1, device=device))
    assert pair.graphs == 1


@pytest.mark.parametrize("first_tokens", [0, 1])
def test_unbacked_sizes_from_an_edge(first_tokens: int, device: torch.device) -> None:
    pair = Pair("aot_eager", device)
    first = make_step(first_tokens, R=1, P=1, device=device)
    for tensor, dim in free_dims(first):
        mark_unbacked(tensor, dim)
    pair.step(first)
    with ERROR_ON_RECOMPILE:
        pair.step(sized_step(17, device))
    assert pair.graphs == 1


def test_dynamic_sizes_compile_once_from_two_tokens_up(device: torch.device) -> None:
    pair = Pair("aot_eager", device)
    first = sized_step(TOKENS[0], device)
    for tensor, dim in free_dims(first):
        torch._dynamo.mark_dynamic(tensor, dim)
    pair.step(first)
    with ERROR_ON_RECOMPILE:
        for T in TOKENS[1:]:
            pair.step(sized_step(T, device))
    assert pair.graphs == 1
    # Sizes 0 and 1 specialise: one graph more each, once.
    pair.step(sized_step(1, device))
    assert pair.graphs <= 2
    pair.step(sized_step(0, device))
    assert pair.graphs <= 3
    with ERROR_ON_RECOMPILE:
        for T in (1, 0, 5):
            pair.step(sized_step(T, device))


def test_default_settings_settle_after_two_graphs(device: torch.device) -> None:
    pair = Pair("aot_eager", device)
    pair.step(make_step(3, R=3, P=12, device=device))
    pair.step(make_step(6, R=4, P=13, device=device))
    assert pair.graphs == 2  # static first, then every changed size at once
    with ERROR_ON_RECOMPILE:
        for T in (7, 17):
            pair.step(sized_step(T, device))
    assert pair.graphs == 2


def test_values_never_recompile(device: torch.device) -> None:
    pair = Pair("aot_eager", device, dynamic=False)
    pair.step(make_step(7, seed=0, device=device))
    with ERROR_ON_RECOMPILE:
        for seed in range(1, 4):
            pair.step(make_step(7, seed=seed, device=device))
        empty = make_step(7, seed=5, device=device)
        empty.query_start_loc.zero_()  # every token is padding
        pair.step(empty)
    assert pair.graphs == 1


def test_inference_mode(device: torch.device) -> None:
    with torch.inference_mode():
        pair = Pair("aot_eager", device)
        first = sized_step(TOKENS[0], device)
        for tensor, dim in free_dims(first):
            mark_unbacked(tensor, dim)
        pair.step(first)
        with ERROR_ON_RECOMPILE:
            pair.step(sized_step(17, device))
    assert pair.graphs == 1


@needs_cxx
def test_inductor(device: torch.device) -> None:
    ReinplaceCounters.clear()
    pair = Pair("inductor", device)
    first = sized_step(TOKENS[0], device)
    for tensor, dim in free_dims(first):
        mark_unbacked(tensor, dim)
    with no_graph_cache():
        pair.step(first)
    assert ReinplaceCounters.get_total_missed_bytes() == 0
    with ERROR_ON_RECOMPILE:
        for T in (1, 17, 0):
            pair.step(sized_step(T, device))
    assert pair.graphs == 1
