"""DCP geometry and its errors."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from dsv41ops.backend import DCPGeometry


def test_defaults_are_one_rank() -> None:
    assert DCPGeometry() == DCPGeometry(dcp_world_size=1, dcp_rank=0, cp_interleave=1)
    assert not DCPGeometry().enabled
    assert DCPGeometry(2, 1).enabled


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        DCPGeometry().dcp_rank = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 1), "dcp_world_size: expected at least 1, got 0"),
        ((-2, 0, 1), "dcp_world_size: expected at least 1, got -2"),
        ((2, 2, 1), "dcp_rank: expected 0 <= rank < dcp_world_size = 2, got 2"),
        ((2, -1, 1), "dcp_rank: expected 0 <= rank < dcp_world_size = 2, got -1"),
        ((1, 1, 1), "dcp_rank: expected 0 <= rank < dcp_world_size = 1, got 1"),
        ((2, 0, 0), "cp_interleave: expected at least 1, got 0"),
    ],
)
def test_out_of_range(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DCPGeometry(*arguments)


@pytest.mark.parametrize("name", ["dcp_world_size", "dcp_rank", "cp_interleave"])
@pytest.mark.parametrize("value", [1.0, "1", None, True])
def test_wrong_type(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name}: expected an int, got {type(value).__name__}"):
        DCPGeometry(**{"dcp_world_size": 2, name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("world", "tokens", "ratio", "states"),
    [
        (2, 1, 1, 1),
        (2, 8, 1, 8),
        (2, 2, 2, 1),
        (4, 64, 2, 32),
        (1, 1, 2, 1),  # one rank: an engine's default of one token is fine at any ratio
        (1, 7, 2, 1),
    ],
)
def test_from_tokens(world: int, tokens: int, ratio: int, states: int) -> None:
    geometry = DCPGeometry.from_token_interleave(world, world - 1, tokens, ratio)
    assert geometry == DCPGeometry(world, world - 1, states)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (2, 0, 1, 2),
            "cp_kv_cache_interleave_size: expected a multiple of compress_ratio = 2 .*, got 1",
        ),
        ((2, 0, 65, 2), "got 65"),
        ((2, 0, 0, 2), "cp_kv_cache_interleave_size: expected at least 1, got 0"),
        ((1, 0, 0, 2), "cp_kv_cache_interleave_size: expected at least 1, got 0"),
        ((2, 0, 2, 0), "compress_ratio: expected at least 1, got 0"),
        ((2, 2, 2, 2), "dcp_rank: expected 0 <= rank < dcp_world_size = 2, got 2"),
        ((1, 1, 2, 2), "dcp_rank: expected 0 <= rank < dcp_world_size = 1, got 1"),
    ],
)
def test_from_tokens_errors(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DCPGeometry.from_token_interleave(*arguments)


def test_page_holds_whole_runs() -> None:
    DCPGeometry(2, 0, 32).check_page(64)
    DCPGeometry(2, 0, 64).check_page(64)
    for interleave, states in [(64, 32), (3, 32), (128, 64)]:
        message = (
            f"states_per_page: expected a multiple of cp_interleave = {interleave} "
            f"under DCP, got {states}"
        )
        with pytest.raises(ValueError, match=message):
            DCPGeometry(2, 0, interleave).check_page(states)


def test_one_rank_takes_any_page() -> None:
    DCPGeometry(1, 0, 3).check_page(32)
