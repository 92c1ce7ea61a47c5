"""Scores and selections of the indexer, and their merge."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import dsv41ops
from dsv41ops.layouts import INDEX_FP8
from dsv41ops.reference.index_keys import decode_index_keys
from tests.indexer_calls import CALLS, SHARDS, Call, best_of, filled_cache
from tests.oracles import Shard
from tests.support import assert_same_bits, ints

CPU = torch.device("cpu")
INF, NAN = torch.inf, torch.nan


def as_lists(results: tuple[Tensor, ...]) -> tuple[list[list[float]], ...]:
    return tuple(result.tolist() for result in results)


@pytest.mark.parametrize("name", CALLS)
def test_oracle(name: str) -> None:
    call = CALLS[name]
    inputs = call.inputs()
    results = dsv41ops.indexer_topk(*call.arguments(inputs, CPU))
    assert as_lists(results) == call.expected(inputs)


@pytest.mark.parametrize("shard", SHARDS, ids=str)
@pytest.mark.parametrize("candidates", [None, 5])
def test_ranks_match_the_oracle_and_merge_to_one(shard: Shard, candidates: int | None) -> None:
    page_size = 16
    one = Call(
        seq_lens=(150, 90, 0),
        page_size=page_size,
        columns=12,
        topk=9,
        num_blocks=5,
        candidates=candidates,
    )
    sharded = replace(one, shard=shard)
    inputs = one.inputs()
    # Every rank has its own pool; its slot of a state holds the one rank's key.
    merged_inputs = []
    for call in sharded.ranks():
        keys, table = inputs["keys"].clone(), inputs["table"]
        for row in range(table.shape[0]):
            for state in range(one.columns * page_size):
                if call.shard.owns(state):
                    local = call.shard.local(state)
                    keys[_slot(row, local, page_size)] = inputs["keys"][
                        int(table[row, state // page_size]) * page_size + state % page_size
                    ]
        own = torch.arange(table.numel(), dtype=torch.int32).view(table.shape)
        merged_inputs.append((call, {**inputs, "keys": keys, "table": own}))
    parts = []
    for call, own_inputs in merged_inputs:
        results = dsv41ops.indexer_topk(*call.arguments(own_inputs, CPU))
        assert as_lists(results) == call.expected(own_inputs)
        parts.append(results)
    states, scores, blocks, block_scores = map(torch.stack, zip(*parts, strict=True))
    expected = dsv41ops.indexer_topk(*one.arguments(inputs, CPU))
    merged = (
        *dsv41ops.merge_topk(states, scores, one.topk),
        *dsv41ops.merge_topk(blocks, block_scores, one.num_blocks),
    )
    for mine, whole in zip(merged, expected, strict=True):
        assert_same_bits(mine, whole)


def _slot(row: int, local: int, page_size: int) -> int:
    return row * 12 * page_size + local


def one_token(keys: Tensor, **extra: object) -> tuple[Tensor, ...]:
    """A token that sees all keys; one head reads column 0."""
    q = torch.zeros(1, 1, 128, dtype=torch.bfloat16)
    q[..., 0] = 1
    num_states = keys.shape[0]
    arguments = {"topk": 3, "compress_ratio": 1, **extra}
    return dsv41ops.indexer_topk(
        q,
        torch.ones(1, 1),
        filled_cache(keys, INDEX_FP8, num_states),
        ints([0, 1], CPU),
        ints([num_states], CPU),
        ints([[0]], CPU),
        **arguments,
    )


def column(*values: float) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(values)[:, None], (0, 127))


def test_ties_go_to_the_lower_state() -> None:
    indices, scores, *_ = one_token(column(1, 2, 1, 3, 1, 0))
    assert indices.tolist() == [[0, 1, 3]]
    assert scores.tolist() == [[1, 2, 3]]


def test_relu_and_no_negative_zero() -> None:
    indices, scores, *_ = one_token(column(-5, -1, 0, -2))
    assert indices.tolist() == [[0, 1, 2]]
    assert_same_bits(scores, torch.zeros(1, 3))


def test_nan_loses_even_where_too_few_are_left() -> None:
    indices, scores, *_ = one_token(column(NAN, 2, NAN, 1))
    assert indices.tolist() == [[1, 3, -1]]
    assert scores.tolist() == [[2, 1, -INF]]


def test_the_newest_block_is_kept_though_its_scores_are_nan() -> None:
    keys = column(9, 1, 5, 5, 2, 3, NAN, NAN)
    _, _, blocks, scores = one_token(keys, num_candidate_blocks=2, candidate_block_size=2)
    assert blocks.tolist() == [[0, 3]]
    assert scores.tolist() == [[9, INF]]


def test_the_newest_block_counts_as_one_of_them() -> None:
    keys = column(9, 1, 5, 5, 2, 3, 0, 0)
    _, _, blocks, scores = one_token(keys, num_candidate_blocks=1, candidate_block_size=2)
    assert blocks.tolist() == [[3]]
    assert scores.tolist() == [[INF]]


def test_infinite_scores_are_scores() -> None:
    keys = torch.tensor([[1.0, 0], [0, 1], [1, 1], [0, 0]])
    q = torch.tensor([[[1.0, 0], [0, 1]]]).bfloat16()
    arguments = (
        torch.nn.functional.pad(q, (0, 126)),
        torch.tensor([[INF, -INF]]),
        filled_cache(torch.nn.functional.pad(keys, (0, 126)), INDEX_FP8, 4),
        ints([0, 1], CPU),
        ints([4], CPU),
        ints([[0]], CPU),
    )
    # inf * 0 is NaN: nothing is left. With a finite weight beside it, infinities order scores.
    assert dsv41ops.indexer_topk(*arguments, 2, 1)[0].tolist() == [[-1, -1]]
    huge = torch.tensor([[3e38, -3e38]])
    indices, scores, *_ = dsv41ops.indexer_topk(arguments[0] * 4, huge, *arguments[2:], 4, 1)
    assert indices.tolist() == [[0, 1, 2, 3]]
    assert scores.tolist() == [[INF, -INF, 0, 0]]


@pytest.mark.parametrize("record", ["fp8", "mxfp4"])
def test_scores_of_random_keys(record: str) -> None:
    call = Call(record=record, heads=32, topk=48)
    inputs = call.inputs()
    inputs["keys"] = torch.randn(inputs["keys"].shape)
    arguments = list(call.arguments(inputs, CPU))
    arguments[0] = torch.randn(arguments[0].shape).bfloat16()
    indices, scores, *_ = dsv41ops.indexer_topk(*arguments)
    keys = decode_index_keys(arguments[2], torch.arange(160)).double()
    products = (arguments[0].double() @ keys.T).clamp(min=0)
    expected = (products * arguments[1].double()[:, :, None]).sum(1)
    for token, request in enumerate((0, 1, 1, 1)):
        states = indices[token][indices[token] >= 0].long()
        slots = arguments[5][request, states // 4].long() * 4 + states % 4
        torch.testing.assert_close(
            scores[token, : len(states)].double(), expected[token, slots], rtol=1e-6, atol=1e-6
        )


def merged(lists: list[list[tuple[int, float]]], topk: int) -> tuple[list[int], list[float]]:
    indices = ints([[[number for number, _ in entries]] for entries in lists], CPU)
    scores = torch.tensor([[[score for _, score in entries]] for entries in lists])
    numbers, of_numbers = dsv41ops.merge_topk(indices, scores, topk)
    return numbers[0].tolist(), of_numbers[0].tolist()


def test_merge_by_hand() -> None:
    lists = [[(5, 1.0), (-1, 9.0), (7, 3.0)], [(6, 1.0), (5, 2.0), (0, NAN)]]
    assert merged(lists, 2) == ([5, 7], [2.0, 3.0])
    assert merged(lists, 5) == ([5, 6, 7, -1, -1], [2.0, 1.0, 3.0, -INF, -INF])
    assert merged([[(3, -INF), (2, -INF)]], 1) == ([2], [-INF])
    assert merged([[(3, INF), (2, 0.0)], [(1, INF), (2, -0.0)]], 2) == ([1, 3], [INF, INF])


@pytest.mark.parametrize("topk", [1, 7, 60])
def test_merge_is_the_best_of_all(topk: int) -> None:
    indices = torch.randint(-1, 40, (4, 3, 12), dtype=torch.int32)
    scores = torch.randint(-3, 4, (4, 3, 12)).float()
    numbers, of_numbers = dsv41ops.merge_topk(indices, scores, topk)
    for token in range(3):
        entries: dict[int, float] = {}
        for number, score in zip(
            indices[:, token].flatten().tolist(), scores[:, token].flatten().tolist(), strict=True
        ):
            if number >= 0:
                entries[number] = max(score, entries.get(number, -INF))
        assert (numbers[token].tolist(), of_numbers[token].tolist()) == best_of(entries, topk)
