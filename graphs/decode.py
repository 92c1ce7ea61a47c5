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
from itertools import chain, compress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._dynamo.utils import counters

from dsv41ops.capture import GraphRunner, pick_bucket
from graphs.batch import CacheGeometry, StepInputs
from graphs.check import Checker, Comparison
from graphs.checkpoint import Checkpoint, CheckpointError
from graphs.config import ConfigError, ModelConfig, load_config
from graphs.dense import DenseReference
from graphs.draft import DraftInputs, DraftModel, DraftOutputs, draft_inputs
from graphs.launches import show_launches
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

MAX_REQUESTS = 8
PROMPT_TOKENS = 56  # of a step in which every request decodes
NUM_CHECKED_REQUESTS = 5
# bf16 queries and outputs give 4e-3 on the recorded stack; a wrong row, far more.
TOLERANCE = 1e-2
# bf16 latents fall on other codes of the compressed cache: 6e-2 on the small model, a ring that
# loses its rows 2e-1.
BF16_TOLERANCE = 1e-1


class InputError(ValueError):
    """What the user asked for cannot be run; the message is one line."""


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        checkpoint = Checkpoint(Path(args.weights)) if args.weights else None
        config = load_config(args.config or geometry_of(checkpoint))
        rows = read_trace(Path(args.trace)) if args.trace else sample_trace(seed=args.seed)
        rows = rows[: args.requests]
        if args.drafts:
            config.check_drafts()
        num_drafts = config.dspark_block_size if args.drafts else 0
        geometry = plan_geometry(config, rows, args.pool_tokens, num_drafts)
        device = pick_device(args.device)
        dtype: torch.dtype = getattr(torch, args.dtype)
        with torch.device("meta"):
            planned = build_models(config, geometry, dtype)
        if not args.launches or device.type == "cuda":
            check_memory(planned, device)
        if checkpoint is not None:
            check_weights(checkpoint, planned)
    except (ConfigError, CheckpointError, TraceError, InputError, ImportError) as error:
        print(f"graphs.decode: {error}", file=sys.stderr)
        return 2
    with torch.no_grad():
        if args.launches:
            return print_launches(config, geometry, device, dtype)
        return run(config, geometry, rows, device, checkpoint, args.seed, args.compile, dtype)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m graphs.decode", description=__doc__)
    parser.add_argument(
        "--config", help="small, flash, or a JSON file (default: DIR/config.json, else small)"
    )
    parser.add_argument(
        "--weights", metavar="DIR", help="safetensors with DeepSeek's names (default: random)"
    )
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
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the projections (default: %(default)s)",
    )
    parser.add_argument(
        "--drafts",
        action="store_true",
        help="draft layers propose tokens, which the next step verifies (default: off)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if present")
    parser.add_argument(
        "--no-compile",
        dest="compile",
        action="store_false",
        help="run the step without torch.compile; on CUDA it is captured all the same",
    )
    parser.add_argument(
        "--launches",
        action="store_true",
        help="only show what each layer of a step launches: on CUDA its kernels, else the "
        "operators of the traced step",
    )
    parser.add_argument("--seed", type=int, default=0, help="random weights, prompts, sample trace")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text}")
    return value


def geometry_of(checkpoint: Checkpoint | None) -> str:
    return "small" if checkpoint is None else str(checkpoint.config_path)


def pick_buckets(num_drafts: int) -> tuple[int, ...]:
    """Tokens of a step, padded up: for a request or two, for all of them, and prompts beside."""
    decodes = MAX_REQUESTS * (1 + num_drafts)
    return tuple(sorted({MAX_REQUESTS, decodes, decodes + PROMPT_TOKENS}))


def plan_geometry(
    config: ModelConfig, rows: list[TraceRow], pool_tokens: int, num_drafts: int
) -> CacheGeometry:
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
        config.sliding_window, CacheGeometry.swa_page_size, pick_buckets(num_drafts)[-1], num_drafts
    )
    return CacheGeometry(
        max_requests=MAX_REQUESTS,
        max_positions=max(row.num_positions for row in rows) + num_drafts,
        num_pages=num_pages,
        num_swa_pages=MAX_REQUESTS * swa_pages,
        num_drafts=num_drafts,
    )


def pick_device(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: no CUDA device here")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


class Models(NamedTuple):
    """The stack, and its draft layers if there are drafts."""

    stack: DecodeModel
    draft: DraftModel | None

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return (self.stack,) if self.draft is None else (self.stack, self.draft)


def build_models(config: ModelConfig, geometry: CacheGeometry, dtype: torch.dtype) -> Models:
    stack = DecodeModel(config, geometry, dtype=dtype)
    return Models(stack, DraftModel(stack) if geometry.num_drafts else None)


def check_memory(models: Models, device: torch.device) -> None:
    """Refuse a model that cannot fit, before allocating it."""
    tensors = [tensor for part in models.parts for tensor in (*part.parameters(), *part.buffers())]
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > 0.7 * available:
        raise InputError(
            f"the model needs {needed / 2**30:.1f} GiB, {device} has {available / 2**30:.1f} GiB"
        )


def check_weights(checkpoint: Checkpoint, models: Models) -> None:
    """One error that names the faults of all parts."""
    faults: dict[str, None] = {}
    for part in models.parts:
        try:
            checkpoint.check(part)
        except CheckpointError as error:
            faults.update(dict.fromkeys(error.faults))
    if faults:
        raise CheckpointError(checkpoint.folder, list(faults))


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


class Steps(NamedTuple):
    """What runs in a step: the models, compiled or not."""

    stack: Callable[[StepInputs], StepOutputs]
    draft: Callable[[DraftInputs], DraftOutputs] | None

    def __call__(self, inputs: StepInputs) -> Ran:
        outputs = self.stack(inputs)
        if self.draft is None:
            return outputs, None
        return outputs, self.draft(draft_inputs(inputs, outputs))


Ran = tuple[StepOutputs, DraftOutputs | None]
RunBucket = Callable[[int], Ran]  # a bucket whose inputs are filled


def run(
    config: ModelConfig,
    geometry: CacheGeometry,
    rows: list[TraceRow],
    device: torch.device,
    checkpoint: Checkpoint | None,
    seed: int,
    compiled: bool,
    dtype: torch.dtype = torch.float32,
) -> int:
    backend = pick_backend(device) if compiled else "eager step"
    with torch.device(device):
        models = build_models(config, geometry, dtype)
    for number, part in enumerate(models.parts):
        fill_weights(part, checkpoint, seed + number)
    requests = make_requests(rows, config.vocab_size, seed)
    checker = Checker(sample_requests(requests))
    sizes = pick_buckets(geometry.num_drafts)
    buffers = {bucket: StepBuffers(bucket, geometry, device) for bucket in sizes}
    counters.clear()
    steps = Steps(*models)
    if compiled:
        parts = [torch.compile(part, fullgraph=True, backend=backend) for part in models.parts]
        steps = Steps(parts[0], parts[1] if models.draft is not None else None)
    layers = f"{config.num_hidden_layers} layers"
    if models.draft is not None:
        layers += f" and {len(config.draft_layers)} draft layers"
    print(f"device {device}, {layers}, {len(requests)} requests")
    print(f"warming up ({backend}; a compile takes a minute or two) ...", flush=True)
    started = time.perf_counter()
    try:
        warm_up(steps, buffers)
        warm_up_seconds = time.perf_counter() - started
        compiles = counters["stats"]["unique_graphs"]
        print(f"warm after {warm_up_seconds:.0f} s", flush=True)
        run_bucket, num_captured = capture(steps, buffers, device)
        loop = DecodeLoop(
            run_bucket,
            buffers,
            Scheduler(requests, geometry, config.sliding_window, sizes[-1]),
            checker,
        )
        loop.run(sum(request.num_positions for request in requests))
    except torch._dynamo.exc.TorchDynamoException as error:
        print(f"graphs.decode: graph break: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    weights = dict(chain.from_iterable(part.named_parameters() for part in models.parts))
    print(f"comparing {len(checker.history)} requests with the dense float64 reference ...")
    types = models.stack.types
    reference = DenseReference(config, weights, types.swa_cache, types.cache)
    comparison = checker.compare(config, dict(weights), reference)
    recompiles = counters["stats"]["unique_graphs"] - compiles
    breaks = sum(counters["graph_break"].values())
    made = {
        "compiles": f"{compiles} ({backend}, {warm_up_seconds:.0f} s)",
        "graph breaks": f"{breaks}",
        "recompiles after warm-up": f"{recompiles}",
        "captured CUDA graphs": f"{num_captured}",
    }
    tolerance = TOLERANCE if dtype == torch.float32 else BF16_TOLERANCE
    print_table(loop, comparison, tolerance, made)
    return judge(comparison, tolerance, breaks, recompiles)


def print_launches(
    config: ModelConfig, geometry: CacheGeometry, device: torch.device, dtype: torch.dtype
) -> int:
    """A step of padding, eager: launches depend on neither tokens nor weights."""
    made_on = device if device.type == "cuda" else torch.device("meta")  # traced: no memory needed
    with made_on:
        models = build_models(config, geometry, dtype)
    inputs = StepBuffers(pick_buckets(geometry.num_drafts)[0], geometry, made_on).inputs
    show_launches("stack", models.stack, inputs, device)
    if models.draft is not None:
        after = draft_inputs(inputs, models.stack(inputs))
        show_launches("draft layers", models.draft, after, device)
    return 0


def fill_weights(model: nn.Module, checkpoint: Checkpoint | None, seed: int) -> None:
    if checkpoint is None:
        randomise(model, seed)
        return
    print(f"loading {checkpoint.folder} ...", flush=True)
    started = time.perf_counter()
    loaded = checkpoint.load(model, lambda done, total: show_progress(done, total, "weights", done))
    seconds = time.perf_counter() - started
    kind = "draft weights" if isinstance(model, DraftModel) else "weights"
    print(
        f"loaded {loaded.num_parameters} {kind} in {seconds:.1f} s, "
        f"skipped {loaded.num_skipped} tensors of other parts"
    )


def sample_requests(requests: list[Request]) -> list[Request]:
    """A few requests spread over the trace, the longest among them."""
    longest = max(requests, key=lambda request: request.num_positions)
    stride = -(-len(requests) // NUM_CHECKED_REQUESTS)
    return list({longest: None, **dict.fromkeys(requests[::stride])})


def warm_up(steps: Steps, buffers: dict[int, StepBuffers]) -> None:
    """Compile once for any number of tokens, by a batch that is all padding."""
    for bucket in buffers.values():
        inputs = bucket.fill([])
        torch._dynamo.mark_dynamic(inputs.token_ids, 0)
        after = draft_inputs(inputs, steps.stack(inputs))
        if steps.draft is not None:
            torch._dynamo.mark_dynamic(after.hidden, 0)
            steps.draft(after)


def capture(
    steps: Steps, buffers: dict[int, StepBuffers], device: torch.device
) -> tuple[RunBucket, int]:
    """How to run a filled bucket, and the number of captured graphs: on CUDA one per bucket, and
    one more of the draft layers."""
    inputs = {size: bucket.inputs for size, bucket in buffers.items()}
    if device.type != "cuda":
        return lambda size: steps(inputs[size]), 0
    stack = GraphRunner(steps.stack, inputs, device)
    if steps.draft is None:
        return lambda size: (stack.run(size), None), len(stack.sizes)
    # A graph's outputs are the same tensors in every replay.
    after = {size: draft_inputs(inputs[size], stack.run(size)) for size in stack.sizes}
    draft = GraphRunner(steps.draft, after, device)
    num_captured = len(stack.sizes) + len(draft.sizes)
    return lambda size: (stack.run(size), draft.run(size)), num_captured


class DecodeLoop:
    """Schedule, fill a bucket, step. Tokens and drafts stay on the device for the next step; how
    many drafts were accepted, the host reads once per step."""

    def __init__(
        self,
        run_bucket: RunBucket,
        buffers: dict[int, StepBuffers],
        scheduler: Scheduler,
        checker: Checker,
    ) -> None:
        self.run_bucket, self.buffers = run_bucket, buffers
        self.scheduler, self.checker = scheduler, checker
        self.num_steps = self.num_drafts = 0
        self.num_tokens = 0  # without rejected drafts
        self.accepted: Counter[int] = Counter()  # how often a request had so many of its drafts
        self.seconds: defaultdict[int, list[float]] = defaultdict(list)  # of each bucket's steps
        self.mixes: Counter[str] = Counter()

    def run(self, total_tokens: int) -> None:
        while plan := self.scheduler.next_step():
            num_tokens = sum(part.num_tokens for part in plan)
            num_drafts = sum(part.num_drafts for part in plan)
            bucket = pick_bucket(self.buffers, num_tokens)
            started = time.perf_counter()
            self.buffers[bucket].fill(plan)
            outputs, draft = self.run_bucket(bucket)
            if outputs.hidden.is_cuda:
                torch.cuda.synchronize()
            num_accepted = outputs.verified.num_accepted[: len(plan)].tolist()
            self.seconds[bucket].append(time.perf_counter() - started)
            # A replay overwrites the outputs.
            self.checker.record(self.num_steps, plan, num_accepted, outputs, draft)
            had_drafts = [part.num_drafts > 0 for part in plan]
            self.accepted.update(compress(num_accepted, had_drafts))
            self.mixes[name_mix(plan)] += 1
            self.num_steps += 1
            self.num_drafts += num_drafts
            self.num_tokens += num_tokens - num_drafts + sum(num_accepted)
            self.scheduler.finish_step(plan, num_accepted)
            show_progress(
                self.num_tokens, total_tokens, f"tokens, step {self.num_steps}", self.num_steps
            )


def name_mix(plan: list[Scheduled]) -> str:
    decodes = sum(part.request.is_decoding for part in plan)
    if decodes == len(plan):
        return "decode"
    return "mixed" if decodes else "prompt"


def show_progress(done: int, total: int, unit: str, step: int) -> None:
    if sys.stdout.isatty():
        bar = "#" * (30 * done // total)
        end = "\n" if done == total else ""
        print(f"\r[{bar:30}] {done}/{total} {unit}", end=end, flush=True)
    elif done == total or step % 50 == 0:
        print(f"{done}/{total} {unit}", flush=True)


def print_table(
    loop: DecodeLoop, comparison: Comparison, tolerance: float, made: dict[str, str]
) -> None:
    def join(values: Mapping[Any, object]) -> str:
        return ", ".join(f"{name} {value}" for name, value in sorted(values.items()))

    seconds = loop.seconds
    drafts = {}
    if loop.num_drafts:
        accepted = sum(count * times for count, times in loop.accepted.items())
        drafts = {
            "drafts accepted": f"{accepted} of {loop.num_drafts}",
            "requests' steps by drafts accepted": join(loop.accepted),
            "tokens per request's step with drafts": f"{1 + accepted / loop.accepted.total():.2f}",
        }
    medians = {size: f"{1e3 * statistics.median(times):.2f}" for size, times in seconds.items()}
    table = {
        "steps": f"{loop.num_steps}",
        "tokens": f"{loop.num_tokens}",
        "steps by batch mix": join(loop.mixes),
        "steps by bucket": join({size: len(times) for size, times in seconds.items()}),
        "steps with requests waiting for pages": f"{loop.scheduler.num_steps_pool_full}",
        **drafts,
        **made,
        "ms per step by bucket (median)": join(medians),
        "tokens/s": f"{loop.num_tokens / sum(map(sum, seconds.values())):.1f}",
        "compared with the dense reference": (
            f"{comparison.num_tokens} tokens of {len(comparison.steps)} steps"
        ),
        "largest difference": f"{comparison.attention:.2e} relative ({comparison.worst})",
        "tolerance": f"{tolerance:.0e}",
        "tokens that are not greedy": f"{comparison.wrong_tokens}",
    }
    width = max(map(len, table))
    print()
    for name, value in table.items():
        print(f"{name:<{width}}  {value}")


def judge(comparison: Comparison, tolerance: float, breaks: int, recompiles: int) -> int:
    faults = []
    if breaks:
        faults.append(f"{breaks} graph breaks")
    if recompiles:
        faults.append(f"{recompiles} recompiles after warm-up")
    if not comparison.attention <= tolerance:
        faults.append(
            f"difference {comparison.attention:.2e} above {tolerance:.0e} at {comparison.worst}"
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
