"""Compile every kernel launch of a list of calls for another GPU, without one here.

``python -m tests.kernels.cross_compile 90`` prints a JSON line per variant: shared memory, tensor
memory, and registers and spills as the assembler reports them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


@dataclass(frozen=True)
class Variant:
    """One compiled form of one kernel."""

    label: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, int]

    @property
    def key(self) -> tuple[object, ...]:
        return (
            self.kernel.__name__,
            *(tuple(sorted(d.items())) for d in (self.signature, self.constexprs, self.options)),
        )


def record_launches(launch: Callable[[], object], label: str) -> list[Variant]:
    """The variants that a launcher would run; nothing runs."""
    found = []

    def run(self: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        signature, constexprs = {}, {}
        for param in self.params:
            value = bound.arguments[param.name]
            if param.is_constexpr or value is None:
                signature[param.name], constexprs[param.name] = "constexpr", value
                continue
            # An argument that makes a variant by its value or alignment would be compiled anew
            # in a captured step.
            assert param.do_not_specialize, f"{self.__name__}: {param.name} is specialised"
            assert param.do_not_specialize_on_alignment, f"{self.__name__}: {param.name}"
            signature[param.name] = param.annotation_type or mangle_type(value)
        found.append(Variant(label, self, signature, constexprs, options))

    with torch.no_grad():
        original, JITFunction.run = JITFunction.run, run
        try:
            launch()
        finally:
            JITFunction.run = original
    return found


def _resources(compiled: Any, arch: int) -> dict[str, int]:
    """What ptxas says of the PTX: filled in by triton only when a device loads it."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.asm["ptx"])
        target = re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.M)
        assert target is not None
        command = [get_ptxas(arch).path, "-v", "--gpu-name", target[1], str(source)]
        run = subprocess.run(
            [*command, "-o", str(source.with_suffix(".cubin"))], capture_output=True, text=True
        )
    assert run.returncode == 0, run.stderr
    found = {}
    for name, pattern in (
        ("registers", r"Used (\d+) registers"),
        ("spill_stores", r"(\d+) bytes spill stores"),
        ("stack", r"(\d+) bytes stack frame"),
    ):
        matches = re.findall(pattern, run.stderr)
        found[name] = max(map(int, matches)) if matches else 0
    return found


def compile_variant(variant: Variant, arch: int) -> dict[str, Any]:
    source = ASTSource(variant.kernel, variant.signature, variant.constexprs, {})
    options = {**variant.options, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    metadata = compiled.metadata
    return {
        "shared": metadata.shared,
        "tmem": getattr(metadata, "tmem_size", 0) or 0,
        **_resources(compiled, arch),
    }


def _compile_one(task: tuple[int, int]) -> dict[str, Any]:
    index, arch = task
    variant = VARIANTS[index]
    report: dict[str, Any] = {"kernel": variant.kernel.__name__, "call": variant.label}
    try:
        return {**report, **compile_variant(variant, arch)}
    except Exception:
        return {**report, "error": traceback.format_exc()[-2000:]}
