"""FlashMLA's kernels for 584-byte records, where the ``sgl-flash-mla`` wheel is installed.

They take 64 or 128 heads; fewer are padded, as a caller would have to.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv41ops.bench.inputs import Inputs, Prepared, decode_reference
from dsv41ops.bench.problems import DecodeCase
from dsv41ops.layouts import HEAD_DIM

PACKAGE = "sgl-flash-mla"
RECORD = "fp8_ds_mla"
CAPABILITIES = (9, 10)


class UnavailableError(Exception):
    """FlashMLA cannot run here; the message says why in one line."""


def padded_case(case: DecodeCase) -> DecodeCase:
    """The call that FlashMLA's time is taken from, whatever records ``case`` has."""
    num_heads = 64 if case.num_heads <= 64 else 128
    return replace(case, window_record=RECORD, record=RECORD, num_heads=num_heads)


def version() -> str:
    try:
        return f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"
    except importlib.metadata.PackageNotFoundError:  # on the path without being installed
        return "flash_mla, version unknown"


def load(device: torch.device) -> Callable[..., Any]:
    """FlashMLA's sparse decode op.

    Its library is loaded by itself: the package's own import also needs the Blackwell kernels.

    Raises:
        UnavailableError: Not installed, or not for this GPU or this torch.
    """
    spec = importlib.util.find_spec("flash_mla")
    if spec is None or spec.origin is None:
        raise UnavailableError(f"not installed (python -m pip install --no-deps {PACKAGE})")
    capability = torch.cuda.get_device_capability(device)
    if capability[0] not in CAPABILITIES:
        raise UnavailableError(f"no kernels for compute capability {capability[0]}.{capability[1]}")
    libraries = sorted(Path(spec.origin).parent.glob("_C_legacy.*.so"))
    if not libraries:
        raise UnavailableError("installed without its kernels for 584-byte records")
    try:
        torch.ops.load_library(str(libraries[0]))
        op: Callable[..., Any] = torch.ops.flash_mla_legacy.sparse_decode_fwd
    except (OSError, AttributeError, RuntimeError) as error:
        raise UnavailableError(f"does not load: {_first_line(error)}") from error
    return op


def prepare(op: Callable[..., Any], inputs: Inputs, case: DecodeCase) -> Prepared:
    """A padded case; its split plan is computed once, before the graph, and reused by all calls.

    Raises:
        UnavailableError: FlashMLA refuses the call.
    """
    arguments = inputs.decode_arguments(case)

    def call(i: int, plan: tuple[Tensor | None, Tensor | None]) -> Any:
        given = arguments(i)
        return op(
            given["q"][:, None],
            given["swa_cache"].unsqueeze(2),
            given["swa_indices"][:, None],
            given["swa_lens"],
            given["attn_sink"],
            *plan,
            given["cache"].unsqueeze(2),
            given["topk_indices"][:, None],
            given["topk_lens"],
            HEAD_DIM,
            HEAD_DIM**-0.5,
            None,
        )

    try:
        plan = call(0, (None, None))[2:4]
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise UnavailableError(f"refuses {case.label}: {_first_line(error)}") from error

    def result(i: int) -> tuple[Tensor, Tensor]:
        out, lse = call(i, plan)[:2]
        return out[:, 0], lse.reshape(case.num_tokens, case.num_heads)

    return Prepared(
        run=lambda i: call(i, plan),
        reference=lambda i: decode_reference(arguments(i)),
        warm=inputs.decode_warm(case, arguments(0)["q"]),
        exact=False,
        result=result,
    )


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error  # torch says which file, the linker why
    return (str(cause) or type(cause).__name__).splitlines()[0]
