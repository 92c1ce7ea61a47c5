"""Every backend of sparse_mla_decode that can serve on this GPU: right, capturable, or refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv41ops
from dsv41ops.configs import BACKENDS
from dsv41ops.reference import attention
from tests.cuda.test_capture import CUDA, as_bits, captured
from tests.decode_calls import PAIRS, Call, Part, Rope, random_call, random_rope
from tests.export.fresh import run_fresh
from tests.support import (
    HEAD_DIM,
    assert_attention_close,
    assert_same_bits,
    ints,
    random_cache,
    record_of,
)

DEVICE = torch.device("cuda", 0)
PAIR = ("fp8_ds_mla", "fp8_ds_mla")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    reason = dsv41ops.backends(device=DEVICE)[request.param]
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    return str(request.param)


@pytest.fixture
def no_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def aligned(call: Call) -> Call:
    """With pages padded to a multiple of 16 bytes, of 576 or not."""
    parts = []
    for part in call.parts:
        pages, page_size, _ = part.cache.shape
        cache = random_cache(record_of(part.cache), pages, page_size, CUDA, pad=64)
        parts.append(replace(part, cache=cache))
    return replace(call, parts=tuple(parts))


def serves(backend: str, call: Call) -> bool:
    records = [record_of(part.cache) for part in call.parts]
    reasons = dsv41ops.backends(
        *records,
        num_heads=call.q.shape[1],
        inverse_rope=call.rope is not None,
        device=DEVICE,
    )
    return reasons[backend] is None


def check(call: Call, backend: str) -> None:
    if not serves(backend, call):
        with pytest.raises(dsv41ops.UnsupportedError, match=f"\n  {backend}: "):
            call.run(backend=backend)
        return
    held = [call.q, *(t for p in call.parts for t in (p.cache, p.indices, p.lens))]
    before = [tensor.clone() for tensor in held]
    out, lse = call.run(backend=backend)
    assert_attention_close(out, lse, *call.exact())
    assert out.is_contiguous()
    assert lse.is_contiguous()
    for tensor, copy in zip(held, before, strict=True):
        assert_same_bits(tensor, copy)
    assert_same_bits(call.run(backend=backend)[0], out)


@pytest.mark.parametrize("heads", [1, 16, 64, 100, 128])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_right_or_refused(backend: str, pair: tuple[str, str | None], heads: int) -> None:
    check(aligned(random_call(pair, 7, heads, CUDA)), backend)


@pytest.mark.parametrize(
    ("window_width", "width"), [(1, 1), (5, 64), (64, 65), (128, 512), (192, 1152)]
)
def test_widths(backend: str, window_width: int, width: int) -> None:
    call = random_call(PAIR, 3, 64, CUDA, window_width=window_width, width=width)
    check(aligned(call), backend)


@pytest.mark.parametrize("sink", [-math.inf, math.inf, 3e38, -3e38, 4.0])
def test_sinks(backend: str, sink: float) -> None:
    call = aligned(random_call(PAIR, 5, 64, CUDA))
    check(replace(call, sink=torch.full((64,), sink, device=CUDA)), backend)


def test_strided_queries(backend: str) -> None:
    call = aligned(random_call(PAIR, 3, 64, CUDA))
    wide = torch.randn(3, 128, HEAD_DIM, device=CUDA).bfloat16()
    check(replace(call, q=wide[:, 32:96]), backend)
    odd = torch.randn(3, 64, HEAD_DIM + 1, device=CUDA).bfloat16()
    check(replace(call, q=odd[..., 1:]), backend)


def test_empty_rows_and_widths(backend: str) -> None:
    call = aligned(random_call(PAIR, 4, 16, CUDA))
    window, selected = call.parts
    indices = window.indices.clone()
    indices[0] = -1
    lens = ints([40, 0, -3, 1], CUDA)
    indices[3, 0] = 5
    parts = (
        replace(window, indices=indices, lens=lens),
        replace(selected, lens=ints([0, 0, -1, 0], CUDA)),
    )
    check(replace(call, parts=parts), backend)
    out, lse = replace(call, parts=parts).run(backend=backend)
    assert torch.isneginf(lse).all(1).tolist() == [True, True, True, False]
    assert not out[:3].any()
    nothing = tuple(replace(part, indices=part.indices[:, :0]) for part in parts)
    check(replace(call, parts=nothing), backend)


def test_nan_rows_that_are_not_selected(backend: str) -> None:
    """Row 0 too, which FlashMLA reads for an index of -1."""
    call = aligned(random_call(PAIR, 3, 64, CUDA))
    parts = []
    for part in call.parts:
        indices = torch.where(part.indices % 5 == 0, -1, part.indices)
        parts.append(replace(part, indices=indices.contiguous()))
        slots = torch.arange(0, part.cache.shape[0] * part.cache.shape[1], 5, device=CUDA)
        nan = torch.full((len(slots), HEAD_DIM), math.nan, dtype=torch.bfloat16, device=CUDA)
        dsv41ops.kv_cache_insert(nan, slots, part.cache)
    check(replace(call, parts=tuple(parts)), backend)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("heads", [5, 64, 128])
@pytest.mark.parametrize("tokens", [1, 20, 300])
@pytest.mark.parametrize("pair", [PAIR, ("mxfp8", "nvfp4"), ("bf16", None)], ids=str)
def test_rotates_back(
    backend: str, pair: tuple[str, str | None], tokens: int, heads: int, dtype: torch.dtype
) -> None:
    """Also of tokens without a row, and by positions that the table does not have; only ``out``."""
    call = aligned(random_call(pair, tokens, heads, CUDA))
    for part in call.parts:
        part.lens[4::5] = 0
    turning = replace(call, rope=random_rope(tokens, CUDA, dtype))
    check(turning, backend)
    if not serves(backend, turning):
        return
    out, lse = turning.run(backend=backend)
    plain, plain_lse = call.run(backend=backend)
    assert_same_bits(lse, plain_lse)
    assert_same_bits(out[..., :448], plain[..., :448])
    assert_same_bits(out[4::5], torch.zeros_like(out[4::5]))
    positions = turning.rope.positions
    outside = (positions < 0) | (positions >= turning.rope.cos_sin.shape[0])
    assert_same_bits(out[outside], plain[outside])


def test_rotated_values_are_rounded_once(backend: str) -> None:
    """A quarter turn swaps the f32 columns, and no rounding shows."""
    quarter = torch.cat([torch.zeros(1, 32), torch.ones(1, 32)], 1).to(CUDA)
    for tokens in (1, 300):
        call = aligned(random_call(PAIR, tokens, 16, CUDA))
        zeros = torch.zeros(tokens, dtype=torch.int64, device=CUDA)
        turning = replace(call, rope=Rope(zeros, quarter))
        if not serves(backend, turning):
            continue
        plain, _ = call.run(backend=backend)
        out, _ = turning.run(backend=backend)
        even, odd = plain[..., 448::2], plain[..., 449::2]
        assert torch.equal(out[..., 448:], torch.stack([odd, -even], -1).flatten(-2))


@pytest.mark.parametrize("heads", [5, 64])
def test_many_tokens(backend: str, heads: int) -> None:
    """More than one turn of a split workspace; against the reference."""
    T = 2500
    call = aligned(random_call(PAIR, T, heads, CUDA))
    (window, selected) = call.parts
    out, lse = call.run(backend=backend)
    expected = attention.sparse_mla_decode(
        *(call.q, window.cache, window.indices, window.lens),
        *(selected.cache, selected.indices, selected.lens, call.sink, call.scale, False),
    )
    assert_attention_close(out, lse, *expected, rtol=6e-3)


@pytest.mark.parametrize("heads", [5, 64])
def test_out_form(backend: str, heads: int) -> None:
    call = aligned(random_call(("fp8_ds_mla", None), 3, heads, CUDA))
    (window,) = call.parts
    out = torch.full((5, heads + 1, HEAD_DIM), 7.0, device=CUDA).bfloat16()
    lse = torch.full((5, heads + 1), 7.0, device=CUDA)
    dsv41ops.sparse_mla_decode_out(
        *(call.q, window.cache, window.indices, window.lens),
        attn_sink=call.sink,
        backend=backend,
        out=out[:, :heads],
        lse=lse[:, :heads],
    )
    assert_attention_close(out[:3, :heads].contiguous(), lse[:3, :heads], *call.exact())
    for buffer in (out, lse):
        assert bool((buffer[3:] == 7).all())
        assert bool((buffer[:, heads] == 7).all())


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("tokens", [1, 9, 200])
@pytest.mark.parametrize("rope", [False, True], ids=["plain", "rope"])
def test_one_graph_serves_any_lengths(backend: str, rope: bool, tokens: int, heads: int) -> None:
    """Captured with every length 0; each replay equals eager, bit for bit."""
    call = aligned(random_call(PAIR, tokens, heads, CUDA, window_width=128, width=512))
    static = replace(
        call,
        parts=tuple(
            Part(part.cache, torch.zeros_like(part.indices), torch.zeros_like(part.lens))
            for part in call.parts
        ),
    )
    if rope:
        table = random_rope(tokens, CUDA)
        static = replace(static, rope=replace(table, positions=torch.zeros_like(table.positions)))
        if not serves(backend, static):
            pytest.skip(f"{backend}: does not rotate back")
    graph, outputs = captured(lambda: static.run(backend=backend))
    for _ in range(10):
        new = random_call(PAIR, tokens, heads, CUDA, window_width=128, width=512)
        static.q.copy_(new.q)
        if rope:
            static.rope.positions.copy_(random_rope(tokens, CUDA).positions)
        for part, drawn in zip(static.parts, new.parts, strict=True):
            part.indices.copy_(drawn.indices)
            part.lens.copy_(drawn.lens)
        graph.replay()
        for got, want in zip(outputs, static.run(backend=backend), strict=True):
            assert torch.equal(as_bits(got), as_bits(want))
    assert_attention_close(*outputs, *static.exact())


def test_no_host_sync(backend: str, request: pytest.FixtureRequest) -> None:
    call = aligned(random_call(PAIR, 5, 16, CUDA))
    call.run(backend=backend)
    request.getfixturevalue("no_sync")
    call.run(backend=backend)


def test_auto_is_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    call = aligned(random_call(PAIR, 5, 64, CUDA))
    results = {name: call.run(backend=name) for name in BACKENDS if serves(name, call)}

    def equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
        return all(torch.equal(as_bits(x), as_bits(y)) for x, y in zip(a, b, strict=True))

    assert any(equal(call.run(), result) for result in results.values())
    for name, result in results.items():
        monkeypatch.setenv("DSV41_BACKEND", name)
        assert equal(call.run(), result)


def test_batch_invariant_is_served_or_refused(backend: str) -> None:
    call = aligned(random_call(PAIR, 40, 16, CUDA))
    invariant: dict[str, Any] = {"batch_invariant": True, "backend": backend}
    if dsv41ops.backends(*PAIR, batch_invariant=True, device=DEVICE)[backend] is not None:
        with pytest.raises(dsv41ops.UnsupportedError, match="batch_invariant"):
            call.run(**invariant)
        return
    out, _ = call.run(**invariant)
    alone, _ = call.select([7]).run(**invariant)
    assert_same_bits(alone[0], out[7])


COLD = """
import sys, torch, dsv41ops
backend, warm = sys.argv[1:]
cache = dsv41ops.new_kv_cache(2, 64, "auto", "cuda")
q = torch.zeros(3, 64, 512, dtype=torch.bfloat16, device="cuda")
indices = torch.zeros(3, 128, dtype=torch.int32, device="cuda")
lens = torch.ones(3, dtype=torch.int32, device="cuda")
if warm == "warm":
    dsv41ops.warmup(64, "auto", "auto", attn_sink=False, backend=backend, max_num_tokens=8)
try:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = dsv41ops.sparse_mla_decode(q, cache, indices, lens, backend=backend)
    graph.replay()
    print("captured", lse.tolist()[0][0])
except RuntimeError as error:
    print(error)
_, lse = dsv41ops.sparse_mla_decode(q, cache, indices, lens, backend=backend)
print("eager", lse.tolist()[0][0])
"""


def test_cold_capture_says_so_and_warmup_helps(backend: str) -> None:
    cold = run_fresh(COLD, backend, "cold")
    assert "and a CUDA graph is being captured" in cold.stdout, cold.stderr
    assert cold.stdout.endswith("eager 0.0\n")
    warm = run_fresh(COLD, backend, "warm")
    assert warm.stdout == "captured 0.0\neager 0.0\n", warm.stderr
