"""Compile every kernel launch of a list of calls for another GPU, without one here.

``python -m tests.kernels.cross_compile 90 100`` prints a JSON line per variant: shared memory,
tensor memory, and registers and spills as the assembler reports them.
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

import dsv41ops
from dsv41ops.kernels.flash_mla import sparse_mla_decode as flash_mla
from dsv41ops.kernels.triton import indexer_topk, sparse_mla_decode
from tests.contract.inputs import OPS, argument_sets, schema_order

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")


@dataclass(frozen=True)
class Variant:
    """One compiled form of one kernel."""

    label: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def key(self) -> tuple[object, ...]:
        return (
            self.name,
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
    options = {"enable_fp_fusion": True, **variant.options}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    metadata = compiled.metadata
    return {
        "shared": metadata.shared,
        "tmem": getattr(metadata, "tmem_size", 0) or 0,
        **_resources(compiled, arch),
    }


def _decode(
    records: tuple[str, str | None],
    heads: int,
    num_tokens: int,
    *,
    off: int = 0,
    rope: bool = False,
) -> Callable[[], object]:
    """A step of the release's widths; ``off``: elements that q lies off a 16-byte boundary."""
    caches = [dsv41ops.new_kv_cache(1, 64, record) for record in records if record]

    def rows(width: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.empty(num_tokens, width, dtype=torch.int32),
            torch.empty(num_tokens, dtype=torch.int32),
        )

    q = torch.empty(num_tokens, heads, 512 + 8, dtype=torch.bfloat16)[..., off : off + 512]
    compressed = (caches[1], *rows(512)) if len(caches) == 2 else (None,) * 3
    arguments = (q, caches[0], *rows(128), *compressed, torch.empty(heads), 512**-0.5, False)
    table = (torch.empty(num_tokens, dtype=torch.int64), torch.empty(9, 64)) if rope else ()
    return lambda: sparse_mla_decode.launch_sparse_mla_decode(*arguments, *table)


def _flash_mla_rows(num_caches: int) -> object:
    cache = dsv41ops.new_kv_cache(1, 64, "fp8_ds_mla")
    indices = torch.empty(1, 128, dtype=torch.int32)
    return flash_mla._valid_rows([(cache, indices, indices[0, :1])] * num_caches)


def _index(record: str, num_tokens: int, kept: int, given: int) -> Callable[[], object]:
    """An indexer of the release, over a table of a million states."""
    cache = dsv41ops.new_index_cache(1, 64, record)
    q = torch.empty(num_tokens, 32, 128, dtype=torch.bfloat16)
    starts, seq_lens, table = (
        torch.empty(shape, dtype=torch.int32) for shape in (2, 1, (1, 2**20 // 64))
    )
    blocks = torch.empty(num_tokens, given, dtype=torch.int32) if given else None
    arguments = (q, q[..., 0].float(), cache, starts, seq_lens, table, 512, 1, blocks, kept)
    return lambda: indexer_topk.launch_indexer_topk(*arguments, 8, 1, 0, 1)


# T = 1 splits, T = 512 does not; up to 16 heads and more are different tiles on sm_90.
DECODE_CALLS = {
    90: [
        (("mxfp8", "nvfp4"), 64, 1),
        (("mxfp8", "nvfp4"), 64, 512),
        (("mxfp8", "nvfp4"), 8, 512),
        (("fp8_ds_mla", "fp8_ds_mla"), 64, 512),
        (("fp8_ds_mla", "fp8_ds_mla"), 8, 1),
        (("bf16", None), 64, 1),
    ],
    100: [(("mxfp8", "nvfp4"), 64, 512), (("fp8_ds_mla", None), 8, 1)],
    120: [(("mxfp8", "nvfp4"), 64, 512), (("fp8_ds_mla", None), 8, 1)],
}
INDEX_CALLS = [  # tokens, blocks kept, blocks given
    ("fp8", 1, 0, 0),
    ("fp8", 128, 2048, 0),
    ("fp8", 32, 0, 2048),
    ("mxfp4", 512, 0, 0),
]
NUM_SMS = {90: 132, 100: 148, 120: 170}


def variants(arch: int) -> list[Variant]:
    """Decode's and the indexer's, chosen by hand as they take long; of every other op, those of its
    argument sets.

    Registers differ little between architectures, so one variant per kernel does beyond sm_90.
    """
    sparse_mla_decode.sms_and_capability = lambda device: (NUM_SMS[arch], arch // 10)
    found = []
    for records, heads, num_tokens in DECODE_CALLS[arch]:
        label = f"{records[0]}+{records[1]} H={heads} T={num_tokens}"
        found += record_launches(_decode(records, heads, num_tokens), label)
    if arch == 90:
        call = _decode(("mxfp8", "nvfp4"), 64, 512, rope=True)
        found += record_launches(call, "rotated back")
        call = _decode(("mxfp8", "nvfp4"), 8, 1, rope=True)
        found += record_launches(call, "rotated back, split")
        call = _decode(("mxfp8", "nvfp4"), 64, 512, off=1)
        found += record_launches(call, "unaligned")
        found += record_launches(partial(_flash_mla_rows, 1), "FlashMLA, window only")
        found += record_launches(partial(_flash_mla_rows, 2), "FlashMLA")
    for record, *sizes in INDEX_CALLS if arch == 90 else INDEX_CALLS[:1]:
        found += record_launches(_index(record, *sizes), f"{record} {sizes}")
    for op in OPS:
        if op.endswith("_out") or op in ("sparse_mla_decode", "indexer_topk"):
            continue
        launch = getattr(import_module(f"dsv41ops.kernels.triton.{op}"), f"launch_{op}")
        for name, make in argument_sets(op).items():
            positional, _ = schema_order(op, make(torch.device("cpu")))
            found += record_launches(partial(launch, *positional), name)
    first = {variant.key: variant for variant in reversed(found)}
    if arch != 90:
        decode = "_sparse_mla_decode_kernel"
        first = {v.label if v.name == decode else v.name: v for v in first.values()}
    return list(first.values())


def _report(variant: Variant, arch: int, connection: Any) -> None:
    report: dict[str, Any] = {
        "arch": arch,
        "kernel": variant.name,
        "call": variant.label,
        "aligned": variant.constexprs.get("ALIGNED", True),
    }
    try:
        report |= compile_variant(variant, arch)
    except Exception:
        report["error"] = traceback.format_exc()[-2000:]
    connection.send(report)


def _isolated(task: tuple[Variant, int]) -> dict[str, Any]:
    """In a process of its own: the compiler may abort, and takes the process with it."""
    variant, arch = task
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(variant, arch, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        error = f"the compiler died with exit code {process.exitcode}"
        return {"arch": arch, "kernel": variant.name, "error": error}
    finally:
        process.join()


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        triton.knobs.cache.dir = folder  # a cached variant would not be compiled
        tasks = [(variant, int(arch)) for arch in sys.argv[1:] for variant in variants(int(arch))]
        for report in pool.map(_isolated, tasks):
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
