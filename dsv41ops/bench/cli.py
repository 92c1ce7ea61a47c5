"""Command line of the bench: check, measure the GPU, time every case, report."""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dsv41ops.bench import flash_mla, plot, report, roofline
from dsv41ops.bench.check import WrongResultError, verify
from dsv41ops.bench.inputs import Inputs, Prepared
from dsv41ops.bench.problems import DecodeCase, OpCase, Plan, plan
from dsv41ops.bench.progress import Progress
from dsv41ops.bench.results import BenchRun, DecodeResult, OpResult
from dsv41ops.bench.timing import Timing, time_calls

PROGRAM = "python -m dsv41ops.bench"


class InputError(ValueError):
    """What the user asked for cannot be run; the message is one line."""


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        require(args)
        torch.manual_seed(0)
        inputs = Inputs(torch.device("cuda", torch.cuda.current_device()))
        run = bench(plan(args.quick), inputs, command(argv))
    except (InputError, ImportError) as error:
        print(f"dsv41ops.bench: {error}", file=sys.stderr)
        return 2
    except WrongResultError as error:
        print(f"dsv41ops.bench: wrong result, nothing timed: {error}", file=sys.stderr)
        return 1
    print(report.render(run))
    if args.json:
        args.json.write_text(json.dumps(run.as_json(), indent=1) + "\n")
    if args.plot:
        plot.save(run, args.plot)
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Time every op of dsv41ops on this GPU; docs/benchmarks.md."
    )
    parser.add_argument("--quick", action="store_true", help="a few cases, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the roofline and the ratio to FlashMLA"
    )
    return parser.parse_args(argv)


def command(argv: list[str] | None) -> str:
    return shlex.join([*PROGRAM.split(), *(sys.argv[1:] if argv is None else argv)])


def require(args: argparse.Namespace) -> None:
    """Everything that would otherwise fail at the end of a long run."""
    if not torch.cuda.is_available():
        raise InputError("no CUDA GPU here; every op is timed on one")
    for path in filter(None, (args.json, args.plot)):
        if not path.parent.is_dir():
            raise InputError(f"{path}: no folder {path.parent}")
    if args.plot:
        plot.require_matplotlib()


def bench(cases: Plan, inputs: Inputs, command_line: str) -> BenchRun:
    """Check every family of a plan, then measure the GPU, then time every case."""
    # Here, not above: without a GPU there may be no triton either.
    triton = importlib.import_module("triton")
    from dsv41ops.bench.empty_kernel import launch_empty

    op, flash_mla_note = load_flash_mla(inputs.device)
    rivals = list(dict.fromkeys(map(flash_mla.padded_case, cases.decode))) if op else []
    checked = cases.checked()
    progress = Progress(len(checked) + 2 * len(rivals) + 1 + len(cases.decode) + len(cases.ops))

    def time_case(case: DecodeCase | OpCase, prepared: Prepared, name: str = "") -> Timing:
        progress.step(f"{name}{case.label}")
        return time_calls(prepared.run, inputs.calls, prepared.warm)

    try:
        for case in checked:
            progress.step(f"check {case.label}")
            verify(case.label, inputs.prepare(case))
        try:
            rival_calls = check_flash_mla(op, rivals, inputs, progress)
        except (flash_mla.UnavailableError, WrongResultError) as error:
            rival_calls, flash_mla_note = {}, f"not compared: {error}"
        progress.step("copy, matmul and empty kernel")
        measured = roofline.measure(inputs.device)
        out = torch.zeros(1, device=inputs.device)
        run = BenchRun(
            gpu=torch.cuda.get_device_name(inputs.device),
            torch=torch.__version__,
            triton=triton.__version__,
            command=command_line,
            roofline=measured,
            launch=time_calls(lambda i: launch_empty(out), inputs.calls),
            flash_mla=flash_mla_note,
        )
        rival_us = {
            rival: time_case(rival, prepared, "FlashMLA ").us
            for rival, prepared in rival_calls.items()
        }
        for decode in cases.decode:
            timing = time_case(decode, inputs.decode(decode))
            run.decode.append(
                DecodeResult(decode, timing, rival_us.get(flash_mla.padded_case(decode)))
            )
        for other in cases.ops:
            run.ops.append(OpResult(other, time_case(other, inputs.op(other))))
    finally:
        progress.close()
    return run


def load_flash_mla(device: torch.device) -> tuple[Callable[..., Any] | None, str]:
    """FlashMLA's op and version; or None, and why."""
    try:
        return flash_mla.load(device), flash_mla.version()
    except flash_mla.UnavailableError as error:
        return None, f"not compared: {error}"


def check_flash_mla(
    op: Callable[..., Any] | None, cases: list[DecodeCase], inputs: Inputs, progress: Progress
) -> dict[DecodeCase, Prepared]:
    calls = {}
    for case in cases:
        assert op is not None
        progress.step(f"check FlashMLA {case.label}")
        calls[case] = flash_mla.prepare(op, inputs, case)
        verify(f"FlashMLA {case.label}", calls[case])
    return calls
