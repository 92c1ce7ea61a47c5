"""Checks of host arguments, in the ops' words: ``<name>: expected ..., got ...``."""

from __future__ import annotations


def require_int(name: str, value: object, minimum: int | None = None) -> int:
    """``value`` as an ``int`` of at least ``minimum``, or an error that names the argument."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name}: expected at least {minimum}, got {value}")
    return value


def require_states_per_page(block_size: int, compress_ratio: int) -> int:
    """States in a page of ``block_size`` tokens: a whole number, or an error."""
    require_int("block_size", block_size, 1)
    if block_size % compress_ratio != 0:
        raise ValueError(
            f"block_size: expected a multiple of compress_ratio = {compress_ratio}, "
            f"got {block_size}"
        )
    return block_size // compress_ratio
