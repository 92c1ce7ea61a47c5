"""``graphs.measure``: what it counts, on the CPU; a small run where there is a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from graphs.config import load_config
from graphs.measure import CONTEXTS, KINDS, OTHER, TOKENS, Measured, index_keys, kind_of, main, plot


@pytest.mark.parametrize(
    ("context", "keys"),
    # Half the tokens for three layers, all for layer 20, 2048 blocks of 8 for the four after it.
    [(4096, 3 * 2048 + 5 * 4096), (65536, 3 * 32768 + 65536 + 4 * 16384)],
)
def test_index_keys_of_a_token(context: int, keys: int) -> None:
    assert index_keys(load_config("flash"), context) == keys


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("sparse_mla_decode", "attention"),
        ("_sparse_mla_decode_kernel", "attention"),
        ("_indexer_scores_kernel", "indexer"),
        ("_merge_lists_kernel", "indexer"),
        ("_indexer_k_insert_kernel", "caches and indices"),
        ("_kv_cache_insert_kernel", "caches and indices"),
        ("_compress_kv_kernel", "caches and indices"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "projections"),
        ("void at::native::vectorized_elementwise_kernel<4>", OTHER),
    ],
)
def test_kinds_of_kernels(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    times = dict.fromkeys((*KINDS, OTHER), 50.0)
    rows = [Measured(T, context, 300.0, 400, times, 20.0) for context in CONTEXTS for T in TOKENS]
    plot(rows, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err == "graphs.measure: needs a CUDA device, there is none here\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", "small", "--tokens", "1", "3", "--contexts", "256"]
    assert main([*arguments, "--json", str(tmp_path / "step.json")]) == 0
    rows = json.loads((tmp_path / "step.json").read_text())
    assert [row["tokens"] for row in rows] == [1, 3]
    for row in rows:
        assert row["kinds_us"].keys() >= {"attention", "indexer", "projections"}
        assert row["launches"] > 50
    assert len(capsys.readouterr().out.splitlines()) == 4
