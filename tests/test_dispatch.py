"""Which backend serves a call: pure choice by table, name and environment; refusals and listing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv41ops
from dsv41ops import dispatch
from dsv41ops.configs import BACKENDS, DecodeProblem
from dsv41ops.kernels.cuda import supports as cuda
from dsv41ops.kernels.flash_mla import library, supports
from dsv41ops.layouts import HEAD_DIM, RECORDS
from tests.contract.inputs import argument_sets, schema_order

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
PROBLEM = DecodeProblem(
    num_tokens=8,
    num_heads=64,
    window_width=128,
    topk_width=512,
    num_sms=132,
    window_record="fp8_ds_mla",
    record="fp8_ds_mla",
)
TABLE = json.dumps(
    {
        "capability": 9,
        "us": [
            ["fp8_ds_mla+fp8_ds_mla", 16, 8, {"triton": 1.0, "flash_mla": 2.0}],
            ["fp8_ds_mla+fp8_ds_mla", 64, 8, {"triton": 2.0, "flash_mla": 1.0}],
            ["fp8_ds_mla+fp8_ds_mla", 64, 16, {"triton": 1.0, "flash_mla": 2.0}],
            ["mxfp8+nvfp4", 64, 8, {"triton": 3.0}],
        ],
    }
)
TIMES = dispatch.read_times(TABLE, capability=9)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No choice that another test made, and none from outside."""
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
    remembered = (dispatch._chosen, dispatch._unavailable, dispatch.measured_times, library._load)
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


def test_environment_replaces_auto_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dispatch.requested("auto") == "auto"
    monkeypatch.setenv("DSV41_BACKEND", "flash_mla")
    assert dispatch.requested("auto") == "flash_mla"
    assert dispatch.requested("triton") == "triton"
    monkeypatch.setenv("DSV41_BACKEND", "fast")
    assert dispatch.requested("triton") == "triton"
    with pytest.raises(ValueError, match=r"^DSV41_BACKEND: expected one of auto, .*, got 'fast'$"):
        dispatch.choose(dispatch.requested("auto"), CUDA, PROBLEM)


def test_a_cpu_tensor_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_BACKEND", "flash_mla")
    out, _ = dsv41ops.sparse_mla_decode(**argument_sets("sparse_mla_decode")["all"](CPU))
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({}, "flash_mla"),
        ({"num_tokens": 1}, "flash_mla"),  # the next larger
        ({"num_tokens": 9}, "triton"),
        ({"num_tokens": 9999}, "triton"),  # beyond the largest
        ({"num_heads": 17}, "flash_mla"),
        ({"num_heads": 16}, "triton"),
        ({"num_heads": 128}, "flash_mla"),
        ({"record": None}, "flash_mla"),  # as the pair of its record
    ],
)
def test_table_decides_by_the_next_larger_size(change: dict[str, Any], first: str) -> None:
    order = dispatch.fastest_first(replace(PROBLEM, **change), TIMES)
    assert order[0] == first
    assert sorted(order) == sorted(BACKENDS)


def test_what_was_not_measured_comes_last_and_in_order() -> None:
    mixed = replace(PROBLEM, window_record="mxfp8", record="nvfp4")
    assert dispatch.fastest_first(mixed, TIMES)[0] == "triton"
    for record in ("nvfp4", None):
        unknown = replace(PROBLEM, window_record="bf16", record=record)
        assert dispatch.fastest_first(unknown, TIMES) == list(BACKENDS)
    assert dispatch.read_times(TABLE, capability=10) == {}


def test_a_batch_invariant_call_keeps_its_backend() -> None:
    for num_tokens in (1, 8, 16, 9999):
        problem = replace(PROBLEM, num_tokens=num_tokens, batch_invariant=True)
        assert dispatch.fastest_first(problem, TIMES) == list(BACKENDS)


def test_shipped_table() -> None:
    table = json.loads(dispatch.TABLE.read_text())
    assert table["command"].startswith("python -m dsv41ops.bench --table ")
    records = {record.name for record in RECORDS}
    for pair, num_heads, num_tokens, us in table["us"]:
        assert set(pair.split("+")) <= records
        assert num_heads >= 1
        assert num_tokens >= 1
        assert set(us) <= set(BACKENDS)
        assert min(us.values()) > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_has_its_modules(backend: str) -> None:
    light = import_module(f"dsv41ops.kernels.{backend}.supports")
    assert light.supports(replace(PROBLEM, window_record="nvfp4", record="bf16")) in (
        None,
        light.supports(replace(PROBLEM, window_record="nvfp4", record="bf16", num_tokens=1)),
    )
    pytest.importorskip("cuda.bindings" if backend == "cuda" else "triton")
    module = import_module(f"dsv41ops.kernels.{backend}.sparse_mla_decode")
    assert callable(module.launch_sparse_mla_decode)
    assert all(isinstance(options, dict) for options in module.variants([PROBLEM]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"record": None}, None),
        ({"num_heads": 1}, None),
        ({"num_heads": 100, "num_tokens": 8192}, None),
        ({"window_width": 0, "topk_width": 7}, None),
        ({"record": "nvfp4"}, "fp8_ds_mla in both caches only, these are fp8_ds_mla+nvfp4"),
        ({"window_record": "mxfp8", "record": None}, "these are mxfp8+none"),
        ({"batch_invariant": True}, "batch_invariant: "),
        ({"softmax_scale": 0.0}, "softmax_scale: "),
        ({"rope": True}, "positions and cos_sin: "),
        ({"empty_pool": True}, "a cache without a page"),
        ({"aligned": False}, "multiples of 16 bytes"),
        ({"page_stride": 2**31}, "these are 2147483648"),
    ],
)
def test_what_flash_mla_serves(change: dict[str, Any], reason: str | None) -> None:
    refused = supports.supports(replace(PROBLEM, **change))
    if reason is None:
        assert refused is None
    else:
        assert refused is not None
        assert reason in refused
        assert "\n" not in refused


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"record": None}, None),
        ({"window_record": "mxfp8", "record": "nvfp4"}, None),
        ({"window_record": "mxfp8", "record": "mxfp8"}, None),
        ({"window_record": "nvfp4", "record": None}, None),
        ({"window_record": "bf16", "record": None}, None),
        ({"window_record": "bf16", "record": "bf16"}, None),
        ({"num_heads": 1, "num_tokens": 8192, "window_width": 0, "topk_width": 7}, None),
        ({"batch_invariant": True, "softmax_scale": 0.0, "empty_pool": True}, None),
        ({"cache_bytes": 2**36, "page_stride": 2**35}, None),
        ({"rope": True}, None),
        ({"record": "nvfp4"}, "these are fp8_ds_mla+nvfp4"),
        ({"window_record": "nvfp4", "record": "mxfp8"}, "these are nvfp4+mxfp8"),
        ({"window_record": "bf16", "record": "nvfp4"}, "nvfp4+nvfp4, bf16+none, bf16+bf16, these"),
        ({"aligned": False}, "multiples of 16 bytes"),
        ({"cache_bytes": 2**36 + 16}, "2^36 bytes long, this one is 68719476752"),
    ],
)
def test_what_cuda_serves(change: dict[str, Any], reason: str | None) -> None:
    refused = cuda.supports(replace(PROBLEM, **change))
    if reason is None:
        assert refused is None
    else:
        assert refused is not None
        assert reason in refused
        assert "\n" not in refused


def test_where_cuda_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_no_compiler", lambda: None)
    for capability, reason in (
        ((9, 0), None),
        ((9, 1), "has kernels for compute capability 9.0, this GPU has 9.1"),
        ((10, 0), "has kernels for compute capability 9.0, this GPU has 10.0"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert cuda.unavailable(CUDA) == reason


def test_cuda_needs_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    find = cuda._no_compiler.__wrapped__
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "cuda.bindings", None)  # as if not installed
        reason = find()
    assert reason is not None
    assert reason.startswith(
        "needs cuda-bindings and NVRTC (python -m pip install 'dsv41ops[cuda]')"
    )
    assert "\n" not in reason
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    assert find() is None

    def missing() -> None:
        raise RuntimeError("no libnvrtc.so\nlooked here and there")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    assert (find() or "").endswith(": no libnvrtc.so")


def refusing(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(dispatch, "measured_times", lambda capability: TIMES)
    monkeypatch.setattr(
        dispatch,
        "refusal",
        lambda backend, device, problem: f"{backend} says no" if backend in names else None,
    )


def test_auto_takes_the_fastest_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch)
    assert dispatch.choose("auto", CUDA, PROBLEM) == "flash_mla"
    refusing(monkeypatch, "flash_mla")
    assert dispatch.choose("auto", CUDA, PROBLEM) == "triton"
    refusing(monkeypatch, *BACKENDS)
    with pytest.raises(dsv41ops.UnsupportedError) as caught:
        dispatch.choose("auto", CUDA, PROBLEM)
    assert all(f"\n  {name}: {name} says no" in str(caught.value) for name in BACKENDS)


def test_a_named_backend_runs_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, "flash_mla")
    assert dispatch.choose("triton", CUDA, PROBLEM) == "triton"
    with pytest.raises(dsv41ops.UnsupportedError, match=r"\n  flash_mla: flash_mla says no$"):
        dispatch.choose("flash_mla", CUDA, PROBLEM)


def test_listing_on_a_cpu() -> None:
    for arguments in ({}, {"swa_cache_dtype": "mxfp8", "cache_dtype": "nvfp4"}):
        found = dsv41ops.backends(**arguments, device="cpu")
        assert list(found) == list(BACKENDS)
        assert set(found.values()) == {"needs a CUDA device, this is cpu"}


def test_listing_for_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_unavailable", lambda backend, device: None)
    monkeypatch.setattr(dispatch, "sms_and_capability", lambda device: (132, 9))
    assert dsv41ops.backends(device=CUDA)["flash_mla"] is None
    assert dsv41ops.backends("auto", "fp8", device=CUDA)["flash_mla"] is None
    mixed = dsv41ops.backends("mxfp8", "nvfp4", 16, device=CUDA)
    assert mixed["triton"] is None
    assert "mxfp8+nvfp4" in (mixed["flash_mla"] or "")
    exact = dsv41ops.backends("auto", batch_invariant=True, device=CUDA)
    assert "batch_invariant" in (exact["flash_mla"] or "")
    rotated = dsv41ops.backends("auto", inverse_rope=True, device=CUDA)
    assert rotated["triton"] is None
    assert "positions and cos_sin" in (rotated["flash_mla"] or "")
    monkeypatch.setattr(dispatch, "_unavailable", lambda backend, device: "not installed")
    assert set(dsv41ops.backends("auto", device=CUDA).values()) == {"not installed"}


def test_listing_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype: expected one of"):
        dsv41ops.backends("int4", device="cpu")
    with pytest.raises(ValueError, match="num_heads: expected 1 to 128, got 129"):
        dsv41ops.backends("auto", None, 129, device="cpu")


class Recorder:
    """A launcher in the place of every backend's; the problems that choices were made for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.problems: list[DecodeProblem] = []
        self.chosen: list[str] = []
        self.calls: list[tuple[Any, ...]] = []
        monkeypatch.setattr(dispatch, "choose", self.choose)
        monkeypatch.setattr(dispatch, "launcher", lambda backend: self.launch)

    def choose(self, backend: str, device: torch.device, problem: DecodeProblem) -> str:
        self.chosen.append(backend)
        self.problems.append(problem)
        return backend

    def launch(self, *args: Any, **buffers: Any) -> tuple[Any, ...]:
        self.calls.append(args)
        return args[0], args[1]


def nvfp4_cache(offset: int, page_stride: int) -> torch.Tensor:
    storage = torch.zeros(9999, dtype=torch.uint8)
    return storage.as_strided((2, 8, 288), (page_stride, 288, 1), offset)


def test_problem_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    arguments = argument_sets("sparse_mla_decode")["all"](CPU)
    arguments["cache"] = dsv41ops.new_kv_cache(3, 8, "fp8_ds_mla")
    call, _ = schema_order("sparse_mla_decode", arguments)
    dispatch.launch_sparse_mla_decode(*call)
    (problem,) = recorder.problems
    assert (problem.num_tokens, problem.num_heads) == (17, 2)
    assert (problem.window_width, problem.topk_width) == (12, 6)
    assert problem.records == "mxfp8+fp8_ds_mla"
    assert problem.aligned
    assert problem.page_stride == 9 * 576
    assert problem.cache_bytes == arguments["swa_cache"].numel()  # the longer one
    assert not problem.empty_pool
    assert problem.softmax_scale == HEAD_DIM**-0.5
    assert problem.rope
    assert len(recorder.calls[0]) == len(call) - 1  # a launcher knows who it is


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"backend": "triton"}, {}),
        ({"softmax_scale": 0.0}, {"softmax_scale": 0.0}),
        ({"batch_invariant": True}, {"batch_invariant": True}),
        ({"positions": None, "cos_sin": None}, {"rope": False}),
        ({"topk_indices": torch.zeros(17, 0, dtype=torch.int32)}, {"record": None}),
        ({"cache": torch.zeros(0, 8, 288, dtype=torch.uint8)}, {"empty_pool": True}),
        ({"cache": nvfp4_cache(1, 2304)}, {"aligned": False}),
        ({"cache": nvfp4_cache(0, 4336)}, {"aligned": True, "page_stride": 4336}),
        ({"cache": torch.zeros(2, 99, 288, dtype=torch.uint8)}, {"cache_bytes": 2 * 99 * 288}),
        ({"cache": nvfp4_cache(0, 4337)}, {"aligned": False, "page_stride": 4337}),
    ],
)
def test_every_difference_is_a_choice_of_its_own(
    change: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a second call of a kind costs none."""
    recorder = Recorder(monkeypatch)
    plain = argument_sets("sparse_mla_decode")["all"](CPU)
    for arguments in (plain, {**plain, **change}) * 2:
        call, _ = schema_order("sparse_mla_decode", arguments)
        dispatch.launch_sparse_mla_decode(*call)
    assert len(recorder.calls) == 4
    assert recorder.chosen == ["auto", change.get("backend", "auto")]
    for name, value in expected.items():
        assert getattr(recorder.problems[1], name) == value, name


def test_environment_reaches_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    call, _ = schema_order("sparse_mla_decode", argument_sets("sparse_mla_decode")["all"](CPU))
    dispatch.launch_sparse_mla_decode(*call)
    monkeypatch.setenv("DSV41_BACKEND", "flash_mla")
    dispatch.launch_sparse_mla_decode(*call)
    named = tuple("triton" if argument == "auto" else argument for argument in call)
    dispatch.launch_sparse_mla_decode(*named)
    assert recorder.chosen == ["auto", "flash_mla", "triton"]


def test_loading_in_a_capture_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(library, "_folder", lambda: Path("/nowhere"))
    with pytest.raises(RuntimeError, match=r"its library is not loaded yet, and .*warmup"):
        library.unavailable(CUDA)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert library.unavailable(CUDA) == "installed without its kernels for 584-byte records"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert library.unavailable(CUDA) == "needs compute capability 9.x, this GPU has 10.0"
    monkeypatch.setattr(library, "_folder", lambda: None)
    assert "--no-deps sgl-flash-mla" in (library.unavailable(CUDA) or "")


def test_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "_C_legacy.abi3.so").write_bytes(b"not a library")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(library, "_folder", lambda: tmp_path)
    reason = library.unavailable(CUDA)
    assert reason is not None
    assert reason.startswith("does not load: ")
    assert "\n" not in reason


def test_page_lists_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/backends.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(compile(example, "docs/backends.md", "exec"), {})
    printed = capsys.readouterr().out
    for backend in BACKENDS:
        assert f"\n| `{backend}` |" in page
        assert re.search(rf"^{backend} \w+", printed, re.M)


def test_page_lists_every_environment_variable() -> None:
    sources = [path for folder in ("dsv41ops", "graphs") for path in (ROOT / folder).rglob("*.py")]
    used = {name for path in sources for name in re.findall(r"DSV41_[A-Z_]+", path.read_text())}
    page = (ROOT / "docs/environment.md").read_text()
    assert used == set(re.findall(r"^\| `(DSV41_\w+)` \|", page, re.M))
