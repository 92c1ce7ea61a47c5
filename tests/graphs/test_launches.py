"""``python -m graphs.decode --launches``: rows, counts, and what the profiler's events become."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from graphs import decode
from graphs.launches import OTHER, STEP, count_events
from tests.conftest import DEVICES
from tests.graphs.tiny import draft_config


def event(name: str, kernels: int = 0, parent: object = None) -> SimpleNamespace:
    return SimpleNamespace(name=name, kernels=[None] * kernels, cpu_parent=parent)


def test_events_belong_to_the_layer_and_op_around_them() -> None:
    layer = event("layers.12")
    op = event("dsv41::indexer_topk", 1, layer)
    events = [
        layer,
        op,
        event("aten::fill_", 1, op),  # what an op does beside its kernel is its own
        event("aten::mm", 2, event("aten::linear", 0, layer)),
        event("dsv41::decode_metadata", 1),
        event("aten::argmax", 1),
        event("aten::view", 0, layer),
    ]
    assert count_events(events) == {
        "12": {"indexer_topk": 2, OTHER: 2},
        STEP: {"decode_metadata": 1, OTHER: 1},
    }


@pytest.mark.parametrize("device", DEVICES)
def test_table(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(draft_config()))
    arguments = ["--config", str(config), "--device", device, "--launches", "--drafts"]
    assert decode.main(arguments) == 0
    stack, draft = capsys.readouterr().out.split("\n\n")
    title, header, *rows = stack.strip().splitlines()
    assert title == "stack"
    assert header.split() == ["layer", "kind", "dsv41", "ops", "dsv41", "other"]
    source = (
        "rope_kv_cache_insert ×2, compress_kv, indexer_k_insert, indexer_topk, "
        "topk_to_slots, sparse_mla_decode"
    )
    step, *layers, total = rows
    assert "decode_metadata" in step
    expected = [
        ("0", "window", "rope_kv_cache_insert, sparse_mla_decode"),
        ("1", "ratio 2, kv source", source),
        ("2", "ratio 1, kv source", source),
    ]
    for row, texts in zip(layers, expected, strict=True):
        cells = [cell.strip() for cell in row.split("  ") if cell.strip()]
        if device == "cpu":  # on CUDA an op may be more than one launch
            assert tuple(cells[:3]) == texts
            assert int(cells[3]) == len(texts[2].split(", ")) + texts[2].count("×2")
        assert int(cells[-1]) > 0
    numbers = [[int(word) for word in row.split()[-2:]] for row in (step, *layers)]
    sums = [sum(column) for column in zip(*numbers, strict=True)]
    assert [int(word) for word in total.split()[-2:]] == sums
    assert [row.split()[0] for row in draft.strip().splitlines()[3:-1]] == ["3", "4", "5"]


def test_flash_is_traced_without_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.no_grad():
        assert decode.main(["--config", "flash", "--device", "cpu", "--launches"]) == 0
    rows = capsys.readouterr().out.splitlines()
    sources = [row.split()[0] for row in rows if "kv source" in row]
    selecting = [row.split()[0] for row in rows if "indexer_topk" in row]
    assert sources == ["2", "8", "14", "20"]
    assert selecting == ["2", "8", "14", "20", "24", "28", "32", "36"]
