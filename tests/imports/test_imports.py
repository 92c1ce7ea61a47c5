"""What ``import dsv41ops`` does in a fresh process, what it leaves alone, and what it costs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest

from dsv41ops.schemas import SCHEMAS
from tests.export.fresh import ROOT, run_fresh

MAX_SECONDS = 0.3

IMPORT = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import dsv41ops
seconds = time.perf_counter() - start
print(json.dumps({
    "seconds": seconds,
    "loaded": sorted(set(sys.modules) - before),
    "ops": sorted(op for op in sys.argv[1:] if hasattr(torch.ops.dsv41, op)),
}))
"""

COMPILED_FIRST = """
import sys, torch
import dsv41ops
assert not {"triton", "torch._dynamo"} & set(sys.modules)

def step(starts, lens, table, tokens):
    request = dsv41ops.token_to_request(starts, tokens.shape[0])
    slots = dsv41ops.compressed_slot_mapping(starts, lens, table, tokens.shape[0], 4, 2)
    dsv41ops.kv_cache_insert(tokens, slots, cache)
    return request, slots, dsv41ops.kv_cache_gather(cache, slots)

cache = dsv41ops.new_kv_cache(4, 4, "bf16")
starts = torch.tensor([0, 2, 3], dtype=torch.int32)
lens = torch.tensor([6, 8], dtype=torch.int32)
table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
rows = torch.arange(3, dtype=torch.bfloat16)[:, None].expand(3, 512).contiguous() + 1
request, slots, back = torch.compile(step, fullgraph=True, backend="aot_eager")(
    starts, lens, table, rows
)
assert request.tolist() == [0, 0, 1], request
assert slots.tolist() == [-1, 14, 11], slots
assert back[:, 0].tolist() == [0, 2, 3], back
print("ok")
"""


@pytest.fixture(scope="module")
def imports() -> list[dict]:
    """Three fresh imports."""
    runs = [run_fresh(IMPORT, *SCHEMAS) for _ in range(3)]
    assert all(done.returncode == 0 for done in runs), runs[0].stderr
    return [json.loads(done.stdout) for done in runs]


def test_loads_torch_only(imports: list[dict]) -> None:
    foreign = ("triton", "torch._dynamo", "torch._inductor", "numpy", "graphs", "tensorrt")
    for module in imports[0]["loaded"]:
        assert not any(module == name or module.startswith(f"{name}.") for name in foreign), module


def test_registers_every_op(imports: list[dict]) -> None:
    assert imports[0]["ops"] == sorted(SCHEMAS)


def test_costs_little(imports: list[dict]) -> None:
    # The fastest of three: another process may hold the CPU during one of them.
    assert min(run["seconds"] for run in imports) < MAX_SECONDS


def test_first_call_may_be_compiled() -> None:
    done = run_fresh(COMPILED_FIRST)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ok"


def test_py_typed_lies_in_the_package() -> None:
    assert (files("dsv41ops") / "py.typed").is_file()


def test_py_typed_ships_in_the_wheel(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    sources = tmp_path / "sources"  # a copy: a build leaves folders behind
    sources.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    shutil.copytree(ROOT / "dsv41ops", sources / "dsv41ops")
    code = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=sources, check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "dsv41ops/py.typed" in names
    assert "dsv41ops/reference/index.py" in names
    assert "dsv41ops/backend_table.json" in names
    kernels = ROOT / "dsv41ops/kernels/cuda"
    sources = [*kernels.rglob("*.cu"), *kernels.rglob("*.cuh")]
    assert kernels / "wgmma/shared.cuh" in sources
    assert {str(source.relative_to(ROOT)) for source in sources} <= set(names)
    assert not any(name.startswith(("tests/", "graphs/")) for name in names)
