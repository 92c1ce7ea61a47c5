"""``python -m graphs.decode``: exit codes, messages, and that a fault shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv41ops.nn.attention import Compressor
from graphs import decode
from graphs.draft import DraftModel
from graphs.model import DecodeModel, Layer
from tests.graphs.tiny import HEADER, draft_config, tiny_config, tiny_trace


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Arguments of a run of three layers and three requests, one longer than the window."""
    torch._dynamo.reset()
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(tiny_config()))
    return ["--config", str(config), *tiny_trace(tmp_path)]


@pytest.fixture
def drafts(tmp_path: Path, tiny: list[str]) -> list[str]:
    """The same run with draft layers."""
    config = tmp_path / "drafts.json"
    config.write_text(json.dumps(draft_config()))
    return [*tiny, "--config", str(config), "--drafts"]


@pytest.fixture
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "pick_backend", lambda device: "eager")


@pytest.mark.parametrize(("arguments", "compiles"), [("tiny", 1), ("drafts", 2)])
def test_inductor_run(
    arguments: str,
    compiles: int,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from torch._dynamo.utils import ReinplaceCounters

    ReinplaceCounters.clear()
    assert decode.main(request.getfixturevalue(arguments)) == 0
    assert ReinplaceCounters.get_total_missed_bytes() == 0, "a cache is copied"
    printed = capsys.readouterr().out
    for line in ("graph breaks", "recompiles after warm-up", "largest difference", "tokens/s"):
        assert line in printed
    table = read_table(printed)
    assert table["compiles"].startswith(f"{compiles} ")
    assert table["captured CUDA graphs"] == "0"
    assert table["graph breaks"] == table["recompiles after warm-up"] == "0"
    assert table["tokens"] == "91"
    assert {mix.split()[0] for mix in table["steps by batch mix"].split(", ")} >= {
        "prompt",
        "mixed",
    }
    assert printed.rstrip().endswith("OK")


def read_table(printed: str) -> dict[str, str]:
    rows = (line.split("  ", 1) for line in printed.splitlines() if "  " in line)
    return {name: value.strip() for name, value in rows}


def test_eager_run(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main([*tiny, "--no-compile"]) == 0
    table = read_table(capsys.readouterr().out)
    assert table["compiles"].startswith("0 (eager step, ")
    assert re.fullmatch(r"8 [\d.]+, 64 [\d.]+", table["ms per step by bucket (median)"])


@pytest.mark.usefixtures("eager_backend")
def test_drafts(drafts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main(drafts) == 0
    printed = capsys.readouterr().out
    assert "3 layers and 3 draft layers" in printed
    table = read_table(printed)
    assert table["tokens"] == "91"
    accepted, _, proposed = table["drafts accepted"].split()
    assert 0 <= int(accepted) < int(proposed)
    counts = [pair.split() for pair in table["requests' steps by drafts accepted"].split(", ")]
    assert sum(int(count) * int(steps) for count, steps in counts) == int(accepted)


@pytest.mark.usefixtures("eager_backend")
@pytest.mark.parametrize("layer", ["context", "block"])
def test_wrong_draft_rows_are_seen(
    layer: str,
    drafts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if layer == "context":
        monkeypatch.setattr(Layer, "insert_window", lambda self, hidden, metadata: None)
    else:
        metadata = DraftModel._metadata
        monkeypatch.setattr(
            DraftModel,
            "_metadata",
            lambda self, step, width=None, causal=True: metadata(self, step),
        )
    assert decode.main(drafts) == 1
    assert re.search("FAILED: difference .* draft layer", capsys.readouterr().err)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_captured_drafts(drafts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The stack and the draft layers have a graph per bucket."""
    assert decode.main([*drafts, "--device", "cuda"]) == 0
    table = read_table(capsys.readouterr().out)
    assert table["compiles"].startswith("2 ")
    assert table["captured CUDA graphs"] == str(2 * len(decode.pick_buckets(5)))
    assert table["graph breaks"] == table["recompiles after warm-up"] == "0"
    assert table["tokens"] == "91"


def test_bfloat16_run(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main([*tiny, "--no-compile", "--dtype", "bfloat16"]) == 0
    table = read_table(capsys.readouterr().out)
    assert table["tolerance"] == "1e-01"
    assert table["tokens that are not greedy"] == "0"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compiles", [1, 0])
def test_captured_run(tiny: list[str], compiles: int, capsys: pytest.CaptureFixture[str]) -> None:
    """On CUDA every step is a replay, of a compiled step or of an eager one."""
    options = ["--device", "cuda"] if compiles else ["--device", "cuda", "--no-compile"]
    assert decode.main([*tiny, *options]) == 0
    table = read_table(capsys.readouterr().out)
    assert table["compiles"].startswith(f"{compiles} ")
    assert table["captured CUDA graphs"] == str(len(decode.pick_buckets(0)))
    assert table["graph breaks"] == table["recompiles after warm-up"] == "0"
    assert table["tokens"] == "91"


@pytest.mark.usefixtures("eager_backend")
def test_wrong_rows_are_seen(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compress = Compressor.forward

    def forget_ring(self: Compressor, x: torch.Tensor, metadata, ring) -> torch.Tensor:
        """A closing token whose group began in an earlier step is pooled alone."""
        slots = torch.full_like(metadata.request_slots, -1)
        return compress(self, x, metadata._replace(request_slots=slots), ring)

    monkeypatch.setattr(Compressor, "forward", forget_ring)
    assert decode.main(tiny) == 1
    captured = capsys.readouterr()
    assert "FAILED: difference" in captured.err
    assert "OK" not in captured.out


@pytest.mark.usefixtures("eager_backend")
def test_wrong_feedback_is_seen(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sample_zero(self: DecodeModel, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden[:, 0], dtype=torch.int64)

    monkeypatch.setattr(DecodeModel, "greedy", sample_zero)
    assert decode.main(tiny) == 1
    assert "wrong tokens" in capsys.readouterr().err


@pytest.mark.usefixtures("eager_backend")
def test_graph_break_is_seen(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    greedy = DecodeModel.greedy

    def break_graph(self: DecodeModel, hidden: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return greedy(self, hidden)

    monkeypatch.setattr(DecodeModel, "greedy", break_graph)
    assert decode.main(tiny) == 1
    assert "graphs.decode: graph break:" in capsys.readouterr().err


@pytest.mark.usefixtures("eager_backend")
def test_recompile_is_seen(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode, "warm_up", lambda steps, buffers: None)
    assert decode.main(tiny) == 1
    assert "recompiles after warm-up" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "huge"], "unknown config 'huge'"),
        (["--trace", "absent.csv"], "trace absent.csv: No such file"),
        (["--pool-tokens", "64"], "needs .* tokens, the pool holds 64"),
        (["--config", "flash", "--pool-tokens", str(2**40)], "the model needs .* GiB"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main([*arguments, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(f"^graphs.decode: .*{message}", error)


def test_config_without_drafts(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main([*tiny, "--drafts"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("graphs.decode: compress_ratios: expected entries of draft layers")
    assert error.count("\n") == 1


def test_malformed_row_in_its_own_process(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(HEADER + "2023-11-16 18:17:03.9,many,3\n")
    command = [sys.executable, "-m", "graphs.decode", "--trace", str(trace)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith(f"graphs.decode: {trace}:2: ContextTokens:")
    assert run.stderr.count("\n") == 1


def test_no_compiler(tiny: list[str]) -> None:
    command = [sys.executable, "-m", "graphs.decode", *tiny]
    environment = {**os.environ, "CXX": "no-such-compiler"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    assert "no C++ compiler on this machine: running the graph with aot_eager" in run.stdout
    assert "(aot_eager," in run.stdout
