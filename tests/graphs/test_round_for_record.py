"""Rounding to odd: encoding its bf16 rows gives the codes of the float32 rows."""

from __future__ import annotations

import pytest
import torch

import dsv41ops
from graphs.dense import round_to_record
from graphs.model import round_for_record


@pytest.mark.parametrize("record", ["mxfp8", "nvfp4", "fp8_ds_mla", "bf16"])
def test_encoding_rounds_once(record: str) -> None:
    scale = torch.logspace(-3, 3, 64)[:, None]
    rows = torch.randn(64, 512) * scale
    cache = dsv41ops.new_kv_cache(2, 32, record)
    dsv41ops.kv_cache_insert(round_for_record(rows, record), torch.arange(64), cache)
    came = dsv41ops.kv_cache_gather(cache, torch.arange(64)).double()
    expected = round_to_record(rows.double(), record)
    torch.testing.assert_close(came, expected, atol=0, rtol=0)


def test_rounding_twice_does_not() -> None:
    rows = torch.randn(64, 512)
    twice = round_to_record(rows.bfloat16().double(), "mxfp8")
    assert (twice != round_to_record(rows.double(), "mxfp8")).float().mean() > 0.01


def test_odd() -> None:
    ulp = 2.0**-7
    rows = torch.tensor([[1.0, 1 + ulp, 1 + 2**-20, 1 + ulp + 2**-20, -1 - 2**-20, 0.0]])
    expected = torch.tensor([[1.0, 1 + ulp, 1 + ulp, 1 + ulp, -1 - ulp, 0.0]])
    assert torch.equal(round_for_record(rows, "mxfp8").float(), expected)
