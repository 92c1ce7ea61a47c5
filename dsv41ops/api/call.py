"""One op call behind every public function: Python types are checked before the dispatcher."""

from __future__ import annotations

from typing import Any

import torch

import dsv41ops.ops  # noqa: F401  (registers the ops)
from dsv41ops.schemas import SCHEMAS

# Schema type -> what a caller may pass, and its name in a message. A size may be symbolic.
_ACCEPTED: dict[str, tuple[tuple[type, ...], str]] = {
    "Tensor": ((torch.Tensor,), "a torch.Tensor"),
    "int": ((int, torch.SymInt), "an int"),
    "SymInt": ((int, torch.SymInt), "an int"),
    "float": ((float, int, torch.SymFloat), "a float"),
    "bool": ((bool,), "a bool"),
    "str": ((str,), "a str"),
    "ScalarType": ((torch.dtype,), "a torch.dtype"),
}


def _parameters(op: str) -> list[tuple[str, tuple[type, ...], str]]:
    """Name, accepted types and their description of every argument of an op."""
    found = []
    for argument in getattr(torch.ops.dsv41, op).default._schema.arguments:
        kind = str(argument.real_type)
        types, accepted = _ACCEPTED[kind.removeprefix("Optional[").removesuffix("]")]
        if kind.startswith("Optional"):
            types, accepted = (*types, type(None)), f"{accepted} or None"
        found.append((argument.name, types, accepted))
    return found


_PARAMETERS = {op: _parameters(op) for op in SCHEMAS}


def call(op: str, *args: object, **buffers: object) -> Any:
    """Call an op; a wrong Python type is a TypeError before the dispatcher sees it.

    A tensor passed for an int would otherwise be read back from its device, a host sync.
    """
    for (name, types, accepted), value in zip(
        _PARAMETERS[op], (*args, *buffers.values()), strict=True
    ):
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise TypeError(f"{name}: expected {accepted}, got {type(value).__name__}")
    return getattr(torch.ops.dsv41, op)(*args, **buffers)
