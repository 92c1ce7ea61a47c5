"""Layer types from ``compress_ratios``."""

from __future__ import annotations

import pytest

from dsv41ops.backend import LayerType, layer_type, layer_types

SWA, C1A, C2A = LayerType.SWA, LayerType.C1A, LayerType.C2A
RELEASE = [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0]


@pytest.mark.parametrize(("ratio", "kind"), [(0, SWA), (1, C1A), (2, C2A)])
def test_one_ratio(ratio: int, kind: LayerType) -> None:
    assert layer_type(ratio) is kind
    assert kind.compress_ratio == ratio


@pytest.mark.parametrize("ratio", [-1, 3, 4, 128, 0.5, "2", None, []])
def test_other_ratios_are_errors(ratio: object) -> None:
    with pytest.raises(ValueError, match="compress_ratio: expected 0, 1 or 2, got ") as error:
        layer_type(ratio)  # type: ignore[arg-type]
    assert str(error.value).endswith(repr(ratio))


@pytest.mark.parametrize(
    ("ratios", "used"),
    [
        (RELEASE, (SWA, C1A, C2A)),
        ([2, 2], (C2A,)),
        ([1, 0, 1], (SWA, C1A)),
        ((ratio for ratio in [2, 0]), (SWA, C2A)),
        ([0], (SWA,)),
        ([], (SWA,)),
        (None, (SWA,)),
    ],
)
def test_types_of_a_model(ratios: list[int], used: tuple[LayerType, ...]) -> None:
    assert layer_types(ratios) == used


def test_default_is_window_only() -> None:
    assert layer_types() == (SWA,)


def test_a_bad_entry_anywhere_is_an_error() -> None:
    with pytest.raises(ValueError, match="got 4"):
        layer_types([0, 2, 4])
