"""Register every op under ``torch.ops.dsv41``: schema, fake, and CPU and CUDA implementations.

An implementation is its check, then the plain-PyTorch reference on the CPU or a Triton launcher on
CUDA. The names tie it together: op ``x`` has ``checks.check_x``, ``fakes.fake_x``, ``x`` in
``reference/`` and ``launch_x`` in ``kernels/triton/x.py``, or in ``dispatch.py`` where several
backends serve it; ``x_out`` runs the same code into the caller's buffers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from dsv41ops import checks, dispatch, fakes
from dsv41ops.reference import attention, compressor, index, index_keys, indexer, kv_cache
from dsv41ops.schemas import SCHEMAS

Kernel = Callable[..., Any]

# Held for the life of the process: an op is deregistered with its library.
LIBRARY = torch.library.Library("dsv41", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

# What an index op's out-form writes past the step's tokens (or requests), per buffer.
PADDING = {
    "compressed_slot_mapping": {"out": -1},
    "sliding_window_indices": {"out": -1, "lens": 0},
    "topk_to_slots": {"out": -1, "lens": 0},
    "decode_metadata": {
        "req_id_per_token": -1,
        "positions": -1,
        "swa_slot_mapping": -1,
        "swa_indices": -1,
        "swa_lens": 0,
        "compressed_slot_mapping_c1a": -1,
        "compressed_slot_mapping_c2a": -1,
        "dcp_local_seq_lens_c1a": 0,
        "dcp_local_seq_lens_c2a": 0,
    },
}


def _reference(op: str) -> Kernel:
    for module in (index, kv_cache, compressor, index_keys, indexer, attention):
        if hasattr(module, op):
            return getattr(module, op)  # type: ignore[no-any-return]
    raise AssertionError(f"no reference for {op}")


def _out_form(op: str) -> Kernel:
    run, padding = _reference(op), PADDING.get(op, {})

    def write(*args: Any, **buffers: torch.Tensor) -> None:
        results = run(*args)
        if isinstance(results, torch.Tensor):
            results = (results,)
        for result, (name, buffer) in zip(results, buffers.items(), strict=True):
            if buffer.shape[0] == 0:
                continue  # nothing to write, or a result that the caller does without
            num_tokens = result.shape[0]
            buffer[:num_tokens].copy_(result)
            if name in padding:
                buffer[num_tokens:].fill_(padding[name])

    return write


@cache
def _launcher(op: str) -> Kernel:
    """An op's Triton launcher, imported at its first call: the package itself loads no triton."""
    if hasattr(dispatch, f"launch_{op}"):
        return getattr(dispatch, f"launch_{op}")  # type: ignore[no-any-return]
    module = importlib.import_module(f"dsv41ops.kernels.triton.{op}")
    return getattr(module, f"launch_{op}")  # type: ignore[no-any-return]


def _cuda_form(op: str) -> Kernel:
    def launch(*args: Any, **buffers: torch.Tensor) -> Any:
        with torch.cuda.device(args[0].device):  # Triton launches on the current device
            results = _launcher(op.removesuffix("_out"))(*args, **buffers)
        return None if buffers else results

    return launch


def _nothing(*args: Any, **buffers: torch.Tensor) -> None:
    """The fake of an op that only writes."""


def _checked(op: str, run: Kernel) -> Kernel:
    """``run`` behind the op's check, with the schema's defaults filled in.

    The dispatcher drops trailing arguments that equal their default.
    """
    check: Kernel = getattr(checks, f"check_{op}")
    schema = torch.ops.dsv41.__getattr__(op).default._schema
    defaults = [arg.default_value for arg in schema.arguments if not arg.kwarg_only]

    def kernel(*args: Any, **buffers: torch.Tensor) -> Any:
        args = (*args, *defaults[len(args) :])
        check(*args, **buffers)
        return run(*args, **buffers)

    return kernel


def _register(op: str, schema: str) -> None:
    LIBRARY.define(op + schema, tags=TAGS)
    run = _out_form(op.removesuffix("_out")) if op.endswith("_out") else _reference(op)
    fake = _nothing if schema.endswith("-> ()") else getattr(fakes, f"fake_{op}")
    LIBRARY.impl(op, _checked(op, run), "CPU")
    LIBRARY.impl(op, _checked(op, _cuda_form(op)), "CUDA")
    torch.library.register_fake(f"dsv41::{op}", _checked(op, fake), lib=LIBRARY)


for _op, _schema in SCHEMAS.items():
    _register(_op, _schema)
