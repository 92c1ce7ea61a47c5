"""CUDA graphs: no host sync, and one captured graph replays for any batch that fits it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv41ops
from tests.contract.inputs import argument_sets, each_set, overload, tensors_of, written

CUDA = torch.device("cuda")


def listed(result: Any) -> list[Tensor]:
    if result is None:
        return []
    return list(result) if isinstance(result, tuple) else [result]


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """Run once to warm up, then capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, listed(result)


@pytest.fixture
def no_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("op", "name"), each_set())
def test_no_host_sync(op: str, name: str, request: pytest.FixtureRequest) -> None:
    arguments = argument_sets(op)[name](CUDA)
    overload(op)(**arguments)
    request.getfixturevalue("no_sync")
    overload(op)(**arguments)


@pytest.mark.parametrize(("op", "name"), each_set())
def test_replay_equals_eager(op: str, name: str) -> None:
    """Captured with every index and length 0, replayed on the real ones."""
    make = argument_sets(op)[name]
    real, static = make(CUDA), make(CUDA)
    for tensor in tensors_of(static).values():
        if not tensor.is_floating_point() and tensor.dtype != torch.uint8:
            tensor.zero_()
    graph, came = captured(lambda: overload(op)(**static))
    for key, tensor in tensors_of(make(CUDA)).items():
        static[key].untyped_storage().copy_(tensor.untyped_storage())
    graph.replay()
    expected = listed(overload(op)(**real))
    given = [key for key in written(op) if real[key] is not None]
    came += [static[key] for key in given]
    expected += [real[key] for key in given]
    for got, want in zip(came, expected, strict=True):
        assert torch.equal(as_bits(got), as_bits(want))


def as_bits(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


class Step:
    """A small step of every kind of op over static buffers; filled with a random mixed batch."""

    T, R, PAGES, PAGE, STATES, K, HEADS = 48, 7, 40, 32, 16, 24, 4

    def __init__(self, records: tuple[str, str], dcp: tuple[int, int, int]) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=CUDA)

        self.dcp = dcp
        self.starts, self.seq_lens = zeros(self.R + 1), zeros(self.R)
        self.swa_table, self.table = zeros(self.R, 12), zeros(self.R, 24)
        self.states = zeros(self.T, self.K)
        self.kv = zeros(self.T, 512, dtype=torch.bfloat16)
        self.q = zeros(self.T, self.HEADS, 512, dtype=torch.bfloat16)
        self.sink = zeros(self.HEADS, dtype=torch.float32)
        self.swa_cache = dsv41ops.new_kv_cache(self.PAGES, self.PAGE, records[0], CUDA)
        self.cache = dsv41ops.new_kv_cache(self.PAGES, self.STATES, records[1], CUDA)

    def fill(self, generator: torch.Generator) -> None:
        """Decodes, prompt chunks, drafts, empty and padded requests, padding tokens."""

        def integers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        lengths = integers(0, 4, self.R) * integers(0, 4, self.R)
        lengths[integers(0, self.R, 1)] = integers(0, 14, 1)
        starts = torch.cat([torch.zeros(1).long(), lengths.cumsum(0)]).clamp(max=self.T)
        self.starts.copy_(starts)
        seq_lens = integers(0, 320, self.R).clamp(min=starts.diff())
        self.seq_lens.copy_(torch.where(integers(0, 8, self.R) > 0, seq_lens, 0))
        self.swa_table.copy_(
            torch.randperm(self.PAGES, generator=generator)[:12].expand(self.R, 12)
        )
        self.table.copy_(integers(-1, self.PAGES, self.R, 24))
        self.states.copy_(integers(-2, 200, self.T, self.K))
        self.kv.copy_(torch.randn(self.T, 512, generator=generator))
        self.q.copy_(torch.randn(self.T, self.HEADS, 512, generator=generator))
        self.sink.copy_(torch.randn(self.HEADS, generator=generator))

    def run(self) -> tuple[Tensor, ...]:
        batch = (self.starts, self.seq_lens)
        request = dsv41ops.token_to_request(self.starts, self.T)
        swa_slots = dsv41ops.compressed_slot_mapping(
            *batch, self.swa_table, self.T, self.PAGE, compress_ratio=1
        )
        slots = dsv41ops.compressed_slot_mapping(
            *batch, self.table, self.T, self.STATES, 2, None, *self.dcp
        )
        swa_indices, swa_lens = dsv41ops.sliding_window_indices(
            *batch, self.swa_table, self.T, self.PAGE
        )
        indices, lens = dsv41ops.topk_to_slots(
            self.states, *batch, self.table, self.STATES, 2, *self.dcp
        )
        out, lse = dsv41ops.sparse_mla_decode(
            self.q, self.swa_cache, swa_indices, swa_lens, self.cache, indices, lens, self.sink
        )
        merged = dsv41ops.merge_attention_states(
            torch.stack([out, out]), torch.stack([lse, lse]), self.sink
        )
        local = dsv41ops.dcp_local_seq_lens(self.seq_lens, 2, *self.dcp)
        return (
            request,
            swa_slots,
            slots,
            swa_indices,
            swa_lens,
            indices,
            lens,
            out,
            lse,
            *merged,
            local,
        )


@pytest.mark.parametrize("dcp", [(1, 0, 1), (2, 1, 4), (4, 3, 1)])
@pytest.mark.parametrize("records", [("mxfp8", "nvfp4"), ("fp8_ds_mla", "fp8_ds_mla")])
def test_one_graph_serves_any_batch(records: tuple[str, str], dcp: tuple[int, int, int]) -> None:
    step = Step(records, dcp)
    graph, outputs = captured(step.run)
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(step.PAGES * step.PAGE, 512, generator=generator).bfloat16().to(CUDA)
    dsv41ops.kv_cache_insert(rows, torch.arange(len(rows), device=CUDA), step.swa_cache)
    rows = rows[: step.PAGES * step.STATES]
    dsv41ops.kv_cache_insert(rows, torch.arange(len(rows), device=CUDA), step.cache)
    for _ in range(50):
        step.fill(generator)
        graph.replay()
        for got, want in zip(outputs, step.run(), strict=True):
            assert torch.equal(as_bits(got), as_bits(want))


@pytest.mark.parametrize("record", ["fp8_ds_mla", "mxfp8", "nvfp4"])
def test_c11_pages_past_two_gib(record: str) -> None:
    """The first page whose byte offset passes 2^31, against the same rows in a small pool."""
    small = dsv41ops.new_kv_cache(2, 64, record, CUDA)
    page = 2**31 // small.stride(0) + 1
    large = dsv41ops.new_kv_cache(page + 2, 64, record, CUDA)
    assert page * large.stride(0) > 2**31
    rows = torch.randn(2, 512).bfloat16().to(CUDA)
    q = torch.randn(1, 16, 512).bfloat16().to(CUDA)
    results = []
    for cache, pages in ((small, (0, 1)), (large, (page - 1, page))):
        slots = torch.tensor([pages[0] * 64, pages[1] * 64 + 5], dtype=torch.int32, device=CUDA)
        dsv41ops.kv_cache_insert(rows, slots, cache)
        lens = torch.tensor([2], dtype=torch.int32, device=CUDA)
        results.append(
            [
                dsv41ops.kv_cache_gather(cache, slots),
                *dsv41ops.sparse_mla_decode(q, cache, slots[None], lens),
            ]
        )
    for got, want in zip(*results, strict=True):
        assert torch.equal(as_bits(got), as_bits(want))


def test_c26_cold_kernel_in_capture_says_so() -> None:
    """A variant that nothing ran before: a clear error, and the stream still works."""
    script = """
import torch, dsv41ops
starts = torch.tensor([0, 3], dtype=torch.int32, device="cuda")
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        dsv41ops.token_to_request(starts, 4)
except RuntimeError as error:
    print(error)
print(dsv41ops.token_to_request(starts, 4).tolist())
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "not compiled yet, and a CUDA graph is being captured" in run.stdout, run.stderr
    assert run.stdout.endswith("[0, 0, 0, -1]\n")
