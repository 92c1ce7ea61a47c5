"""sparse_mla_decode against FlashMLA's Hopper kernel: outputs and log-sum-exp that it recorded."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import dsv41ops
from tests.golden.npz import Golden
from tests.support import assert_attention_close, assert_same_bits, dense_attention

pytestmark = pytest.mark.usefixtures("one_thread")

FILES = ("empty", "holes", "large", "swa", "swa_extra")


def read(name: str, device: torch.device) -> tuple[Golden, dict[str, Tensor | float | None]]:
    """The recording and the op's arguments for the same call."""
    golden = Golden(f"flashmla_{name}", device)
    extra = "extra_cache" in golden
    return golden, {
        "q": golden.bf16("q")[:, 0],  # recorded with a query axis of one token
        "swa_cache": golden.paged("cache", int(golden.scalar("page_size")), 584),
        "swa_indices": golden.tensor("indices"),
        "swa_lens": golden.tensor("lens"),
        "cache": golden.paged("extra_cache", int(golden.scalar("extra_page_size")), 584)
        if extra
        else None,
        "topk_indices": golden.tensor("extra_indices") if extra else None,
        "topk_lens": golden.tensor("extra_lens") if extra else None,
        "attn_sink": golden.tensor("attn_sink") if "attn_sink" in golden else None,
        "softmax_scale": golden.scalar("scale"),
    }


def expected(arguments: dict) -> tuple[Tensor, Tensor]:
    parts = [(arguments["swa_cache"], arguments["swa_indices"], arguments["swa_lens"])]
    if arguments["cache"] is not None:
        parts.append((arguments["cache"], arguments["topk_indices"], arguments["topk_lens"]))
    return dense_attention(
        arguments["q"], parts, sink=arguments["attn_sink"], scale=arguments["softmax_scale"]
    )


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_decode_matches_recording_and_f64(
    name: str, batch_invariant: bool, device: torch.device
) -> None:
    golden, arguments = read(name, device)
    out, lse = dsv41ops.sparse_mla_decode(**arguments, batch_invariant=batch_invariant)
    exact_out, exact_lse = expected(arguments)
    assert_attention_close(out, lse, exact_out, exact_lse)

    # Both kernels round to bf16 once, so they may lie one rounding each away from the truth.
    recorded_lse = golden.tensor("lse")
    # On purpose: an empty row is -inf here, +inf in FlashMLA.
    recorded_lse = recorded_lse.masked_fill(recorded_lse == math.inf, -math.inf)
    assert_attention_close(out, lse, golden.bf16("out"), recorded_lse, rtol=8e-3)


@pytest.mark.parametrize("name", FILES)
def test_recording_is_what_the_oracle_says(name: str, device: torch.device) -> None:
    """The f64 attention of tests/support.py is itself held to the recording."""
    golden, arguments = read(name, device)
    exact_out, exact_lse = expected(arguments)
    recorded_lse = golden.tensor("lse")
    recorded_lse = recorded_lse.masked_fill(recorded_lse == math.inf, -math.inf)
    assert_attention_close(golden.bf16("out"), recorded_lse, exact_out, exact_lse)


def test_empty_row_is_exactly_zero_and_minus_inf(device: torch.device) -> None:
    _, arguments = read("empty", device)
    out, lse = dsv41ops.sparse_mla_decode(**arguments)
    assert_same_bits(out[0], torch.zeros_like(out[0]))
    assert bool(torch.isneginf(lse[0]).all())
    assert bool(torch.isfinite(lse[1]).all())
