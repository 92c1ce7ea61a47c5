"""A case against the reference, before it is timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dsv41ops.bench.inputs import Prepared

# Both sides round to bf16, and kernels round the weights too.
MAX_ERROR = 5e-3
MAX_LSE_ERROR = 1e-3


class WrongResultError(Exception):
    """A kernel disagrees with the reference; the message is one line."""


def verify(label: str, prepared: Prepared) -> None:
    """Raise :class:`WrongResultError` where the first set's result is not the reference's."""
    with _poisoned_outputs():
        got = _listed(prepared.observe(0))
    want = _listed(prepared.reference(0))
    for number, (result, expected) in enumerate(zip(got, want, strict=True)):
        problem = _unequal(result, expected) if prepared.exact else _far(result, expected)
        if problem:
            raise WrongResultError(f"{label}, result {number}: {problem}")


@contextmanager
def _poisoned_outputs() -> Iterator[None]:
    """New tensors start as NaN or the largest integer, so that an unwritten element shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _listed(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def _unequal(result: Tensor, expected: Tensor) -> str | None:
    if result.shape == expected.shape and torch.equal(result, expected):
        return None
    return "differs from the reference"


def _far(result: Tensor, expected: Tensor) -> str | None:
    """``out`` (bf16) relative to its norm, ``lse`` (f32) absolute; NaN never passes."""
    if result.shape != expected.shape:
        return f"shape {tuple(result.shape)}, the reference's {tuple(expected.shape)}"
    difference = result.float() - expected.float()
    if expected.dtype == torch.bfloat16:
        error, bound = float(difference.norm() / expected.float().norm()), MAX_ERROR
    else:
        error, bound = float(difference.abs().max()), MAX_LSE_ERROR
    return None if error <= bound else f"error {error:.1e}, expected at most {bound:.0e}"
