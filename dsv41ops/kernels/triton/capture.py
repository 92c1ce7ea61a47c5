"""No kernel is compiled while a CUDA graph is captured: an error says so before the driver does."""

from __future__ import annotations

from typing import Any

from triton import knobs

from dsv41ops.kernels.capture import refuse_in_capture


def _compile_hook(previous: Any) -> Any:
    def hook(*, fn: Any, **details: Any) -> Any:
        if fn.module.startswith("dsv41ops."):
            refuse_in_capture(f"{fn.name}: not compiled yet")
        return previous(fn=fn, **details) if previous is not None else None

    return hook


def guard_capture() -> None:
    """Have Triton ask before it compiles; a hook that is already there still runs."""
    knobs.runtime.jit_cache_hook = _compile_hook(knobs.runtime.jit_cache_hook)
