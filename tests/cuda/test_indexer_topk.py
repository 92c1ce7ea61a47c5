"""The indexer on a GPU: exact selections, long contexts, bounded scratch, one graph for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv41ops
from dsv41ops.reference import indexer
from dsv41ops.reference.index_keys import decode_index_keys
from tests.contract.inputs import argument_sets, overload, schema_order
from tests.cuda.test_capture import as_bits, captured
from tests.indexer_calls import CALLS, RECORDS, SHARDS, Call, filled_cache
from tests.oracles import Shard
from tests.support import ints

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
PAGE = 64
MILLION = 2**20


def check(arguments: tuple[Any, ...]) -> None:
    """Bit for bit the reference's: scores of small integers are exact."""
    results = dsv41ops.indexer_topk(*arguments)
    for mine, expected in zip(results, indexer.indexer_topk(*arguments), strict=True):
        assert torch.equal(as_bits(mine), as_bits(expected))


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    call = CALLS[name]
    check(call.arguments(call.inputs(), CUDA))


@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_shards(shard: Shard) -> None:
    for candidates in (None, 7):
        for rank in (0, shard.world - 1):
            call = Call(
                seq_lens=(150, 333, 0),
                page_size=16,
                holes=True,
                topk=9,
                num_blocks=5,
                candidates=candidates,
                shard=replace(shard, rank=rank),
            )
            check(call.arguments(call.inputs(), CUDA))


@pytest.mark.parametrize("spread", [0, 1, 2])
@pytest.mark.parametrize("record", ["fp8", "mxfp4"])
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_many_states(num_tokens: int, record: str, spread: int) -> None:
    """Lists that are shortened, and one level of merging or two; many ties."""
    lengths = tuple(30000 - 700 * t for t in range(num_tokens))
    call = Call(
        starts=tuple(range(num_tokens + 1)),
        seq_lens=lengths,
        num_tokens=num_tokens,
        record=record,
        heads=32,
        page_size=PAGE,
        num_pages=600,
        columns=470,
        topk=512,
        num_blocks=2048,
        spread=spread,
    )
    inputs = call.inputs()
    check(call.arguments(inputs, CUDA))
    blocks = dsv41ops.indexer_topk(*call.arguments(inputs, CUDA))[2]
    filtered = {**inputs, "blocks": blocks}
    check(replace(call, num_blocks=0).arguments(filtered, CUDA))
    order = torch.rand(blocks.shape, device=CUDA).argsort(1)
    filtered = {**inputs, "blocks": blocks.gather(1, order)}
    check(replace(call, num_blocks=0).arguments(filtered, CUDA))


def random_arguments(num_tokens: int, context: int, record: str, **extra: Any) -> dict[str, Any]:
    """Tokens of their own requests, of normally distributed queries and keys."""
    pages = context // PAGE
    keys = torch.randn(2**14, 128, device=CUDA)
    small = filled_cache(keys, RECORDS[record], PAGE)
    cache = small.repeat(-(-pages // small.shape[0]), 1, 1)
    table = torch.stack([torch.randperm(cache.shape[0])[:pages] for _ in range(num_tokens)])
    return {
        "q": torch.randn(num_tokens, 32, 128, device=CUDA).bfloat16(),
        "weights": torch.randn(num_tokens, 32, device=CUDA) / 64,
        "cache": cache,
        "query_start_loc": torch.arange(num_tokens + 1, dtype=torch.int32, device=CUDA),
        "seq_lens": ints([context] * num_tokens, CUDA),
        "block_table": table.int().to(CUDA),
        "topk": 512,
        "compress_ratio": 1,
        **extra,
    }


def all_scores(arguments: dict[str, Any], token: int) -> Tensor:
    """Of every state of a token, in float64, some pages at a time."""
    q, weights = arguments["q"][token].double(), arguments["weights"][token].double()
    scores = []
    for pages in arguments["block_table"][token].split(256):
        slots = pages[:, None].long() * PAGE + torch.arange(PAGE, device=CUDA)
        keys = decode_index_keys(arguments["cache"], slots.flatten()).double()
        scores.append((keys @ q.T).relu() @ weights)
    return torch.cat(scores)


def check_by_gaps(arguments: dict[str, Any]) -> None:
    """Kept is all that is better than the last one by more than rounding, and nothing worse."""
    indices, scores, *_ = dsv41ops.indexer_topk(**arguments)
    for token in range(indices.shape[0]):
        exact = all_scores(arguments, token)
        states = indices[token].long()
        assert bool((states[1:] > states[:-1]).all())
        error = 2e-5 * float(exact.abs().max())
        assert float((scores[token] - exact[states]).abs().max()) < error
        last = exact.topk(len(states)).values[-1]
        assert bool((exact[states] > last - 2 * error).all())
        kept = torch.zeros_like(exact, dtype=torch.bool)
        kept[states] = True
        assert bool(kept[exact > last + 2 * error].all())


@pytest.mark.parametrize("record", ["fp8", "mxfp4"])
@pytest.mark.parametrize(("num_tokens", "context"), [(1, 4096), (5, 2**16), (64, 2**14)])
def test_random_scores(num_tokens: int, context: int, record: str) -> None:
    check_by_gaps(random_arguments(num_tokens, context, record))


@pytest.mark.parametrize("record", ["fp8", "mxfp4"])
def test_a_million_states(record: str) -> None:
    """Against torch, in pieces; and no more scratch memory than a short context takes."""
    arguments = random_arguments(3, MILLION, record)
    check_by_gaps(arguments)
    assert peak_bytes(arguments) < 2**26


def peak_bytes(arguments: dict[str, Any]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    dsv41ops.indexer_topk(**arguments)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("num_tokens", [1, 32, 128, 512, 600])
@pytest.mark.parametrize("candidates", [False, True])
def test_scratch_is_bounded(num_tokens: int, candidates: bool) -> None:
    """By the number of programs; a page table of a million states, nearly all of them unused."""
    arguments = random_arguments(num_tokens, 2**13, "fp8")
    table = torch.zeros(num_tokens, MILLION // PAGE, dtype=torch.int32, device=CUDA)
    table[:, : 2**13 // PAGE] = arguments["block_table"]
    arguments["block_table"] = table
    if candidates:
        arguments["num_candidate_blocks"] = 2048
    results = sum(t.nbytes for t in dsv41ops.indexer_topk(**arguments))
    assert peak_bytes(arguments) - results < 2**26


def test_scores_do_not_depend_on_the_place() -> None:
    """The same keys in another order, from another rank, and beside other tokens."""
    arguments = random_arguments(1, 2**14, "fp8", topk=2048)
    indices, scores, *_ = dsv41ops.indexer_topk(**arguments)
    parts = []
    table = arguments["block_table"]
    for rank in range(4):
        own = {"dcp_world_size": 4, "dcp_rank": rank, "cp_interleave": PAGE}
        local = table[:, rank::4].contiguous()
        parts.append(dsv41ops.indexer_topk(**{**arguments, "block_table": local}, **own)[:2])
    merged = dsv41ops.merge_topk(*map(torch.stack, zip(*parts, strict=True)), 2048)
    for mine, whole in zip(merged, (indices, scores), strict=True):
        assert torch.equal(as_bits(mine), as_bits(whole))
    many = {
        **arguments,
        **{name: arguments[name].repeat(200, *[1] * (arguments[name].dim() - 1)) for name in
           ("q", "weights", "seq_lens", "block_table")},
        "query_start_loc": torch.arange(201, dtype=torch.int32, device=CUDA),
    }  # fmt: skip
    for mine, whole in zip(dsv41ops.indexer_topk(**many)[:2], (indices, scores), strict=True):
        assert torch.equal(as_bits(mine), as_bits(whole.expand_as(mine)))


@pytest.mark.parametrize("blocks", [0, 64])
def test_one_graph_serves_any_length(blocks: int) -> None:
    """Captured with every length 0."""
    arguments = random_arguments(6, 2**14, "fp8", num_candidate_blocks=blocks)
    arguments["seq_lens"].zero_()
    graph, came = captured(lambda: dsv41ops.indexer_topk(**arguments))
    for lengths in ([1, 0, 5, 600, 2**14, 700], [2**14] * 6, [0] * 6, [511, 512, 513, 64, 7, 4097]):
        arguments["seq_lens"].copy_(ints(lengths, CUDA))
        graph.replay()
        for mine, expected in zip(came, dsv41ops.indexer_topk(**arguments), strict=True):
            assert torch.equal(as_bits(mine), as_bits(expected))


def test_pages_past_two_gib() -> None:
    small = random_arguments(1, 2**12, "fp8")
    pages = 2**12 // PAGE
    first = 2**31 // (PAGE * 132) + 1
    cache = dsv41ops.new_index_cache(first + pages, PAGE, "fp8", CUDA)
    cache[first:] = small["cache"][small["block_table"][0].long()]
    table = torch.arange(first, first + pages, dtype=torch.int32, device=CUDA)[None]
    results = dsv41ops.indexer_topk(**{**small, "cache": cache, "block_table": table})
    for mine, expected in zip(results, dsv41ops.indexer_topk(**small), strict=True):
        assert torch.equal(as_bits(mine), as_bits(expected))


@pytest.mark.parametrize("name", argument_sets("merge_topk"))
def test_merge_equals_the_reference(name: str) -> None:
    arguments = argument_sets("merge_topk")[name](CPU)
    positional, _ = schema_order("merge_topk", arguments)
    on_gpu = [t.to(CUDA) if isinstance(t, Tensor) else t for t in positional]
    for mine, expected in zip(
        overload("merge_topk")(*on_gpu), indexer.merge_topk(*positional), strict=True
    ):
        assert torch.equal(as_bits(mine.cpu()), as_bits(expected))


@pytest.mark.parametrize(("ranks", "width"), [(2, 512), (8, 512), (4, 2048)])
def test_merge_of_many(ranks: int, width: int) -> None:
    indices = torch.randint(-1, 3 * width, (ranks, 7, width), dtype=torch.int32, device=CUDA)
    scores = torch.randint(-999, 1000, (ranks, 7, width), device=CUDA).float()
    for mine, expected in zip(
        dsv41ops.merge_topk(indices, scores, width),
        indexer.merge_topk(indices, scores, width),
        strict=True,
    ):
        assert torch.equal(as_bits(mine), as_bits(expected))
