"""What the Triton backend of ``sparse_mla_decode`` can serve: any call on any CUDA GPU."""

from __future__ import annotations

import importlib.util

import torch

from dsv41ops.configs import DecodeProblem


def unavailable(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (python -m pip install triton)"
    return None


def supports(problem: DecodeProblem) -> str | None:
    return None
