"""The command: what it refuses, the whole run without a GPU's part, and progress."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv41ops import dispatch
from dsv41ops.bench import cli, flash_mla, roofline
from dsv41ops.bench.check import WrongResultError
from dsv41ops.bench.problems import DecodeCase
from dsv41ops.bench.progress import Progress
from dsv41ops.configs import DecodeProblem
from dsv41ops.kernels.flash_mla import library
from tests.bench.runs import ROOFLINE, made_up_run, small_inputs, small_plan, timing
from tests.export.fresh import ROOT, run_fresh


def test_no_gpu_is_one_line_and_exit_code_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dsv41ops.bench", "--quick"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "dsv41ops.bench: no CUDA GPU here; every op is timed on one\n"


def test_package_does_not_import_the_bench() -> None:
    done = run_fresh(
        "import sys, dsv41ops, dsv41ops.backend; print('dsv41ops.bench' in sys.modules)"
    )
    assert done.stdout == "False\n", done.stderr


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the command asks before it runs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


def test_missing_folder_is_refused_before_the_run(
    gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none" / "out.json"
    assert f"{path}: no folder" in refused(["--json", str(path)], capsys)


def test_missing_matplotlib_is_refused_before_the_run(
    gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "dsv41ops[plot]" in refused(["--plot", "out.png"], capsys)


def test_wrong_result_is_exit_code_1(
    gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*args: object) -> None:
        raise WrongResultError("sparse_mla_decode: error 1e-1")

    monkeypatch.setattr(cli, "bench", wrong)
    assert cli.main([]) == 1
    expected = "dsv41ops.bench: wrong result, nothing timed: sparse_mla_decode: error 1e-1\n"
    assert capsys.readouterr().err == expected


def test_writes_table_and_json(
    gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "bench", lambda *args: made_up_run())
    path = tmp_path / "out.json"
    assert cli.main(["--json", str(path)]) == 0
    assert "| 584+584 " in capsys.readouterr().out
    assert json.loads(path.read_text())["gpu"] == "made-up GPU"


def test_table_is_what_auto_reads(
    gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "bench", lambda *args: made_up_run())
    path = tmp_path / "table.json"
    assert cli.main(["--table", str(path)]) == 0
    assert " 25.0* |" in capsys.readouterr().out  # marked as this table chooses
    problem = DecodeCase("fp8_ds_mla", "fp8_ds_mla", 16, 1).problem(132, 9)
    times = dispatch.read_times(path.read_text(), capability=9)
    assert dispatch.fastest_first(problem, times)[0] == "triton"
    assert dispatch.fastest_first(replace(problem, num_tokens=2), times)[0] == "flash_mla"
    assert dispatch.read_times(path.read_text(), capability=10) == {}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's measurements made up; its cases run on the CPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "made-up GPU")
    monkeypatch.setattr(roofline, "measure", lambda device: ROOFLINE)
    monkeypatch.setattr(cli, "time_calls", lambda run, calls, warm=(): timing(5.0))
    monkeypatch.setattr(dispatch, "refusal", two_backends)


def two_backends(backend: str, device: torch.device, problem: DecodeProblem | None) -> str | None:
    return None if backend in ("triton", "flash_mla") else "not here"


def test_run_without_flash_mla(measured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(device: torch.device) -> None:
        raise flash_mla.UnavailableError("not installed")

    monkeypatch.setattr(flash_mla, "load", load)
    run = cli.bench(small_plan(), small_inputs(), "command")
    assert [result.case for result in run.decode] == list(small_plan().decode)
    assert [result.case for result in run.ops] == list(small_plan().ops)
    assert run.flash_mla == "not compared: not installed"
    assert all(result.ratio is None for result in run.decode)
    assert all(set(result.times) == {"triton", "flash_mla"} for result in run.decode)
    assert all(result.choice in result.times for result in run.decode)


def test_run_beside_flash_mla(measured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in that is called as FlashMLA is."""
    stand_in(monkeypatch, factor=1.0)
    run = cli.bench(small_plan(), small_inputs(), "command")
    assert run.flash_mla == "sgl-flash-mla 1.0.0"
    assert [result.ratio for result in run.decode] == [1.0, 1.0]


def test_wrong_flash_mla_is_not_compared(measured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, factor=1.1)
    run = cli.bench(small_plan(), small_inputs(), "command")
    assert run.flash_mla.startswith("not compared: FlashMLA sparse_mla_decode 584+584 H=64 T=1")
    assert run.decode[0].ratio is None


def stand_in(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    def op(q, kv, indices, lens, sink, meta, splits, *extra):  # type: ignore[no-untyped-def]
        extra_kv, extra_indices, extra_lens, d_v, scale, kv_format = extra
        assert (d_v, kv_format) == (512, None)
        assert q.shape[1:] == (1, 64, 512)
        assert kv.shape[2:] == extra_kv.shape[2:] == (1, 584)
        out, lse = torch.ops.dsv41.sparse_mla_decode(
            q[:, 0],
            kv[:, :, 0],
            indices[:, 0],
            lens,
            extra_kv[:, :, 0],
            extra_indices[:, 0],
            extra_lens,
            sink,
            scale,
        )
        return out[:, None] * factor, lse[:, :, None], torch.zeros(1), torch.zeros(1)

    monkeypatch.setattr(flash_mla, "load", lambda device: op)
    monkeypatch.setattr(library, "version", lambda: "sgl-flash-mla 1.0.0")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize(("num_heads", "padded"), [(8, 64), (64, 64), (128, 128)])
def test_flash_mla_pads_heads_and_has_one_record(num_heads: int, padded: int) -> None:
    case = flash_mla.padded_case(DecodeCase("mxfp8", "nvfp4", num_heads, 4))
    assert case == DecodeCase("fp8_ds_mla", "fp8_ds_mla", padded, 4)


def test_flash_mla_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    with pytest.raises(flash_mla.UnavailableError, match="not installed"):
        flash_mla.load(torch.device("cpu"))


def test_progress_in_a_log_is_a_few_lines() -> None:
    stream = io.StringIO()
    progress = Progress(100, stream)
    for number in range(100):
        progress.step(f"case {number}")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) <= 21
    assert lines[-1] == f"[{'#' * 24}] 100/100 case 99"
