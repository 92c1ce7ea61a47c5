"""Timing on a GPU: plausible, and a captured call gives what it gave outside."""

from __future__ import annotations

import pytest
import torch

from dsv41ops.bench.check import verify
from dsv41ops.bench.inputs import Inputs
from dsv41ops.bench.problems import DecodeCase, OpCase
from dsv41ops.bench.timing import time_calls

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_empty_kernel_takes_microseconds() -> None:
    from dsv41ops.bench.empty_kernel import launch_empty

    out = torch.zeros(1, device="cuda")
    timing = time_calls(lambda i: launch_empty(out), calls=40)
    assert 0.1 < timing.us < 20
    assert timing.fastest_us <= timing.us <= timing.slowest_us


@pytest.mark.parametrize(
    "case",
    [
        DecodeCase("mxfp8", "nvfp4", 16, 8),
        OpCase("topk_to_slots", 8),
        OpCase("kv_cache_insert", 8, "mxfp8"),
        OpCase("compress_kv", 8),
        OpCase("indexer_k_insert", 8, "fp8"),
        OpCase("merge_attention_states", 8),
    ],
    ids=lambda case: case.label,
)
def test_case_is_right_and_timed(case: DecodeCase | OpCase) -> None:
    inputs = Inputs(torch.device("cuda", torch.cuda.current_device()), 2**14, 4, 8)
    prepared = inputs.prepare(case)
    verify(case.label, prepared)
    assert 0.1 < time_calls(prepared.run, inputs.calls, prepared.warm).us < 10_000
    verify(case.label, prepared)
