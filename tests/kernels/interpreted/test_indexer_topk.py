"""The kernels against the reference, bit for bit: the scores of small integers are exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv41ops import configs
from dsv41ops.kernels.triton import indexer_topk as kernels
from dsv41ops.kernels.triton.indexer_topk import launch_indexer_topk
from dsv41ops.reference.indexer import indexer_topk
from tests.indexer_calls import CALLS, SHARDS, Call
from tests.kernels.interpreted.batches import BATCHES, CPU, Batch
from tests.oracles import Shard
from tests.reference.test_large_strides import far_apart
from tests.support import assert_same_bits, ints


def check(*arguments: Any) -> None:
    expected = indexer_topk(*arguments)
    for mine, reference in zip(launch_indexer_topk(*arguments), expected, strict=True):
        assert_same_bits(mine, reference)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles, lists and shares so small that a few hundred states overflow all of them."""
    for name, value in (("ROWS", 16), ("TILES", 2), ("MIN_ROWS", 32), ("PROGRAMS_PER_SM", 1)):
        monkeypatch.setattr(configs, f"INDEXER_{name}", value)
    monkeypatch.setattr(configs, "MERGE_ENTRIES", 64)


def set_sms(monkeypatch: pytest.MonkeyPatch, num_sms: int) -> None:
    monkeypatch.setattr(kernels, "sms_and_capability", lambda device: (num_sms, 9))


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    call = CALLS[name]
    check(*call.arguments(call.inputs(), CPU))


@pytest.mark.parametrize("shard", SHARDS, ids=str)
@pytest.mark.parametrize("block_size", [3, 8, 16])
def test_shards(shard: Shard, block_size: int) -> None:
    for candidates, rank in ((None, 0), (7, shard.world - 1)):
        call = Call(
            seq_lens=(150, 333, 0),
            page_size=16,
            holes=True,
            topk=9,
            num_blocks=5,
            candidates=candidates,
            block_size=block_size,
            shard=replace(shard, rank=rank),
        )
        check(*call.arguments(call.inputs(), CPU))


@pytest.mark.parametrize("batch", BATCHES)
def test_batches(batch: Batch) -> None:
    call = Call(num_tokens=batch.num_tokens, seq_lens=batch.seq_lens, num_blocks=3, topk=6)
    arguments = list(call.arguments(call.inputs(), CPU))
    arguments[3:5] = batch.geometry()
    arguments[5] = batch.table()
    check(*arguments)


@pytest.mark.parametrize("num_sms", [1, 6, 30])
@pytest.mark.parametrize("spread", [0, 1])
def test_many_states(
    small: None, monkeypatch: pytest.MonkeyPatch, num_sms: int, spread: int
) -> None:
    """One share and many; lists that are shortened; one level of merging and two; many ties."""
    set_sms(monkeypatch, num_sms)
    for extra in ({}, {"num_blocks": 21}, {"candidates": 50, "num_blocks": 6}):
        call = Call(
            starts=(0, 1, 2),
            seq_lens=(330, 190),
            num_tokens=2,
            page_size=16,
            num_pages=30,
            columns=21,
            topk=17,
            block_size=4,
            spread=spread,
            **extra,
        )
        check(*call.arguments(call.inputs(), CPU))


def test_takes_turns(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than are served at a time."""
    monkeypatch.setattr(configs, "INDEXER_MAX_TOKENS", 2)
    call = Call(num_blocks=2, candidates=5)
    check(*call.arguments(call.inputs(), CPU))


def test_release_sizes() -> None:
    call = Call(
        starts=(0, 1),
        seq_lens=(1500,),
        num_tokens=1,
        heads=32,
        page_size=64,
        columns=25,
        topk=512,
        num_blocks=2048,
        candidates=2048,
    )
    inputs = call.inputs()
    check(*replace(call, candidates=None).arguments({**inputs, "blocks": None}, CPU))
    # Ascending: the interpreter takes minutes to sort so many.
    inputs["blocks"] = torch.arange(2048, dtype=torch.int32)[None]
    check(*replace(call, num_blocks=0).arguments(inputs, CPU))


@pytest.mark.parametrize("heads", [16, 33, 64])
def test_heads(heads: int) -> None:
    call = Call(heads=heads)
    check(*call.arguments(call.inputs(), CPU))


@pytest.mark.parametrize("record", ["fp8", "mxfp4"])
def test_nan_keys(record: str) -> None:
    call = Call(record=record, num_blocks=2, topk=40)
    inputs = call.inputs()
    inputs["keys"] = inputs["keys"].float()
    inputs["keys"][torch.rand(len(inputs["keys"])) < 0.4, 77] = torch.nan
    check(*call.arguments(inputs, CPU))


@pytest.mark.parametrize("exponent", [-100, -40, 60, 100])
def test_queries_of_any_size(exponent: int) -> None:
    call = Call(topk=30)
    arguments = list(call.arguments(call.inputs(), CPU))
    arguments[0] = arguments[0] * 2.0**exponent
    arguments[0][:, 1] *= 2.0**-6
    check(*arguments)


def test_unequal_scales_of_a_key() -> None:
    """mxfp4: each group of 32 has its own; the largest of them sets the key's."""
    call = Call(record="mxfp4", topk=30)
    inputs = call.inputs()
    scales = torch.exp2(torch.randint(-9, 10, (len(inputs["keys"]), 4))).repeat_interleave(32, 1)
    inputs["keys"] = inputs["keys"] * scales
    check(*call.arguments(inputs, CPU))


def test_far_rows() -> None:
    call = Call(candidates=6, num_blocks=2)
    arguments = list(call.arguments(call.inputs(), CPU))
    expected = indexer_topk(*arguments)
    for place in (1, 5, 8):
        arguments[place] = far_apart(arguments[place].contiguous(), 2**30 + 4)
    for mine, reference in zip(launch_indexer_topk(*arguments), expected, strict=True):
        assert_same_bits(mine, reference)


def test_hostile_tables_and_candidates() -> None:
    call = Call(candidates=6, num_blocks=2)
    arguments = list(call.arguments(call.inputs(), CPU))
    arguments[5] = ints([[2**31 - 1, 40, 3, -(2**31), 39, 2]] * 3, CPU)
    arguments[8] = ints([[2**31 - 1, -(2**31), 2, 2**28, 0, 4]] * 5, CPU)
    arguments[4] = ints([2**31 - 1, 2**31 - 2, -(2**31)], CPU)
    check(*arguments)
    check(*arguments[:8], None, *arguments[9:])


def test_the_share_of_a_token_follows_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the table's width and the number of programs, results are the same."""
    call = Call(seq_lens=(2000, 33, 0), page_size=16, num_pages=130, columns=128, topk=20)
    inputs = call.inputs()
    results = []
    for num_sms in (1, 20, 132):
        set_sms(monkeypatch, num_sms)
        results.append(launch_indexer_topk(*call.arguments(inputs, CPU)))
    for other in results[1:]:
        for mine, first in zip(other, results[0], strict=True):
            assert_same_bits(mine, first)
