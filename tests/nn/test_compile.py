"""One graph of layers of every kind: equal to eager, for any number of tokens, copying no cache."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.decorators import mark_dynamic, mark_unbacked
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import ReinplaceCounters, counters

from tests.compile.toy import needs_cxx, no_graph_cache
from tests.nn.layers import KINDS, LayerOutputs, Layers, Step, mixed_steps

LIMIT = {torch.float32: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def _fresh_dynamo(one_thread: None):
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad(), torch._inductor.config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


def assert_near(got: LayerOutputs, want: LayerOutputs, limit: float) -> None:
    """Inductor sums norms in another order, which may move a value to the next bf16 number."""
    assert torch.equal(got.states, want.states)
    difference = (got.out.float() - want.out.float()).norm(dim=(1, 2))
    assert (difference <= limit * want.out.float().norm(dim=(1, 2))).all()
    finite = want.lse.isfinite()
    assert torch.equal(got.lse.isfinite(), finite)
    assert (got.lse - want.lse)[finite].abs().max() <= limit


def pad(step: Step, num_tokens: int) -> Step:
    missing = num_tokens - len(step.x)
    return step._replace(x=torch.cat([step.x, step.x.new_zeros(missing, *step.x.shape[1:])]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_cxx)])
def test_compiled_equals_eager(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    steps, free, kinds = mixed_steps(dtype), mark_unbacked, tuple(KINDS)
    if backend == "inductor" and device.type == "cpu":
        # There inductor asks whether a bmm has one row, so one graph serves any T above 1 only.
        steps, free = [pad(step, max(2, len(step.x))) for step in steps], mark_dynamic
        kinds = ("window", "c2a source", "c1a source", "c1a selects")  # C++ compiles slowly
    module, eager = (Layers(dtype, kinds).to(device) for _ in range(2))
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    ReinplaceCounters.clear()
    with no_graph_cache():
        for number, step in enumerate(steps):
            inputs = [tensor.to(device) for tensor in step]
            if number == 0:
                free(inputs[0], 0)
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                got = compiled(*inputs)
            want = eager(*inputs)
            if backend == "aot_eager":
                assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
            assert_near(got, want, LIMIT[dtype])
    assert counter.frame_count == 1
    assert sum(counters["graph_break"].values()) == 0
    assert ReinplaceCounters.get_total_missed_bytes() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_equals_eager(dtype: torch.dtype) -> None:
    """One captured graph replays every step, padded to the same number of tokens, bit for bit."""
    device = torch.device("cuda")
    module, eager = Layers(dtype).to(device), Layers(dtype).to(device)
    steps = [pad(step, 24) for step in mixed_steps(dtype)]
    static = [tensor.to(device) for tensor in steps[0]]
    nobody = [torch.zeros_like(tensor) for tensor in static]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for buffer, empty in zip(static, nobody, strict=True):
            buffer.copy_(empty)
        module(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = module(*static)
    for step in steps:
        for buffer, tensor in zip(static, step, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        want = eager(*(tensor.to(device) for tensor in step))
        for one, other in zip(outputs, want, strict=True):
            assert torch.equal(one, other)
    for (name, one), other in zip(module.named_buffers(), eager.buffers(), strict=True):
        assert torch.equal(one, other), name
