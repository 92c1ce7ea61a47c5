"""``python -m graphs.measure``: time of one decode step by tokens and context, and where it goes.

Every request decodes one token at the end of a context that the caches already hold (random rows:
what they say does not matter for the time). One captured CUDA graph per size. The table shows the
median of the replays, launches, the share of each kind of kernel (by torch's profiler), and the
indexer's time beside its memory floor: one pass over the index keys that it scores.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dsv41ops.bench.plot import require_matplotlib
from dsv41ops.bench.roofline import copy_bandwidth
from dsv41ops.bench.timing import time_region
from dsv41ops.capture import GraphRunner
from dsv41ops.layouts import INDEX_FP8, MXFP8, record_of
from graphs.batch import CacheGeometry, StepInputs
from graphs.config import ModelConfig, load_config
from graphs.model import DecodeModel
from graphs.weights import randomise

TOKENS = (1, 8, 32, 128)
CONTEXTS = (4096, 65536, 524288)
REPLAYS = 20
# Kinds of kernels by parts of their names; the first that fits.
KINDS = {
    "attention": ("sparse_mla_decode",),
    "indexer": (
        "_indexer_scores",
        "_indexer_topk",
        "_indexer_merge",
        "_merge_topk",
        "_merge_lists",
    ),
    "caches and indices": ("_insert", "compress_kv", "topk_to_slots", "decode_metadata"),
    "projections": ("gemm", "nvjet", "cutlass", "splitK", "gemv"),
}
OTHER = "norms and others"


@dataclass(frozen=True)
class Measured:
    """One size; times in microseconds."""

    tokens: int
    context: int
    step_us: float
    launches: int
    kinds_us: dict[str, float]
    indexer_floor_us: float


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m graphs.measure", description=__doc__)
    parser.add_argument("--config", default="flash", help="small, flash, or a JSON file")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("graphs.measure: needs a CUDA device, there is none here", file=sys.stderr)
        return 2
    if args.plot:
        try:
            require_matplotlib()
        except ImportError as error:
            print(f"graphs.measure: {error}", file=sys.stderr)
            return 2
    config = load_config(args.config)
    rows = []
    with torch.inference_mode():
        bandwidth = copy_bandwidth(torch.device("cuda"))
        print(f"{torch.cuda.get_device_name()}, {bandwidth / 1e9:.0f} GB/s by copying")
        model = build(config, max(args.tokens), max(args.contexts))
        print_header()
        for context in args.contexts:
            for tokens in args.tokens:
                rows.append(measure(model, tokens, context, bandwidth))
                print_row(rows[-1], config.num_hidden_layers)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if args.plot:
        plot(rows, args.plot)
    return 0


def build(config: ModelConfig, tokens: int, context: int) -> DecodeModel:
    """bfloat16 weights, and caches for the largest size with something in every row."""
    block_size, swa_page_size = 64, 32
    geometry = CacheGeometry(
        max_requests=tokens,
        max_positions=context,
        num_pages=tokens * -(-context // block_size),
        num_swa_pages=tokens * (config.sliding_window // swa_page_size + 1),
        block_size=block_size,
        swa_page_size=swa_page_size,
    )
    with torch.device("cuda"):
        model = DecodeModel(config, geometry, dtype=torch.bfloat16)
        randomise(model, 0)
    for layer in range(config.num_hidden_layers):
        attention = model.attention(layer)
        fill_records(attention.swa_cache)
        if layer in config.kv_source_layer_ids:
            fill_records(attention.cache)
            fill_index_keys(attention.index_keys)
    return model


def fill_records(cache: Tensor) -> None:
    """Rows of mxfp8 or nvfp4: random values, scales near 1."""
    record = record_of(cache)
    rows = random_bytes(1024, record.row_bytes)
    rows[:, record.data_bytes :] = 127 if record is MXFP8 else 0x38  # 2^0 and e4m3's 1
    pages = max(1, len(rows) // cache.shape[1])
    repeat(cache, rows[: pages * cache.shape[1]].view(pages, *cache.shape[1:]))


def fill_index_keys(cache: Tensor) -> None:
    """All rows' e4m3 first, then all rows' scales."""
    page_size = cache.shape[1]
    pages = random_bytes(64, page_size * INDEX_FP8.row_bytes)
    scales = torch.tensor([0, 0, 0, 0x3E], device="cuda").repeat(page_size)
    pages[:, page_size * INDEX_FP8.data_bytes :] = scales
    repeat(cache, pages.view(64, *cache.shape[1:]))


def random_bytes(*shape: int) -> Tensor:
    """No e4m3 NaN among them."""
    return torch.randint(256, shape, dtype=torch.uint8, device="cuda") & 0xF7


def repeat(cache: Tensor, pages: Tensor) -> None:
    for start in range(0, len(cache), len(pages)):
        cache[start : start + len(pages)] = pages[: len(cache) - start]


def measure(model: DecodeModel, tokens: int, context: int, bandwidth: float) -> Measured:
    runner = GraphRunner(model, {tokens: step_inputs(model, tokens, context)})
    times = time_region(lambda: runner.run(tokens), REPLAYS, before=torch.cuda.synchronize)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        runner.run(tokens)
        torch.cuda.synchronize()
    kinds: Counter[str] = Counter()
    launches = 0
    for event in profiler.key_averages():
        if event.self_device_time_total > 0:  # not a call of the runtime
            kinds[kind_of(event.key)] += event.self_device_time_total
            launches += event.count
    floor = tokens * index_keys(model.config, context) * INDEX_FP8.row_bytes / bandwidth * 1e6
    return Measured(tokens, context, statistics.median(times), launches, dict(kinds), floor)


def step_inputs(model: DecodeModel, tokens: int, context: int) -> StepInputs:
    """One token per request, at the end of its context, in pages of its own."""
    geometry = model.geometry
    pages = -(-context // geometry.block_size)
    swa_width = -(-context // geometry.swa_page_size)
    swa_held = geometry.num_swa_pages // geometry.max_requests
    with torch.device("cuda"):
        order = torch.randperm(geometry.num_pages)[: tokens * pages]
        swa_table = torch.full((tokens, swa_width), -1, dtype=torch.int32)
        swa_pages = torch.arange(tokens * swa_held, dtype=torch.int32).view(tokens, swa_held)
        held = min(swa_held, swa_width)
        swa_table[:, swa_width - held :] = swa_pages[:, :held]
        return StepInputs(
            token_ids=torch.randint(model.config.vocab_size, (tokens,)),
            query_start_loc=torch.arange(tokens + 1, dtype=torch.int32),
            seq_lens=torch.full((tokens,), context, dtype=torch.int32),
            request_slots=torch.arange(tokens),
            swa_block_table=swa_table,
            block_table=order.view(tokens, pages).int(),
        )


def index_keys(config: ModelConfig, context: int) -> int:
    """That the indexers of a step score for one token."""
    total = 0
    for layer in config.index_source_layer_ids:
        states = context // config.ratio(layer)
        if layer > config.candidate_source_layer_id:
            states = min(states, config.candidate_topk_blocks * config.candidate_block_size)
        total += states
    return total


def kind_of(kernel: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(p in kernel for p in parts)), OTHER)


def print_header() -> None:
    kinds = "".join(f"{kind:>21}" for kind in (*KINDS, OTHER))
    sizes = f"{'context':>8} {'T':>4} {'ms/step':>8} {'launches':>8} {'per layer':>9}"
    print(f"{sizes}{kinds} {'floor':>8}")


def print_row(row: Measured, num_layers: int) -> None:
    total = sum(row.kinds_us.values())
    kinds = "".join(
        f"{row.kinds_us.get(kind, 0) / 1e3:>14.2f} ({row.kinds_us.get(kind, 0) / total:>3.0%})"
        for kind in (*KINDS, OTHER)
    )
    print(
        f"{row.context:>8} {row.tokens:>4} {row.step_us / 1e3:>8.2f} {row.launches:>8} "
        f"{row.launches / num_layers:>9.1f}{kinds} {row.indexer_floor_us / 1e3:>8.2f}",
        flush=True,
    )


def plot(rows: list[Measured], path: Path) -> None:
    """A panel per context: where a step's time goes, stacked; the indexer's floor as a line."""
    require_matplotlib()
    figures = importlib.import_module("matplotlib.figure")
    contexts = list(dict.fromkeys(row.context for row in rows))
    figure = figures.Figure(figsize=(4 * len(contexts), 4.5), layout="constrained")
    panels = figure.subplots(1, len(contexts), squeeze=False)[0]
    for axes, context in zip(panels, contexts, strict=True):
        found = [row for row in rows if row.context == context]
        names = [str(row.tokens) for row in found]
        below = [0.0] * len(found)
        for kind in ("indexer", *(kind for kind in (*KINDS, OTHER) if kind != "indexer")):
            heights = [row.kinds_us.get(kind, 0) / 1e3 for row in found]
            axes.bar(names, heights, bottom=below, label=kind)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        floors = [row.indexer_floor_us / 1e3 for row in found]
        axes.plot(names, floors, "k_", markersize=24, label="indexer's memory floor")
        axes.set_title(f"context {context}")
        axes.set_xlabel("tokens")
        axes.set_ylabel("ms of kernels per step")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
