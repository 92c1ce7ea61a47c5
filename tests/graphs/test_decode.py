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

from graphs import decode
from graphs.config import CONFIG_DIR
from graphs.model import Attention, DecodeModel

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Arguments of a run of three layers and three requests, one longer than the window."""
    values = json.loads((CONFIG_DIR / "deepseek_v4_1_small.json").read_text())
    values.update(
        num_hidden_layers=3,
        compress_ratios=[0, 2, 1],
        kv_source_layer_ids=[1, 2],
        index_source_layer_ids=[1, 2],
        candidate_source_layer_id=2,
        sliding_window=32,
        hidden_size=64,
        num_attention_heads=4,
        index_n_heads=2,
        index_topk=8,
    )
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(values))
    trace = tmp_path / "trace.csv"
    lengths = [(5, 6), (70, 3), (9, 1)]
    trace.write_text(
        HEADER + "".join(f"2023-11-16 18:17:0{i},{c},{g}\n" for i, (c, g) in enumerate(lengths))
    )
    torch._dynamo.reset()
    return [
        "--config",
        str(config),
        "--trace",
        str(trace),
        "--pool-tokens",
        "192",
        "--device",
        "cpu",
    ]


@pytest.fixture
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "pick_backend", lambda device: "eager")


def test_inductor_run(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from torch._dynamo.utils import ReinplaceCounters

    ReinplaceCounters.clear()
    assert decode.main(tiny) == 0
    assert ReinplaceCounters.get_total_missed_bytes() == 0, "a cache is copied"
    printed = capsys.readouterr().out
    for line in ("graph breaks", "recompiles after warm-up", "largest difference", "tokens/s"):
        assert line in printed
    table = read_table(printed)
    assert table["compiles"].startswith("1 ")
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compiles", [1, 0])
def test_captured_run(tiny: list[str], compiles: int, capsys: pytest.CaptureFixture[str]) -> None:
    """On CUDA every step is a replay, of a compiled step or of an eager one."""
    options = ["--device", "cuda"] if compiles else ["--device", "cuda", "--no-compile"]
    assert decode.main([*tiny, *options]) == 0
    table = read_table(capsys.readouterr().out)
    assert table["compiles"].startswith(f"{compiles} ")
    assert table["captured CUDA graphs"] == str(len(decode.BUCKETS))
    assert table["graph breaks"] == table["recompiles after warm-up"] == "0"
    assert table["tokens"] == "91"


@pytest.mark.usefixtures("eager_backend")
def test_wrong_rows_are_seen(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    insert_states = Attention._insert_states

    def forget_ring(self: Attention, x: torch.Tensor, step) -> None:
        """Pair every closing token with itself when its group began in an earlier step."""
        insert_states(self, x, step._replace(previous_in_step=step.position >= 0))

    monkeypatch.setattr(Attention, "_insert_states", forget_ring)
    assert decode.main(tiny) == 1
    captured = capsys.readouterr()
    assert "FAILED: difference" in captured.err
    assert "OK" not in captured.out


@pytest.mark.usefixtures("eager_backend")
def test_wrong_feedback_is_seen(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def feed_zero(self: DecodeModel, hidden: torch.Tensor, inputs) -> torch.Tensor:
        return torch.zeros_like(inputs.request_slots)

    monkeypatch.setattr(DecodeModel, "_sample", feed_zero)
    assert decode.main(tiny) == 1
    assert "wrong tokens" in capsys.readouterr().err


@pytest.mark.usefixtures("eager_backend")
def test_graph_break_is_seen(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = DecodeModel._sample

    def break_graph(self: DecodeModel, hidden: torch.Tensor, inputs) -> torch.Tensor:
        torch._dynamo.graph_break()
        return sample(self, hidden, inputs)

    monkeypatch.setattr(DecodeModel, "_sample", break_graph)
    assert decode.main(tiny) == 1
    assert "graphs.decode: graph break:" in capsys.readouterr().err


@pytest.mark.usefixtures("eager_backend")
def test_recompile_is_seen(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode, "warm_up", lambda step, buffers: None)
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
