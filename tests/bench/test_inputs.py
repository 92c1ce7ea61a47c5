"""Inputs of every kind of case on the CPU, where the ops are the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv41ops.bench.check import WrongResultError, verify
from dsv41ops.bench.inputs import MERGE_BYTES, Prepared
from dsv41ops.bench.problems import INDEX_OPS, ROW_OPS, DecodeCase, OpCase
from tests.bench.runs import small_inputs

CASES = [
    DecodeCase("fp8_ds_mla", "fp8_ds_mla", 8, 2),
    DecodeCase("mxfp8", "nvfp4", 3, 1),
    *(OpCase(op, size) for op in INDEX_OPS for size in (1, 2)),
    *(
        OpCase(op, 70, record)
        for op in ROW_OPS
        for record in ("fp8_ds_mla", "mxfp8", "nvfp4", "bf16")
    ),
    OpCase("compress_kv", 70),
    *(OpCase("indexer_k_insert", 70, record) for record in ("fp8", "mxfp4")),
    OpCase("merge_attention_states", 2),
    OpCase("merge_topk", 2),
    *(OpCase("indexer_topk", 2, record, 900) for record in ("fp8", "mxfp4")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_every_set_runs_and_agrees(case: DecodeCase | OpCase, one_thread: None) -> None:
    inputs = small_inputs()
    prepared = inputs.prepare(case)
    verify(case.label, prepared)
    for i in range(inputs.calls):
        prepared.run(i)


def test_rows_of_one_call_are_distinct() -> None:
    inputs = small_inputs()
    for indices in (inputs.window_indices, inputs.topk_indices):
        for one_set in indices:
            assert len(one_set.unique()) == one_set.numel()
        assert indices.min() >= 0
        assert indices.max() < inputs.pool_rows
        assert len({tuple(one_set.flatten().tolist()) for one_set in indices}) == inputs.calls


def test_merge_rotates_over_more_than_l2() -> None:
    work = OpCase("merge_attention_states", 512).work
    assert work is not None
    assert 2 * work.num_bytes <= MERGE_BYTES


def test_unwritten_and_wrong_results_are_found() -> None:
    right = torch.randn(4, 512).bfloat16()
    close = Prepared(run=lambda i: right, reference=lambda i: right.clone(), exact=False)
    verify("close", close)
    unwritten = replace(close, run=lambda i: torch.empty_like(right))
    wrong = replace(close, run=lambda i: right * 1.02)
    other = replace(close, run=lambda i: right[:2])
    inexact = replace(close, run=lambda i: right + 2**-9, exact=True)
    for prepared in (unwritten, wrong, other, inexact):
        with pytest.raises(WrongResultError, match="case, result 0: "):
            verify("case", prepared)
    assert not torch.are_deterministic_algorithms_enabled()
