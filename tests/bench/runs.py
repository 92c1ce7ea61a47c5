"""Made-up measurements, and inputs small enough for the CPU."""

from __future__ import annotations

import torch

from dsv41ops.bench.inputs import Inputs
from dsv41ops.bench.problems import DecodeCase, OpCase, Plan
from dsv41ops.bench.results import BenchRun, DecodeResult, OpResult
from dsv41ops.bench.roofline import Roofline
from dsv41ops.bench.timing import Timing

ROOFLINE = Roofline(bytes_per_s=4e12, flops_per_s=800e12)


def timing(us: float) -> Timing:
    return Timing(us, us * 0.9, us * 1.5)


def made_up_run(flash_mla: bool = True) -> BenchRun:
    cases = [
        DecodeCase(*pair, num_heads, num_tokens)
        for pair in (("fp8_ds_mla", "fp8_ds_mla"), ("mxfp8", "nvfp4"))
        for num_heads in (16, 64)
        for num_tokens in (1, 128)
    ]
    return BenchRun(
        gpu="made-up GPU",
        torch="2.11.0",
        triton="3.6.0",
        command="python -m dsv41ops.bench --quick",
        roofline=ROOFLINE,
        launch=timing(1.25),
        flash_mla="sgl-flash-mla 1.0.0" if flash_mla else "not compared: not installed",
        decode=[
            DecodeResult(case, timing(case.num_tokens / 2 + 8), 20.0 if flash_mla else None)
            for case in cases
        ],
        ops=[
            OpResult(OpCase("token_to_request", 512), timing(2.0)),
            OpResult(OpCase("kv_cache_insert", 512, "mxfp8"), timing(2.5)),
            OpResult(OpCase("merge_attention_states", 64), timing(40.0)),
        ],
    )


def small_inputs() -> Inputs:
    return Inputs(torch.device("cpu"), pool_rows=2048, calls=3, max_tokens=2)


def small_plan() -> Plan:
    decode = tuple(DecodeCase("mxfp8", "nvfp4", 16, T) for T in (1, 2))
    return Plan(decode, (OpCase("topk_to_slots", 2), OpCase("kv_cache_gather", 5, "nvfp4")))
