"""A run as Markdown tables, for the terminal and for ``docs/benchmarks.md`` alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from dsv41ops.bench.problems import TOPK, WINDOW
from dsv41ops.bench.results import BenchRun, DecodeResult, OpResult, gigabytes_per_s, tflops

NONE = "-"


def render(run: BenchRun) -> str:
    """Everything, the overview last: the end of a long output is what stays in sight."""
    parts = [header(run), decode_table(run), ops_table(run), overview(run, "us per call", _us)]
    if any(result.ratio is not None for result in run.decode):
        parts.append(overview(run, "time / FlashMLA's", lambda result: _ratio(result.ratio)))
    return "\n\n".join(parts)


def header(run: BenchRun) -> str:
    return "\n".join(
        [
            f"{run.gpu} | torch {run.torch} | triton {run.triton}",
            f"command: {run.command}",
            f"copy: {run.roofline.bytes_per_s / 1e9:.0f} GB/s read and written",
            f"bf16 matmul: {run.roofline.flops_per_s / 1e12:.0f} TFLOP/s",
            f"empty kernel: {run.launch.us:.2f} us",
            *(f"{name}: {reason or 'serves'}" for name, reason in run.backends.items()),
            f"FlashMLA: {run.flash_mla}",
        ]
    )


def decode_table(run: BenchRun) -> str:
    """``us`` is the time of ``auto``, whose choice has a star in the backends' columns."""
    backends = [name for name in run.backends if any(name in r.times for r in run.decode)]
    columns = (
        "records",
        "H",
        "T",
        "us",
        *backends,
        "TFLOP/s",
        "GB/s",
        "roofline",
        "FlashMLA us",
        "ratio",
    )
    rows = []
    for result in run.decode:
        case, us = result.case, result.timing.us
        rows.append(
            (
                case.pair,
                str(case.num_heads),
                str(case.num_tokens),
                _time(us),
                *(_backend_time(result, backend) for backend in backends),
                f"{tflops(case.work, us):.1f}",
                f"{gigabytes_per_s(case.work, us):.0f}",
                f"{run.share(case.work, us):.0%}",
                NONE if result.flash_mla_us is None else _time(result.flash_mla_us),
                _ratio(result.ratio),
            )
        )
    return f"sparse_mla_decode, window {WINDOW} + top-k {TOPK}\n\n{table(columns, rows, 1)}"


def ops_table(run: BenchRun) -> str:
    columns = ("op", "", "size", "us", "GB/s", "roofline", "empty kernels")
    rows = [_op_row(run, result) for result in run.ops]
    return f"other ops\n\n{table(columns, rows, 2)}"


def _op_row(run: BenchRun, result: OpResult) -> tuple[str, ...]:
    case, us = result.case, result.timing.us
    rates = (NONE, NONE)
    if case.work is not None:
        rates = (f"{gigabytes_per_s(case.work, us):.0f}", f"{run.share(case.work, us):.0%}")
    size = f"{case.letter}={case.size}"
    return case.op, case.detail, size, _time(us), *rates, f"{us / run.launch.us:.2f}"


def overview(run: BenchRun, title: str, cell: Callable[[DecodeResult], str]) -> str:
    """A line per record pair and head count, a column per T."""
    tokens = sorted({result.case.num_tokens for result in run.decode})
    rows = []
    families = groupby(run.decode, key=lambda result: (result.case.pair, result.case.num_heads))
    for (pair, num_heads), results in families:
        cells = {result.case.num_tokens: cell(result) for result in results}
        rows.append((pair, str(num_heads), *(cells.get(T, NONE) for T in tokens)))
    columns = ("records", "H", *(f"T={T}" for T in tokens))
    return f"sparse_mla_decode, {title}\n\n{table(columns, rows, 1)}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], num_text: int) -> str:
    """Aligned Markdown; all but the first ``num_text`` columns are numbers, to the right."""
    widths = [
        max(3, *(len(row[column]) for row in (columns, *rows))) for column in range(len(columns))
    ]
    rule = [
        "-" * width if column < num_text else "-" * (width - 1) + ":"
        for column, width in enumerate(widths)
    ]
    lines = []
    for row in (columns, rule, *rows):
        cells = [
            text.ljust(width) if column < num_text else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _us(result: DecodeResult) -> str:
    return _time(result.timing.us)


def _backend_time(result: DecodeResult, backend: str) -> str:
    if backend not in result.times:
        return NONE
    return _time(result.times[backend].us) + ("*" if backend == result.choice else "")


def _time(us: float) -> str:
    return f"{us:.2f}" if us < 10 else f"{us:.1f}"


def _ratio(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}"
