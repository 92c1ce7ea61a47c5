"""The CUDA C++ kernels compile for Hopper within its limits, and get what they expect; no GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv41ops
from dsv41ops.configs import (
    MMA_RANKS,
    RING_SLOTS,
    WGMMA_US,
    CudaConfig,
    DecodeProblem,
    WgmmaConfig,
    cuda_variants,
    mma_config,
)
from dsv41ops.kernels.cuda.params import FIELDS, LAYOUT
from dsv41ops.layouts import record_named

pytest.importorskip("cuda.bindings", reason="needs cuda-bindings and nvidia-cuda-nvrtc")

from dsv41ops.kernels.cuda import nvrtc, sparse_mla_decode

SM_REGISTERS = 65536
SM_SHARED_BYTES = 228 * 1024
RESERVED_BYTES = 1024  # of shared memory, per CTA, by the driver
# ptxas keeps a few scalars on the stack, most for clusters of the wgmma kernel, whose roles share
# registers by setmaxnreg: 24 bytes by NVRTC 13.0, 8 by 13.5.
STACK_BYTES = 32
SIZES = {"P": 8, "q": 8, "i": 4, "I": 4, "f": 4}
STREAM = 77


def shipped(records: str) -> set[CudaConfig]:
    """Every variant that some call for these records launches."""
    window, record = records.split("+")
    problem = DecodeProblem(
        num_tokens=1,
        num_heads=64,
        window_width=128,
        topk_width=0 if record == "none" else 512,
        num_sms=132,
        window_record=window,
        record=None if record == "none" else record,
    )
    return cuda_variants(
        replace(problem, num_tokens=num_tokens, num_heads=heads, batch_invariant=batch_invariant)
        for num_tokens in range(1, 300)
        for heads in (16, 32, 64, 128)
        for batch_invariant in (False, True)
    )


def test_the_gate_sees_every_config() -> None:
    """One that is nowhere the fastest for some records is not compiled for them."""
    seen: set[CudaConfig] = set()
    for records in RING_SLOTS:
        found = shipped(records)
        wgmma = {WgmmaConfig(*shape) for shape in WGMMA_US["mxfp8"]}
        assert found <= {*wgmma, *(mma_config(records, ranks) for ranks in MMA_RANKS)}
        seen |= found
    assert wgmma < seen
    assert {config.ranks for config in seen - wgmma} == set(MMA_RANKS)


def row_bytes(records: str) -> tuple[int, int]:
    window, record = records.split("+")
    return record_named(window).row_bytes, (
        0 if record == "none" else record_named(record).row_bytes
    )


def compiled(records: str, config: CudaConfig) -> str:
    """The assembler's report; what it does not report is asserted in the source itself."""
    shared = SM_SHARED_BYTES // config.ctas_per_sm - RESERVED_BYTES
    offsets, end = {}, 0
    for name, code in FIELDS.items():
        start = -(-end // SIZES[code]) * SIZES[code]
        offsets[name], end = start, start + SIZES[code]
    claims = {
        f"sizeof(Shared) <= {shared}": f"shared memory: over {shared} bytes",
        f"THREADS == {config.threads}": "threads",
        f"HEADS == {config.heads}": "heads",
        f"sizeof(Params) == {LAYOUT.size}": "sizeof(Params)",
    }
    text = sparse_mla_decode.source_text(config.source)
    for name, offset in offsets.items():
        claims[f"__INTADDR__(&((Params*)0)->{name}) == {offset}"] = f"Params.{name}"
    text += "".join(f'\nstatic_assert({claim}, "{what}");' for claim, what in claims.items())
    swa_record, record = row_bytes(records)
    macros = (*config.macros, ("SWA_RECORD", swa_record), ("RECORD", record))
    _, log = nvrtc.compile_cubin(text, config.source, macros, "--ptxas-options=-v")
    return log


def found(pattern: str, report: str) -> int:
    """The most, where there are functions of their own."""
    return max(map(int, re.findall(pattern, report)))


@pytest.mark.parametrize("records", RING_SLOTS)
def test_compiles_within_limits(records: str) -> None:
    configs = sorted(shipped(records), key=repr)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = list(pool.map(partial(compiled, records), configs))
    for config, report in zip(configs, reports, strict=True):
        # What is spilled lies on the stack.
        assert found(r"(\d+) bytes stack frame", report) <= STACK_BYTES, config
        assert "C7512" not in report, report  # wgmma serialized
        assert "Performance Loss" not in report, report
        limit = SM_REGISTERS // (config.threads * config.ctas_per_sm)
        assert found(r"Used (\d+) registers", report) <= limit, config


def test_a_source_that_does_not_compile() -> None:
    with pytest.raises(RuntimeError, match=r"NVRTC could not compile x.cu: .*\nx.cu\(1\): error: "):
        nvrtc.compile_cubin("wrong", "x.cu", [])


class Recorder:
    """A kernel in the place of every one: what is compiled and launched, and nothing runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernels: list[tuple[Any, ...]] = []
        self.launches: list[tuple[int, ...]] = []
        self.params: list[dict[str, Any]] = []
        stream = SimpleNamespace(cuda_stream=STREAM)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(sparse_mla_decode, "sms_and_capability", lambda device: (132, 9))
        monkeypatch.setattr(sparse_mla_decode, "_kernel", self.kernel)
        sparse_mla_decode._plan.cache_clear()

    def kernel(self, *key: Any) -> SimpleNamespace:
        self.kernels.append(key)
        return SimpleNamespace(launch=self.launch)

    def launch(self, *sizes: int) -> Any:
        self.launches.append(sizes)
        return lambda params: self.params.append(
            dict(zip(FIELDS, LAYOUT.unpack(params), strict=True))
        )


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    yield Recorder(monkeypatch)
    sparse_mla_decode._plan.cache_clear()


def rows(num_tokens: int, width: int) -> tuple[Tensor, Tensor]:
    indices = torch.zeros(num_tokens, width + 3, dtype=torch.int32)[:, :width]
    return indices, torch.zeros(num_tokens, dtype=torch.int32)


def call(
    num_tokens: int = 2,
    heads: int = 20,
    width: int = 512,
    swa: str = "mxfp8",
    sink: bool = True,
    scale: float = 0.5,
) -> tuple[Any, ...]:
    q = torch.zeros(num_tokens, heads + 1, 512).bfloat16()[:, :heads]
    cache = dsv41ops.new_kv_cache(5, 7, "nvfp4" if swa == "mxfp8" else swa)
    return (
        *(q, dsv41ops.new_kv_cache(3, 32, swa), *rows(num_tokens, 128)),
        *(cache, *rows(num_tokens, width)),
        *(torch.zeros(heads) if sink else None, scale, False),
    )


def test_parameters_of_a_call(recorder: Recorder) -> None:
    arguments = call()
    out, lse = sparse_mla_decode.launch_sparse_mla_decode(*arguments)
    q, swa_cache, swa_indices, swa_lens, cache, topk_indices, topk_lens, sink, _, _ = arguments
    (params,) = recorder.params
    expected = {
        "q": q.data_ptr(),
        "q_token_stride": 21 * 512,
        "q_head_stride": 512,
        "swa.bytes": swa_cache.data_ptr(),
        "swa.indices": swa_indices.data_ptr(),
        "swa.lens": swa_lens.data_ptr(),
        "swa.page_stride": 32 * 528,
        "swa.indices_stride": 131,
        "swa.page_size": 32,
        "swa.num_slots": 96,
        "swa.width": 128,
        "topk.bytes": cache.data_ptr(),
        "topk.indices": topk_indices.data_ptr(),
        "topk.lens": topk_lens.data_ptr(),
        "topk.page_stride": 7 * 288,
        "topk.indices_stride": 515,
        "topk.page_size": 7,
        "topk.num_slots": 35,
        "topk.width": 512,
        "sink": sink.data_ptr(),
        "out": out.data_ptr(),
        "out_token_stride": 20 * 512,
        "out_head_stride": 512,
        "lse": lse.data_ptr(),
        "lse_token_stride": 20,
        "lse_head_stride": 1,
        "num_heads": 20,
        "head_groups": 2,
        "num_units": 4,
        "scale_log2": pytest.approx(0.5 / 0.6931471805599453),
    }
    assert {name: params[name] for name in expected} == expected
    ((ctas, threads, cluster, stream),) = recorder.launches
    assert ctas == 2 * 2 * cluster
    assert (threads, stream) == (448, STREAM)
    ((_, source, macros),) = recorder.kernels
    assert source == "sparse_mla_decode.cu"
    assert dict(macros).items() >= {"SLOTS": 12, "RANKS": cluster, "SWA_RECORD": 528}.items()
    assert dict(macros)["RECORD"] == 288


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rotation_of_the_output(recorder: Recorder, dtype: torch.dtype) -> None:
    positions, cos_sin = torch.zeros(2, dtype=dtype), torch.zeros(7, 96)[:, :64]
    for rotation in ((positions, cos_sin), (None, None)):
        sparse_mla_decode.launch_sparse_mla_decode(*call(), *rotation)
    names = ("positions", "cos_sin", "cos_sin_stride", "num_positions", "wide_positions")
    given, none = ([params[name] for name in names] for params in recorder.params)
    wide = int(dtype is torch.int64)
    assert given == [positions.data_ptr(), cos_sin.data_ptr(), 96, 7, wide]
    assert none == [0] * 5
    assert len(recorder.kernels) == 1  # the same kernel


@pytest.mark.parametrize(
    ("num_tokens", "heads", "wide", "ctas"),
    [
        *((100, 40, 64, 100), (100, 100, 64, 132)),
        *((100, 5, 16, 100), (200, 16, 16, 132), (20, 16, 16, 100)),
        *((100, 17, 32, 100), (60, 40, 32, 120), (200, 20, 32, 132)),
        *((10, 64, 32, 100), (16, 64, 32, 96), (33, 64, 32, 132)),
    ],
)
def test_many_tokens(recorder: Recorder, num_tokens: int, heads: int, wide: int, ctas: int) -> None:
    sparse_mla_decode.launch_sparse_mla_decode(*call(num_tokens, heads))
    groups = -(-heads // wide)
    (params,) = recorder.params
    assert (params["head_groups"], params["num_units"]) == (groups, num_tokens * groups)
    ranks = 2 if (wide, groups) == (64, 2) else max(1, ctas // (num_tokens * groups))
    threads = 768 if wide == 16 else 512
    assert recorder.launches == [(ctas, threads, ranks, STREAM)]
    ((_, source, macros),) = recorder.kernels
    assert source == "sparse_mla_decode_wgmma.cu"
    assert dict(macros) == {"HEADS": wide, "RANKS": ranks, "SWA_RECORD": 528, "RECORD": 288}


def test_without_compressed_rows_or_sink(recorder: Recorder) -> None:
    """No compressed cache, or none of its rows asked for: the same kernel."""
    arguments = call(width=0, sink=False)
    none = (*arguments[:4], None, None, None, *arguments[7:])
    for given in (arguments, none):
        sparse_mla_decode.launch_sparse_mla_decode(*given)
    assert len(recorder.launches) == 1  # the second call is one look-up
    assert dict(recorder.kernels[0][2])["RECORD"] == 0
    for params in recorder.params:
        assert not any(value for name, value in params.items() if name.startswith("topk."))
        assert params["sink"] == 0


def test_warm_kernels_are_those_of_every_step(recorder: Recorder) -> None:
    problem = DecodeProblem(1, 40, 128, 512, 132, window_record="mxfp8", record="nvfp4")
    tokens = range(1, 200)
    for options in sparse_mla_decode.variants(replace(problem, num_tokens=T) for T in tokens):
        sparse_mla_decode.launch_sparse_mla_decode(*call(1, heads=40, width=1), **options)
    warm, recorder.kernels = set(recorder.kernels), []
    for scale in (0.5, 2.0):  # the larger is not for wgmma
        for T in tokens:
            sparse_mla_decode.launch_sparse_mla_decode(*call(T, heads=40, scale=scale))
    assert set(recorder.kernels) == warm
    found = {(dict(macros).get("HEADS"), dict(macros)["RANKS"]) for _, _, macros in warm}
    assert {(64, 1), (32, 1), (32, 3), (None, 8), (None, 1)} < found
    assert found <= {*WGMMA_US["mxfp8"], *((None, ranks) for ranks in MMA_RANKS)}


def test_no_tokens_launch_nothing(recorder: Recorder) -> None:
    out, lse = sparse_mla_decode.launch_sparse_mla_decode(*call(num_tokens=0))
    assert (out.shape, lse.shape) == ((0, 20, 512), (0, 20))
    assert not recorder.launches


def test_rows_off_16_bytes_are_copied(recorder: Recorder) -> None:
    q, *rest = call()
    odd_q = torch.ones(2, 20, 513).bfloat16()[..., 1:]
    odd_out = torch.full((3, 20, 513), 7.0).bfloat16()[..., 1:]
    lse = torch.zeros(3, 20)
    for given, out in ((odd_q, None), (q, odd_out), (q, None)):
        sparse_mla_decode.launch_sparse_mla_decode(given, *rest, out=out, lse=lse)
    copied_q, copied_out, plain = recorder.params
    assert copied_q["q"] not in (odd_q.data_ptr(), q.data_ptr())
    assert (copied_q["q_token_stride"], copied_q["q_head_stride"]) == (20 * 512, 512)
    assert copied_out["q"] == plain["q"] == q.data_ptr()
    assert copied_out["out"] % 16 == 0
    assert copied_out["out_token_stride"] == 20 * 512
    assert bool((odd_out[2] == 7).all())


@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 7, 32, 33, 63, 64, 65, 1000, 2**20 - 1, 2**28])
def test_division_by_multiplication(divisor: int) -> None:
    magic, shift = sparse_mla_decode._division(divisor)
    assert magic < 2**32
    numbers = {0, 1, divisor - 1, divisor, divisor + 1, 2**31 - 1}
    numbers |= {2**31 // divisor * divisor - near for near in (0, 1) if divisor > near}
    for number in numbers - {2**31}:
        assert number * magic < 2**64
        assert number * magic >> shift == number // divisor


def test_loading_in_a_capture_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    expected = r"^cuda: .* is not loaded yet, and a CUDA graph is being captured\. .*warmup"
    with pytest.raises(RuntimeError, match=expected):
        sparse_mla_decode._kernel(0, "sparse_mla_decode.cu", ())
