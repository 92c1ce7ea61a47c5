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

from dsv41ops import dispatch
from dsv41ops.bench import backend_table, flash_mla, plot, report, roofline
from dsv41ops.bench.check import WrongResultError, verify
from dsv41ops.bench.inputs import Inputs, Prepared
from dsv41ops.bench.problems import DecodeCase, OpCase, Plan, plan
from dsv41ops.bench.progress import Progress
from dsv41ops.bench.results import BenchRun, DecodeResult, OpResult
from dsv41ops.bench.timing import Timing, time_calls
from dsv41ops.configs import AUTO, BACKENDS, DecodeProblem
from dsv41ops.kernels.device import sms_and_capability
from dsv41ops.kernels.flash_mla import library

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
        if args.table:
            run = backend_table.with_fastest(run)
    except (InputError, ImportError) as error:
        print(f"dsv41ops.bench: {error}", file=sys.stderr)
        return 2
    except WrongResultError as error:
        print(f"dsv41ops.bench: wrong result, nothing timed: {error}", file=sys.stderr)
        return 1
    print(report.render(run))
    if args.json:
        args.json.write_text(json.dumps(run.as_json(), indent=1) + "\n")
    if args.table:
        args.table.write_text(backend_table.render(run))
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
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="write what auto chooses a backend by"
    )
    return parser.parse_args(argv)


def command(argv: list[str] | None) -> str:
    return shlex.join([*PROGRAM.split(), *(sys.argv[1:] if argv is None else argv)])


def require(args: argparse.Namespace) -> None:
    """Everything that would otherwise fail at the end of a long run."""
    if not torch.cuda.is_available():
        raise InputError("no CUDA GPU here; every op is timed on one")
    for path in filter(None, (args.json, args.plot, args.table)):
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
    gpu = sms_and_capability(inputs.device)
    problems = {case: case.problem(*gpu) for case in cases.decode}
    able = {case: serving(problem, inputs.device) for case, problem in problems.items()}
    checked = [job for case in cases.checked() for job in jobs(case, able)]
    every: list[DecodeCase | OpCase] = [*cases.decode, *cases.ops]
    timed = [job for case in every for job in jobs(case, able)]
    progress = Progress(len(checked) + 2 * len(rivals) + 1 + len(timed))

    def prepare(case: DecodeCase | OpCase, backend: str) -> Prepared:
        return inputs.decode(case, backend) if isinstance(case, DecodeCase) else inputs.op(case)

    def time_case(case: DecodeCase | OpCase, prepared: Prepared, name: str) -> Timing:
        progress.step(" ".join(filter(None, (name, case.label))))
        return time_calls(prepared.run, inputs.calls, prepared.warm)

    try:
        for case, backend in checked:
            label = " ".join(filter(None, (backend, case.label)))
            progress.step(f"check {label}")
            verify(label, prepare(case, backend))
        try:
            rival_calls = check_flash_mla(op, rivals, inputs, progress)
        except (flash_mla.UnavailableError, WrongResultError) as error:
            rival_calls, flash_mla_note = {}, f"not compared: {error}"
        progress.step("copy, matmul and empty kernel")
        measured = roofline.measure(inputs.device)
        out = torch.zeros(1, device=inputs.device)
        run = BenchRun(
            gpu=torch.cuda.get_device_name(inputs.device),
            capability=gpu[1],
            torch=torch.__version__,
            triton=triton.__version__,
            command=command_line,
            roofline=measured,
            launch=time_calls(lambda i: launch_empty(out), inputs.calls),
            flash_mla=flash_mla_note,
            backends={name: dispatch.refusal(name, inputs.device, None) for name in BACKENDS},
        )
        rival_us = {
            rival: time_case(rival, prepared, "FlashMLA").us
            for rival, prepared in rival_calls.items()
        }
        times: dict[DecodeCase | OpCase, dict[str, Timing]] = {}
        for case, backend in timed:
            timing = time_case(case, prepare(case, backend), backend)
            times.setdefault(case, {})[backend] = timing
        for decode, problem in problems.items():
            choice = dispatch.choose(AUTO, inputs.device, problem)
            rival = rival_us.get(flash_mla.padded_case(decode))
            run.decode.append(DecodeResult(decode, times[decode], choice, rival))
        run.ops += [OpResult(case, times[case][""]) for case in cases.ops]
    finally:
        progress.close()
    return run


def serving(problem: DecodeProblem, device: torch.device) -> list[str]:
    return [name for name in BACKENDS if dispatch.refusal(name, device, problem) is None]


def jobs(
    case: DecodeCase | OpCase, able: dict[DecodeCase, list[str]]
) -> list[tuple[DecodeCase | OpCase, str]]:
    """A case with each backend that can serve it; the other ops have one, without a name."""
    backends = able[case] if isinstance(case, DecodeCase) else [""]
    return [(case, backend) for backend in backends]


def load_flash_mla(device: torch.device) -> tuple[Callable[..., Any] | None, str]:
    """FlashMLA's op and version; or None, and why."""
    try:
        return flash_mla.load(device), library.version()
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
