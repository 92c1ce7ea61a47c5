"""The three kinds of attention layer, as a model's ``compress_ratios`` name them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class LayerType(Enum):
    """What a layer attends to; the value is its ``compress_ratio``."""

    SWA = 0  # the sliding window alone
    C1A = 1  # plus a full-length compressed cache: one state per token
    C2A = 2  # plus a compressed cache of one state per two tokens

    @property
    def compress_ratio(self) -> int:
        return self.value


def layer_type(compress_ratio: int) -> LayerType:
    """The layer type of one ``compress_ratio``; ValueError unless it is 0, 1 or 2."""
    for kind in LayerType:
        if kind.value == compress_ratio:
            return kind
    raise ValueError(f"compress_ratio: expected 0, 1 or 2, got {compress_ratio!r}")


def layer_types(compress_ratios: Iterable[int] | None = None) -> tuple[LayerType, ...]:
    """The layer types that a model uses, each once, in the order SWA, C1A, C2A.

    ``compress_ratios`` has one entry per layer, draft layers included. None or no entry at all
    means ``[0]``, a model of sliding-window layers.
    """
    used = {layer_type(ratio) for ratio in compress_ratios or ()} or {LayerType.SWA}
    return tuple(kind for kind in LayerType if kind in used)
