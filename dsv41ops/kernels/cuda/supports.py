"""What the CUDA C++ kernels can serve behind ``sparse_mla_decode``."""

from __future__ import annotations

from functools import cache

import torch

from dsv41ops.configs import RING_SLOTS, DecodeProblem

CAPABILITY = (9, 0)  # their instructions are of no other
ADDRESSED_BYTES = 2**36  # 32 bits that count 16 bytes
INSTALL = "python -m pip install 'dsv41ops[cuda]'"


def unavailable(device: torch.device) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != CAPABILITY:
        return f"has kernels for compute capability 9.0, this GPU has {major}.{minor}"
    return _no_compiler()


@cache
def _no_compiler() -> str | None:
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401

        nvrtc.nvrtcVersion()  # loads its library
    except (ImportError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return f"needs cuda-bindings and NVRTC ({INSTALL}): {reason}"
    return None


def supports(problem: DecodeProblem) -> str | None:
    if problem.records not in RING_SLOTS:
        return f"has kernels for {', '.join(RING_SLOTS)}, these are {problem.records}"
    if not problem.aligned:
        return "caches have to begin at, and pages to step by, multiples of 16 bytes"
    if problem.cache_bytes > ADDRESSED_BYTES:
        return f"caches may be up to 2^36 bytes long, this one is {problem.cache_bytes}"
    return None
