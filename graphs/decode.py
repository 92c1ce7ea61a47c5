"""``python -m graphs.decode``: a DeepSeek-V4.1 attention stack as a compiled decode loop.

Runs a request trace through continuous batching, every step padded to a fixed bucket and run by
one compiled graph, on CUDA also one captured CUDA graph per bucket, and compares what came out
with a dense float64 reference.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import sysconfig
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from dsv41ops.capture import GraphRunner, pick_bucket
from graphs.batch import CacheGeometry, StepInputs
from graphs.check import Checker, Comparison
from graphs.config import ConfigError, ModelConfig, load_config
from graphs.dense import DenseReference
from graphs.model import DecodeModel, StepOutputs
from graphs.scheduler import (
    Request,
    Scheduled,
    Scheduler,
    StepBuffers,
    make_requests,
    swa_pages_per_request,
)
from graphs.trace import TraceError, TraceRow, read_trace, sample_trace
from graphs.weights import randomise

BUCKETS = (8, 64)  # tokens of a step, padded up
MAX_REQUESTS = 8
NUM_CHECKED_REQUESTS = 5
# bf16 queries and outputs give 4e-3 on the recorded stack; a wrong row, far more.
TOLERANCE = 1e-2


class InputError(ValueError):
    """What the user asked for cannot be run; the message is one line."""


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        config = load_config(args.config)
        rows = read_trace(Path(args.trace)) if args.trace else sample_trace(seed=args.seed)
        rows = rows[: args.requests]
        geometry = plan_geometry(config, rows, args.pool_tokens)
        device = pick_device(args.device)
        check_memory(config, geometry, device)
    except (ConfigError, TraceError, InputError) as error:
        print(f"graphs.decode: {error}", file=sys.stderr)
        return 2
    with torch.no_grad():
        return run(config, geometry, rows, device, args.seed, args.compile)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m graphs.decode", description=__doc__)
    parser.add_argument("--config", default="small", help="small, flash, or a JSON file")
    parser.add_argument(
        "--trace", help="CSV with TIMESTAMP,ContextTokens,GeneratedTokens (default: a small one)"
    )
    parser.add_argument("--requests", type=positive, help="only the trace's first N requests")
    parser.add_argument(
        "--pool-tokens",
        type=positive,
        default=1024,
        help="tokens that the compressed page pool holds (default: %(default)s)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if present")
    parser.add_argument(
        "--no-compile",
        dest="compile",
        action="store_false",
        help="run the step without torch.compile; on CUDA it is captured all the same",
    )
    parser.add_argument("--seed", type=int, default=0, help="weights, prompts, sample trace")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text}")
    return value


def plan_geometry(config: ModelConfig, rows: list[TraceRow], pool_tokens: int) -> CacheGeometry:
    """Cache sizes for a trace; a request that could never start is an error."""
    block_size = CacheGeometry.block_size
    num_pages = pool_tokens // block_size
    for row in rows:
        if row.num_positions > num_pages * block_size:
            raise InputError(
                f"{row.where}: needs {row.num_positions} tokens, the pool holds "
                f"{num_pages * block_size} (--pool-tokens)"
            )
    swa_pages = swa_pages_per_request(
        config.sliding_window, CacheGeometry.swa_page_size, BUCKETS[-1]
    )
    return CacheGeometry(
        max_requests=MAX_REQUESTS,
        max_positions=max(row.num_positions for row in rows),
        num_pages=num_pages,
        num_swa_pages=MAX_REQUESTS * swa_pages,
    )


def pick_device(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: no CUDA device here")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def check_memory(config: ModelConfig, geometry: CacheGeometry, device: torch.device) -> None:
    """Refuse a model that cannot fit, before allocating it."""
    with torch.device("meta"):
        model = DecodeModel(config, geometry)
    tensors = (*model.parameters(), *model.buffers())
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > 0.7 * available:
        raise InputError(
            f"the model needs {needed / 2**30:.1f} GiB, {device} has {available / 2**30:.1f} GiB"
        )


def pick_backend(device: torch.device) -> str:
    """inductor where it can compile; else the same graph without code generation."""
    if device.type == "cuda":
        return "inductor"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    reason = None
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        reason = "no C++ compiler on this machine"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        reason = reason or "no Python headers on this machine"
    if reason is None:
        return "inductor"
    print(f"{reason}: running the graph with aot_eager instead of inductor")
    return "aot_eager"


Step = Callable[[StepInputs], StepOutputs]
RunBucket = Callable[[int], StepOutputs]  # a bucket whose inputs are filled


def run(
    config: ModelConfig,
    geometry: CacheGeometry,
    rows: list[TraceRow],
    device: torch.device,
    seed: int,
    compiled: bool,
) -> int:
    backend = pick_backend(device) if compiled else "eager step"
    with torch.device(device):
        model = DecodeModel(config, geometry)
    randomise(model, seed)
    requests = make_requests(rows, config.vocab_size, seed)
    checker = Checker(sample_requests(requests))
    buffers = {bucket: StepBuffers(bucket, geometry, device) for bucket in BUCKETS}
    counters.clear()
    step: Step = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
    print(f"device {device}, {config.num_hidden_layers} layers, {len(requests)} requests")
    print(f"warming up ({backend}; a compile takes a minute or two) ...", flush=True)
    started = time.perf_counter()
    try:
        warm_up(step, buffers)
        warm_up_seconds = time.perf_counter() - started
        compiles = counters["stats"]["unique_graphs"]
        print(f"warm after {warm_up_seconds:.0f} s", flush=True)
        run_bucket, num_captured = capture(step, buffers, device)
        loop = DecodeLoop(
            run_bucket,
            buffers,
            Scheduler(requests, geometry, config.sliding_window, BUCKETS[-1]),
            checker,
        )
        loop.run(sum(request.num_positions for request in requests))
    except torch._dynamo.exc.TorchDynamoException as error:
        print(f"graphs.decode: graph break: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    weights = dict(model.named_parameters())
    print(f"comparing {len(checker.history)} requests with the dense float64 reference ...")
    reference = DenseReference(config, weights, *model.cache_dtypes)
    comparison = checker.compare(config, dict(weights), reference)
    recompiles = counters["stats"]["unique_graphs"] - compiles
    breaks = sum(counters["graph_break"].values())
    made = {
        "compiles": f"{compiles} ({backend}, {warm_up_seconds:.0f} s)",
        "graph breaks": f"{breaks}",
        "recompiles after warm-up": f"{recompiles}",
        "captured CUDA graphs": f"{num_captured}",
    }
    print_table(loop, comparison, made)
    return judge(comparison, breaks, recompiles)


def sample_requests(requests: list[Request]) -> list[Request]:
    """A few requests spread over the trace, the longest among them."""
    longest = max(requests, key=lambda request: request.num_positions)
    stride = -(-len(requests) // NUM_CHECKED_REQUESTS)
    return list({longest: None, **dict.fromkeys(requests[::stride])})


def warm_up(step: Step, buffers: dict[int, StepBuffers]) -> None:
    """Compile once for any number of tokens, by a batch that is all padding."""
    for bucket in buffers.values():
        torch._dynamo.mark_dynamic(bucket.inputs.token_ids, 0)
        step(bucket.fill([]))


def capture(
    step: Step, buffers: dict[int, StepBuffers], device: torch.device
) -> tuple[RunBucket, int]:
    """How to run a filled bucket, and the number of captured graphs: one per bucket on CUDA."""
    inputs = {size: bucket.inputs for size, bucket in buffers.items()}
    if device.type == "cuda":
        runner = GraphRunner(step, inputs, device)
        return runner.run, len(runner.sizes)
    return lambda bucket: step(inputs[bucket]), 0


class DecodeLoop:
    """Schedule, fill a bucket, step; the sampled token stays on the device for the next step."""

    def __init__(
        self,
        run_bucket: RunBucket,
        buffers: dict[int, StepBuffers],
        scheduler: Scheduler,
        checker: Checker,
    ) -> None:
        self.run_bucket, self.buffers = run_bucket, buffers
        self.scheduler, self.checker = scheduler, checker
        self.num_steps = self.num_tokens = 0
        self.seconds: defaultdict[int, list[float]] = defaultdict(list)  # of each bucket's steps
        self.mixes: Counter[str] = Counter()

    def run(self, total_tokens: int) -> None:
        while plan := self.scheduler.next_step():
            num_tokens = sum(part.num_tokens for part in plan)
            bucket = pick_bucket(self.buffers, num_tokens)
            started = time.perf_counter()
            self.buffers[bucket].fill(plan)
            outputs = self.run_bucket(bucket)
            if outputs.next_token.is_cuda:
                torch.cuda.synchronize()
            self.seconds[bucket].append(time.perf_counter() - started)
            self.checker.record(self.num_steps, plan, outputs)  # a replay overwrites the outputs
            self.mixes[name_mix(plan)] += 1
            self.num_steps += 1
            self.num_tokens += num_tokens
            self.scheduler.finish_step(plan)
            show_progress(self.num_tokens, total_tokens, self.num_steps)


def name_mix(plan: list[Scheduled]) -> str:
    decodes = sum(part.request.is_decoding for part in plan)
    if decodes == len(plan):
        return "decode"
    return "mixed" if decodes else "prompt"


def show_progress(done: int, total: int, step: int) -> None:
    if sys.stdout.isatty():
        bar = "#" * (30 * done // total)
        end = "\n" if done == total else ""
        print(f"\r[{bar:30}] {done}/{total} tokens, step {step}", end=end, flush=True)
    elif done == total or step % 50 == 0:
        print(f"step {step}: {done}/{total} tokens", flush=True)


def print_table(loop: DecodeLoop, comparison: Comparison, made: dict[str, str]) -> None:
    def join(values: Mapping[Any, object]) -> str:
        return ", ".join(f"{name} {value}" for name, value in sorted(values.items()))

    seconds = loop.seconds
    medians = {size: f"{1e3 * statistics.median(times):.2f}" for size, times in seconds.items()}
    table = {
        "steps": f"{loop.num_steps}",
        "tokens": f"{loop.num_tokens}",
        "steps by batch mix": join(loop.mixes),
        "steps by bucket": join({size: len(times) for size, times in seconds.items()}),
        "steps with requests waiting for pages": f"{loop.scheduler.num_steps_pool_full}",
        **made,
        "ms per step by bucket (median)": join(medians),
        "tokens/s": f"{loop.num_tokens / sum(map(sum, seconds.values())):.1f}",
        "compared with the dense reference": (
            f"{comparison.num_tokens} tokens of {len(comparison.steps)} steps"
        ),
        "largest difference": f"{comparison.attention:.2e} relative ({comparison.worst})",
        "tolerance": f"{TOLERANCE:.0e}",
        "tokens that are not greedy": f"{comparison.wrong_tokens}",
    }
    width = max(map(len, table))
    print()
    for name, value in table.items():
        print(f"{name:<{width}}  {value}")


def judge(comparison: Comparison, breaks: int, recompiles: int) -> int:
    faults = []
    if breaks:
        faults.append(f"{breaks} graph breaks")
    if recompiles:
        faults.append(f"{recompiles} recompiles after warm-up")
    if not comparison.attention <= TOLERANCE:
        faults.append(
            f"difference {comparison.attention:.2e} above {TOLERANCE:.0e} at {comparison.worst}"
        )
    if comparison.wrong_tokens:
        faults.append(f"{comparison.wrong_tokens} wrong tokens")
    if faults:
        print(f"graphs.decode: FAILED: {'; '.join(faults)}", file=sys.stderr)
        return 1
    print("OK")
    return 0


if __name__ == "__main__":
    sys.exit(main())
