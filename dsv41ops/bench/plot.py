"""A run as a picture: a column per record pair; the roofline above, FlashMLA's time below."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from dsv41ops.bench.results import BenchRun, DecodeResult, tflops

MARKERS = "osDv^<>p"


def require_matplotlib() -> None:
    """Raise an ImportError that says how to install matplotlib, where it is missing."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ImportError(
            "--plot needs matplotlib: python -m pip install 'dsv41ops[plot]'"
        ) from error


def save(run: BenchRun, path: Path) -> None:
    """Write the picture; its format follows from the file's ending."""
    require_matplotlib()
    # Not pyplot: no display is looked for.
    figures = importlib.import_module("matplotlib.figure")
    pairs = list(dict.fromkeys(result.case.pair for result in run.decode))
    figure = figures.Figure(figsize=(2 + 3.2 * len(pairs), 7.5), layout="constrained")
    grid = figure.subplots(2, len(pairs), squeeze=False, sharex="row", sharey="row")
    for column, pair in enumerate(pairs):
        results = [result for result in run.decode if result.case.pair == pair]
        _draw_roofline(run, results, grid[0, column])
        _draw_comparison(run, results, grid[1, column])
        grid[0, column].set_title(f"{pair} bytes per row")
    roofs = run.roofline
    grid[0, 0].set_ylabel("TFLOP/s")
    grid[1, 0].set_ylabel(_comparison(run)[0])
    grid[1, -1].legend(fontsize=8)
    figure.suptitle(
        f"sparse_mla_decode on {run.gpu}, torch {run.torch}, triton {run.triton}; roofs measured: "
        f"{roofs.bytes_per_s / 1e9:.0f} GB/s, {roofs.flops_per_s / 1e12:.0f} TFLOP/s",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def _lines(run: BenchRun, results: list[DecodeResult]) -> list[tuple[list[DecodeResult], Any]]:
    """Results per head count, and a style that is the same in every panel."""
    heads = sorted({result.case.num_heads for result in run.decode})
    lines = []
    for num_heads, line in groupby(results, key=lambda result: result.case.num_heads):
        number = heads.index(num_heads)
        style = {
            "color": f"C{number}",
            "marker": MARKERS[number % len(MARKERS)],
            "markersize": 4,
            "label": f"H={num_heads}",
        }
        lines.append((list(line), style))
    return lines


def _draw_roofline(run: BenchRun, results: list[DecodeResult], axes: Any) -> None:
    peak, bandwidth = run.roofline.flops_per_s / 1e12, run.roofline.bytes_per_s / 1e12
    intensities = [peak / bandwidth]
    for line, style in _lines(run, results):
        x = [result.case.work.flops / result.case.work.num_bytes for result in line]
        y = [tflops(result.case.work, result.timing.us) for result in line]
        axes.plot(x, y, linestyle="none", **style)
        intensities += x
    roof = [min(intensities) / 2, peak / bandwidth, max(intensities) * 2]
    axes.plot(roof, [min(peak, bandwidth * x) for x in roof], color="black", linewidth=1)
    axes.set(yscale="log", xlabel="FLOP per byte")
    _powers_of_two(axes)


def _comparison(run: BenchRun) -> tuple[str, Callable[[DecodeResult], float | None]]:
    """With FlashMLA, the ratio to it; else the share of the roofline."""
    if any(result.ratio is not None for result in run.decode):
        return "time / FlashMLA's (below 1: faster)", lambda result: result.ratio
    return (
        "share of the roofline (no FlashMLA)",
        lambda result: run.share(result.case.work, result.timing.us),
    )


def _draw_comparison(run: BenchRun, results: list[DecodeResult], axes: Any) -> None:
    _, value = _comparison(run)
    for line, style in _lines(run, results):
        x = [result.case.num_tokens for result in line]
        axes.plot(x, [value(result) for result in line], linewidth=1, **style)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("T")
    _powers_of_two(axes)


def _powers_of_two(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
