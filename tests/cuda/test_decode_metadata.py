"""The fused op on a GPU: one launch, the reference's bits, one captured graph for any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dsv41ops
from dsv41ops.reference import index
from tests.contract.inputs import argument_sets, overload, schema_order, tensors_of
from tests.cuda.test_capture import as_bits, captured

CUDA = torch.device("cuda")
OP = "decode_metadata"
GEOMETRY = ("dcp_world_size", "dcp_rank", "cp_interleave_c1a", "cp_interleave_c2a")
T, R, WIDTH, PAGE, BLOCK_SIZE, PAGES = 96, 700, 12, 32, 64, 400


def kernels_of(run: Any) -> list[str]:
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    device_type = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == device_type]


@pytest.mark.parametrize("name", argument_sets(OP))
def test_one_launch(name: str) -> None:
    arguments = argument_sets(OP)[name](CUDA)
    assert kernels_of(lambda: overload(OP)(**arguments)) == ["_decode_metadata_kernel"]


@pytest.mark.parametrize("name", argument_sets(OP))
def test_equals_the_reference(name: str) -> None:
    arguments = argument_sets(OP)[name](torch.device("cpu"))
    positional, _ = schema_order(OP, arguments)
    on_gpu = {k: v.to(CUDA) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    for got, want in zip(overload(OP)(**on_gpu), index.decode_metadata(*positional), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got.cpu(), want)


def random_batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Many requests, most of them empty: several blocks of starts are searched."""

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    lengths = integers(0, 9, R) * (torch.rand(R, generator=generator) < 0.04)
    starts = torch.cat([torch.zeros(1), lengths.cumsum(0)]).clamp(max=T).to(torch.int32)
    seq_lens = torch.maximum(integers(0, WIDTH * PAGE, R), starts.diff())
    tables = {
        name: integers(-1, PAGES, R, WIDTH)
        for name in ("swa_block_table", "block_table_c1a", "block_table_c2a")
    }
    return {
        "query_start_loc": starts,
        "seq_lens": torch.where(integers(0, 8, R) > 0, seq_lens, 0).to(torch.int32),
        **tables,
        "replay_start": integers(0, 200, R),
        "slot_mapping": integers(-1, 4, T).long(),
    }


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dcp", [(1, 0, 1, 1), (2, 1, 8, 4)])
def test_one_graph_serves_any_batch(dcp: tuple[int, int, int, int], causal: bool) -> None:
    """Captured with every length 0, into buffers longer than a step."""
    generator = torch.Generator().manual_seed(3)
    static = {name: torch.zeros_like(t).to(CUDA) for name, t in random_batch(generator).items()}
    options = {
        "num_tokens": T,
        "swa_page_size": PAGE,
        "block_size": BLOCK_SIZE,
        "width": None if causal else 192,
        "causal": causal,
        **dict(zip(GEOMETRY, dcp, strict=True)),
    }
    buffers = {
        name: torch.full((len(t) + 40, *t.shape[1:]), 7, dtype=t.dtype, device=CUDA)
        for name, t in dsv41ops.decode_metadata(**static, **options)._asdict().items()
    }
    graph, _ = captured(lambda: dsv41ops.decode_metadata_out(**static, **options, **buffers))
    for _ in range(30):
        batch = random_batch(generator)
        for name, tensor in tensors_of(batch).items():
            static[name].copy_(tensor)
        graph.replay()
        positional, _ = schema_order(OP, {**batch, **options})
        expected = index.decode_metadata(*positional)
        for (name, buffer), want in zip(buffers.items(), expected, strict=True):
            assert torch.equal(as_bits(buffer[: len(want)].cpu()), as_bits(want)), name
            assert bool((buffer[len(want) :] == (0 if "lens" in name else -1)).all()), name
