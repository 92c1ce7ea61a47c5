"""The graph runner and ``warmup``: what is replayed equals eager, whatever runs in between."""

from __future__ import annotations

import gc
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import dsv41ops
from dsv41ops.capture import GraphRunner
from tests.export.fresh import run_fresh

CUDA = torch.device("cuda")
BUCKETS = (1, 8, 17, 64, 300)  # on an H200 attention is split in all but the last
REQUESTS, TABLE_WIDTH, PAGE, STATES, TOPK = 7, 12, 32, 16, 24
PAGES = REQUESTS * TABLE_WIDTH
MAX_POSITIONS = 320
REPLAYS = 150  # for each pair of records, geometry and number of heads: 1,200 in all
RECORDS = [("mxfp8", "nvfp4"), ("fp8_ds_mla", "fp8_ds_mla")]
GEOMETRIES = [(1, 0, 1), (2, 1, 4)]
HEADS = [4, 64]  # many tokens of either are attended to by a kernel of their own


class Inputs(NamedTuple):
    starts: Tensor
    seq_lens: Tensor
    swa_table: Tensor
    table: Tensor
    replayed: Tensor  # [T] int64, -1: the token's state is cached already
    states: Tensor  # [T, TOPK]
    kv: Tensor
    q: Tensor


def padding(size: int, heads: int = HEADS[0]) -> Inputs:
    """Static inputs of a bucket; rows of ``states`` lie at odd addresses."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=CUDA)

    return Inputs(
        zeros(REQUESTS + 1),
        zeros(REQUESTS),
        zeros(REQUESTS, TABLE_WIDTH),
        zeros(REQUESTS, TABLE_WIDTH),
        zeros(size, dtype=torch.int64),
        zeros(size, TOPK + 3)[:, 1 : 1 + TOPK],
        zeros(size, 512, dtype=torch.bfloat16),
        zeros(size, heads, 512, dtype=torch.bfloat16),
    )


def random_batch(size: int, generator: torch.Generator, heads: int = HEADS[0]) -> Inputs:
    """On the host: decodes, drafts, prompt chunks, empty, padded and misshapen requests."""

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def pages() -> Tensor:
        """Of each request its own, and holes: no slot is written twice."""
        table = torch.randperm(PAGES, generator=generator).view(REQUESTS, TABLE_WIDTH)
        return torch.where(integers(0, 12, REQUESTS, TABLE_WIDTH) > 0, table, -1)

    lengths = integers(0, 2 * size // REQUESTS + 2, REQUESTS) * integers(0, 2, REQUESTS)
    starts = torch.cat([torch.zeros(1).long(), lengths.cumsum(0)]).clamp(max=size)
    seq_lens = integers(0, MAX_POSITIONS, REQUESTS).clamp(min=starts.diff())
    seq_lens = torch.where(integers(0, 8, REQUESTS) > 0, seq_lens, 0)
    return Inputs(
        starts,
        seq_lens,
        pages(),
        pages(),
        integers(-1, 4, size),
        integers(-2, MAX_POSITIONS // 2, size, TOPK),
        torch.randn(size, 512, generator=generator),
        torch.randn(size, heads, 512, generator=generator),
    )


def fill(inputs: Inputs, batch: Inputs) -> Inputs:
    for buffer, value in zip(inputs, batch, strict=True):
        buffer.copy_(value)
    return inputs


class Step:
    """Every kind of op, caches written and read; no launch that is not ours."""

    def __init__(self, records: tuple[str, str], dcp: tuple[int, int, int]) -> None:
        self.dcp = dcp
        self.swa_cache = dsv41ops.new_kv_cache(PAGES, PAGE, records[0], CUDA)
        self.cache = dsv41ops.new_kv_cache(PAGES, STATES, records[1], CUDA)
        self.sinks = torch.linspace(-1, 1, max(HEADS), device=CUDA)

    def __call__(self, inputs: Inputs) -> tuple[Tensor, ...]:
        size, batch = len(inputs.kv), (inputs.starts, inputs.seq_lens)
        request = dsv41ops.token_to_request(inputs.starts, size)
        swa_slots = dsv41ops.compressed_slot_mapping(*batch, inputs.swa_table, size, PAGE, 1)
        slots = dsv41ops.compressed_slot_mapping(
            *batch, inputs.table, size, STATES, 2, inputs.replayed, *self.dcp
        )
        dsv41ops.kv_cache_insert(inputs.kv, swa_slots, self.swa_cache)
        dsv41ops.kv_cache_insert(inputs.kv, slots, self.cache)
        window = dsv41ops.sliding_window_indices(*batch, inputs.swa_table, size, PAGE)
        selected = dsv41ops.topk_to_slots(inputs.states, *batch, inputs.table, STATES, 2, *self.dcp)
        sharded = self.dcp[0] > 1
        sink = self.sinks[: inputs.q.shape[1]]
        out, lse = dsv41ops.sparse_mla_decode(
            inputs.q,
            self.swa_cache,
            *window,
            self.cache,
            *selected,
            None if sharded else sink,
        )
        metadata = dsv41ops.decode_metadata(
            *batch,
            size,
            swa_block_table=inputs.swa_table,
            swa_page_size=PAGE,
            block_table_c1a=inputs.table,
            block_table_c2a=inputs.table,
            block_size=2 * STATES,
            slot_mapping=inputs.replayed,
            dcp_world_size=self.dcp[0],
            dcp_rank=self.dcp[1],
            cp_interleave_c1a=2 * self.dcp[2],
            cp_interleave_c2a=self.dcp[2],
        )
        outputs = (request, swa_slots, slots, *window, *selected, *metadata, out, lse)
        if sharded:
            ranks = self.dcp[0]
            outs, lses = out.expand(ranks, -1, -1, -1), lse.expand(ranks, -1, -1)
            outputs += dsv41ops.merge_attention_states(outs, lses, sink)
            outputs += (dsv41ops.dcp_local_seq_lens(inputs.seq_lens, 2, *self.dcp),)
        return (*outputs, dsv41ops.kv_cache_gather(self.cache, slots))


def make_runner(step: Step, sizes: tuple[int, ...] = BUCKETS, heads: int = HEADS[0]) -> GraphRunner:
    return GraphRunner(step, {size: padding(size, heads) for size in sizes})


def assert_same_bits(came: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for number, (got, want) in enumerate(zip(came, expected, strict=True)):
        same = torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
        assert same, f"output {number}"


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dcp", GEOMETRIES)
@pytest.mark.parametrize("records", RECORDS)
def test_any_batch_equals_eager(
    records: tuple[str, str], dcp: tuple[int, int, int], heads: int
) -> None:
    replayed, eager = Step(records, dcp), Step(records, dcp)
    runner = make_runner(replayed, heads=heads)
    generator = torch.Generator().manual_seed(11)
    for number in range(REPLAYS):
        size = BUCKETS[number % len(BUCKETS)]
        batch = random_batch(size, generator, heads)
        # Some of the bucket is padding, and it is chosen by what the batch holds.
        num_tokens = max(int(batch.starts[-1]), BUCKETS[number % len(BUCKETS) - 1] + 1)
        num_tokens = size if size == BUCKETS[0] else num_tokens
        fill(runner.inputs(num_tokens), batch)
        came = runner.run(num_tokens)
        expected = eager(fill(padding(size, heads), batch))
        assert_same_bits(
            (*came, replayed.swa_cache, replayed.cache), (*expected, eager.swa_cache, eager.cache)
        )


def test_runs_without_a_sync() -> None:
    runner = make_runner(Step(RECORDS[0], GEOMETRIES[0]))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for num_tokens in (300, 1, 9):
            runner.inputs(num_tokens)
            runner.run(num_tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_does_not_fit_is_refused() -> None:
    runner = make_runner(Step(RECORDS[0], GEOMETRIES[0]), (1, 8))
    assert runner.sizes == (1, 8)
    with pytest.raises(ValueError, match="num_tokens: expected 0 to 8, the largest bucket, got 9"):
        runner.run(9)
    assert (runner.run(8)[0] == -1).all()


def test_two_graphs_alternate_on_two_streams() -> None:
    """The runner orders the streams: the graphs share memory and the caches."""
    replayed, eager = Step(RECORDS[0], GEOMETRIES[0]), Step(RECORDS[0], GEOMETRIES[0])
    sizes = (8, 300)
    runner = make_runner(replayed, sizes)
    streams = (torch.cuda.Stream(), torch.cuda.Stream())
    generator = torch.Generator().manual_seed(5)
    batches = [random_batch(sizes[number % 2], generator) for number in range(40)]
    on_device = [fill(padding(len(batch.kv)), batch) for batch in batches]
    came = []
    torch.cuda.synchronize()
    for number, batch in enumerate(on_device):
        with torch.cuda.stream(streams[number % 2]):
            fill(runner.inputs(len(batch.kv)), batch)
            came.append(tuple(output.clone() for output in runner.run(len(batch.kv))))
    torch.cuda.synchronize()
    for batch, outputs in zip(on_device, came, strict=True):
        assert_same_bits(outputs, eager(batch))


def test_c07b_eager_calls_and_captures_between_replays() -> None:
    step = Step(RECORDS[0], GEOMETRIES[0])
    generator = torch.Generator().manual_seed(3)
    first = make_runner(step, (4,))
    fill(first.inputs(4), random_batch(4, generator))
    expected = tuple(output.clone() for output in first.run(4))
    other = Step(RECORDS[0], GEOMETRIES[0])
    other(fill(padding(4096), random_batch(4096, generator)))
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    second = make_runner(other, (64,))
    fill(second.inputs(64), random_batch(64, generator))
    for _ in range(3):
        second.run(64)
        assert_same_bits(first.run(4), expected)
    # The package keeps nothing that it allocated while a graph was captured.
    del second
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def test_c26_replay_after_the_cache_is_emptied() -> None:
    step = Step(RECORDS[1], GEOMETRIES[1])
    runner = make_runner(step)
    generator = torch.Generator().manual_seed(9)
    fill(runner.inputs(64), random_batch(64, generator))
    expected = tuple(output.clone() for output in runner.run(64))
    torch.cuda.empty_cache()
    taken = torch.full((2**28,), 255, dtype=torch.uint8, device=CUDA)  # what was freed
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_same_bits(runner.run(64), expected)
    del taken


WARM = """
import sys
import torch
import dsv41ops
from tests.cuda.test_runner import GEOMETRIES, HEADS, RECORDS, TOPK, Step, padding
from triton import knobs

compiled = []
knobs.runtime.jit_post_compile_hook = lambda **event: compiled.append(event["fn"].name)
records, dcp = RECORDS[int(sys.argv[1])], GEOMETRIES[int(sys.argv[2])]
heads = HEADS[int(sys.argv[2])]
steps = {T: padding(T, heads) for T in (1, 2, 3, 8, 15, 16, 17, 64, 300, 1000)}
model = Step(records, dcp)

def warm():
    dsv41ops.warmup(
        heads, *records, topk=TOPK, max_num_tokens=1000,
        dcp_world_size=dcp[0], dcp_rank=dcp[1], cp_interleave=dcp[2],
    )

warm()
assert compiled
compiled.clear()
warm()
for inputs in steps.values():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(inputs)
        try:
            dsv41ops.warmup(heads)
        except RuntimeError as error:
            assert "warmup: called while a CUDA graph is captured" in str(error)
        else:
            raise AssertionError("warmup ran in a capture")
    torch.cuda.set_sync_debug_mode("error")
    graph.replay()
    torch.cuda.set_sync_debug_mode("default")
torch.cuda.synchronize()
assert not compiled, compiled
print("ok")
"""


@pytest.mark.parametrize("geometry", range(len(GEOMETRIES)))
@pytest.mark.parametrize("records", range(len(RECORDS)))
def test_c26_nothing_compiles_after_warmup(records: int, geometry: int) -> None:
    """Captured as the first call of every op, in a process that ran nothing but ``warmup``."""
    done = run_fresh(WARM, str(records), str(geometry))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("ok\n")
