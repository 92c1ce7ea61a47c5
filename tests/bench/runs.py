"""Made-up measurements, and inputs small enough for the CPU."""

from __future__ import annotations

import torch

from dsv41ops.bench.inputs import Inputs, Prepared
from dsv41ops.bench.problems import DecodeCase, OpCase, Plan
from dsv41ops.bench.results import BenchRun, DecodeResult, OpResult
from dsv41ops.bench.roofline import Roofline
from dsv41ops.bench.timing import Timing

ROOFLINE = Roofline(bytes_per_s=4e12, flops_per_s=800e12)


def timing(us: float) -> Timing:
    return Timing(us, us * 0.9, us * 1.5)


def backend_times(case: DecodeCase, flash_mla: bool) -> dict[str, Timing]:
    """FlashMLA serves one record, slowly at small sizes."""
    times = {"triton": timing(case.num_tokens / 2 + 8)}
    if flash_mla and case.record == "fp8_ds_mla":
        times["flash_mla"] = timing(25.0)
    return times


def made_up_run(flash_mla: bool = True) -> BenchRun:
    cases = [
        DecodeCase(*pair, num_heads, num_tokens)
        for pair in (("fp8_ds_mla", "fp8_ds_mla"), ("mxfp8", "nvfp4"))
        for num_heads in (16, 64)
        for num_tokens in (1, 128)
    ]
    return BenchRun(
        gpu="made-up GPU",
        capability=9,
        torch="2.11.0",
        triton="3.6.0",
        command="python -m dsv41ops.bench --quick",
        roofline=ROOFLINE,
        launch=timing(1.25),
        flash_mla="sgl-flash-mla 1.0.0" if flash_mla else "not compared: not installed",
        backends={"triton": None, "flash_mla": None if flash_mla else "not installed"},
        decode=[
            DecodeResult(
                case, backend_times(case, flash_mla), "triton", 20.0 if flash_mla else None
            )
            for case in cases
        ],
        ops=[
            OpResult(OpCase("token_to_request", 512), timing(2.0)),
            OpResult(OpCase("kv_cache_insert", 512, "mxfp8"), timing(2.5)),
            OpResult(OpCase("merge_attention_states", 64), timing(40.0)),
        ],
    )


class SmallInputs(Inputs):
    """On the CPU, where every backend is the reference."""

    def decode(self, case: DecodeCase, backend: str = "auto") -> Prepared:
        return super().decode(case)


def small_inputs() -> Inputs:
    return SmallInputs(torch.device("cpu"), pool_rows=2048, calls=3, max_tokens=2)


def small_plan() -> Plan:
    decode = tuple(DecodeCase("mxfp8", "nvfp4", 16, T) for T in (1, 2))
    return Plan(decode, (OpCase("topk_to_slots", 2), OpCase("kv_cache_gather", 5, "nvfp4")))
