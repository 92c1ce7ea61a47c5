"""Exported programs and packages of the layers: saved, loaded elsewhere, same results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from tests.export.conftest import FAST_BUILD, NO_PACKAGE, record
from tests.export.fresh import run_fresh
from tests.export.test_round_trip import REPEAT
from tests.nn.layers import Layers, mixed_steps

# Whoever loads a program has dsv41ops, and neither this module nor these tests.
KINDS = ("window", "c2a source", "c2a reuse", "c1a source", "c1a selects")
LOAD_WITHOUT_US = "import sys, torch; torch._inductor.aoti_load_package(sys.argv[1])"


class Exported(Layers):
    """Results as a plain tuple: a named one cannot be saved unless it is registered with torch."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype, KINDS)

    def forward(self, *step: Tensor) -> tuple[Tensor, ...]:
        return tuple(super().forward(*step))


def export(strict: bool, dtype: torch.dtype = torch.float32) -> ExportedProgram:
    step = mixed_steps(dtype, len(KINDS))[0]
    sizes = ({0: Dim("T", min=1, max=512)}, *[None] * (len(step) - 1))
    with torch.no_grad():
        return torch.export.export(
            Exported(dtype), tuple(step), dynamic_shapes=(sizes,), strict=strict
        )


def steps_of(dtype: torch.dtype, folder: Path) -> Path:
    """Results and caches of an eager run, to repeat."""
    steps = [tuple(step) for step in mixed_steps(dtype, len(KINDS))]
    return record(Exported(dtype), steps, folder / f"{dtype}.pt".replace("torch.", ""))


@pytest.mark.parametrize("strict", [True, False])
def test_one_node_per_call(strict: bool) -> None:
    program = export(strict)
    targets = [str(node.target) for node in program.graph.nodes]
    counts = {
        "decode_metadata": 1,
        "rope_kv_cache_insert": 7,  # every window, two compressed caches
        "compress_kv": 2,
        "indexer_k_insert": 2,
        "indexer_topk": 3,
        "topk_to_slots": 3,
        "sparse_mla_decode": 5,
    }
    for op, count in counts.items():
        assert targets.count(f"dsv41.{op}.default") == count, op
    assert sum("dsv41." in target for target in targets) == sum(counts.values())
    written = set(program.run_decompositions().graph_signature.buffers_to_mutate.values())
    caches = {f"layers.{number}.swa_cache" for number in range(5)}
    caches |= {f"layers.{number}.{name}" for number in (1, 3) for name in ("cache", "index_keys")}
    assert written == {*caches, "layers.1.ring"}


def test_loaded_in_a_fresh_process(tmp_path: Path) -> None:
    arguments: list[Path] = []
    for dtype, strict in ((torch.float32, True), (torch.bfloat16, False)):
        file = tmp_path / f"{strict}.pt2"
        torch.export.save(export(strict, dtype), file)
        arguments += [steps_of(dtype, tmp_path), file]
    done = run_fresh(REPEAT, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"] * 2 * len(mixed_steps(torch.float32))


@pytest.mark.skipif(NO_PACKAGE is not None, reason=str(NO_PACKAGE))
def test_package(tmp_path: Path) -> None:
    """AOTInductor on the CPU: near the eager run here; elsewhere it needs our import."""
    package = str(tmp_path / "layers.pt2")
    with torch.no_grad(), torch._inductor.config.patch(compile_threads=1):
        torch._inductor.aoti_compile_and_package(
            export(strict=False), package_path=package, inductor_configs=FAST_BUILD
        )
        run, eager = torch._inductor.aoti_load_package(package), Exported()
        for step in mixed_steps(torch.float32, len(KINDS)):
            for got, want in zip(run(*step), eager(*step), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    done = run_fresh(LOAD_WITHOUT_US, package)
    assert "Could not find schema for dsv41::" in done.stderr
