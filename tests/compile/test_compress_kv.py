"""compress_kv has a result and writes an argument: in place, whatever the ratio."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked
from torch._inductor.utils import run_and_get_code
from torch.export import Dim

import dsv41ops
from tests.support import assert_same_bits


class Compressors(torch.nn.Module):
    """One of each ratio, as the layers of a model hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.linspace(1, 2, 512))
        self.register_buffer("slots", torch.tensor([3, 0]))
        self.register_buffer("ring", torch.zeros(4, 2, 2, 512))

    def forward(
        self, kv: Tensor, score: Tensor, starts: Tensor, seq_lens: Tensor
    ) -> tuple[Tensor, Tensor]:
        batch = (starts, seq_lens, self.weight)
        half = dsv41ops.compress_kv(kv, score, *batch, self.slots, self.ring, 2)
        return half + 1, dsv41ops.compress_kv(kv, None, *batch, None, None, 1)


def step(num_tokens: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens)
    kv, score = torch.randn(2, num_tokens, 512, generator=generator).unbind(0)
    starts = torch.tensor([0, 1, num_tokens], dtype=torch.int32)
    return kv, score, starts, torch.tensor([6, num_tokens + 2], dtype=torch.int32)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager(backend: str) -> None:
    eager, other = Compressors(), Compressors()
    compiled = torch.compile(other, backend=backend, fullgraph=True)
    for num_tokens in (5, 8, 2):
        arguments = step(num_tokens)
        expected = eager(*step(num_tokens))
        for tensor in arguments[:2]:
            mark_unbacked(tensor, 0)
        for got, want in zip(compiled(*arguments), expected, strict=True):
            assert_same_bits(got, want)
        assert_same_bits(other.ring, eager.ring)
    assert bool(eager.ring.any())


def test_inductor_writes_the_ring_itself() -> None:
    _, (code,) = run_and_get_code(torch.compile(Compressors(), fullgraph=True), *step(5))
    assert code.count("torch.ops.dsv41.compress_kv.default(") == 2
    assert "copy_" not in code
    assert "clone" not in code


def test_exported_equals_eager() -> None:
    eager, other = Compressors(), Compressors()
    shapes = ({0: Dim("T", min=1)}, {0: Dim("T", min=1)}, None, None)
    exported = torch.export.export(other, step(5), dynamic_shapes=shapes).module()
    for num_tokens in (4, 9):
        for got, want in zip(exported(*step(num_tokens)), eager(*step(num_tokens)), strict=True):
            assert_same_bits(got, want)
    assert_same_bits(dict(exported.named_buffers())["ring"], eager.ring)
