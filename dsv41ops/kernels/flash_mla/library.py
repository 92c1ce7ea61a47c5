"""FlashMLA's kernels for 584-byte records, from the ``sgl-flash-mla`` wheel.

Their library is loaded by itself: the package's own import also needs the Blackwell kernels, and
its metadata a newer torch than they do.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dsv41ops.kernels.capture import refuse_in_capture

PACKAGE = "sgl-flash-mla"
CAPABILITY = 9  # the only one where they were tested


def version() -> str:
    try:
        return f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"
    except importlib.metadata.PackageNotFoundError:  # on the path without being installed
        return "flash_mla, version unknown"


def unavailable(device: torch.device) -> str | None:
    """Why a device cannot run it, in one line; loads the library to find out."""
    if _folder() is None:
        return f"not installed (python -m pip install --no-deps {PACKAGE})"
    major, minor = torch.cuda.get_device_capability(device)
    if major != CAPABILITY:
        return f"needs compute capability {CAPABILITY}.x, this GPU has {major}.{minor}"
    return _load()[1]


def sparse_decode_op() -> Callable[..., Any]:
    """The op; only where it is not unavailable."""
    op, _ = _load()
    assert op is not None
    return op


def padded_heads(num_heads: int) -> int:
    """It takes 64 or 128."""
    return 64 if num_heads <= 64 else 128


def _folder() -> Path | None:
    spec = importlib.util.find_spec("flash_mla")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@cache
def _load() -> tuple[Callable[..., Any] | None, str | None]:
    """The op, or why it does not load."""
    refuse_in_capture("flash_mla: its library is not loaded yet")
    folder = _folder()
    assert folder is not None
    libraries = sorted(folder.glob("_C_legacy.*.so"))
    if not libraries:
        return None, "installed without its kernels for 584-byte records"
    try:
        torch.ops.load_library(str(libraries[0]))
        return torch.ops.flash_mla_legacy.sparse_decode_fwd, None
    except (OSError, AttributeError, RuntimeError) as error:
        return None, f"does not load: {first_line(error)}"


def first_line(error: BaseException) -> str:
    cause = error.__cause__ or error  # torch says which file, the linker why
    return (str(cause) or type(cause).__name__).splitlines()[0]
