"""Which bits of a decode may change: none between equal calls, none across batches on request.

On all threads, unlike the other decode tests: that is where an order of additions could vary.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.decode_calls import PAIRS, random_call
from tests.support import assert_attention_close, assert_same_bits


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_same_call_same_bits(pair: tuple[str, str | None], device: torch.device) -> None:
    call = random_call(pair, 3, 12, device)
    for batch_invariant in (False, True):
        first = call.run(batch_invariant=batch_invariant)
        for _ in range(3):
            for a, b in zip(call.run(batch_invariant=batch_invariant), first, strict=True):
                assert_same_bits(a, b)


@pytest.mark.parametrize("heads", [1, 64])
@pytest.mark.parametrize("pair", [("fp8_ds_mla", None), ("mxfp8", "nvfp4")], ids=str)
def test_batch_invariant_rows_depend_on_themselves_only(
    pair: tuple[str, str | None], heads: int, device: torch.device
) -> None:
    """Alone, among other rows, in another order, repeated, and next to NaN queries: equal bits."""
    call = random_call(pair, 6, heads, device, rope=heads == 64)
    out, lse = call.run(batch_invariant=True)
    orders = [[t] for t in range(6)] + [[5, 2], list(range(6))[::-1], [4] * 9, [*range(6)] * 2]
    for order in orders:
        some_out, some_lse = call.select(order).run(batch_invariant=True)
        assert_same_bits(some_out, out[order])
        assert_same_bits(some_lse, lse[order])
    noisy = call.q.clone()
    noisy[1::2] = math.nan
    noisy_out, noisy_lse = replace(call, q=noisy).run(batch_invariant=True)
    assert_same_bits(noisy_out[::2], out[::2])
    assert_same_bits(noisy_lse[::2], lse[::2])


def test_default_rows_agree_within_rounding(device: torch.device) -> None:
    """Without the flag a row may depend on T, by one bf16 rounding at most."""
    call = random_call(("mxfp8", "nvfp4"), 9, 12, device, width=192)
    out, lse = call.run()
    exact_out, exact_lse = call.exact()
    for order in [[0], [7, 3, 1], list(range(9)) * 3]:
        some_out, some_lse = call.select(order).run()
        assert_attention_close(some_out, some_lse, exact_out[order], exact_lse[order])
        assert_attention_close(some_out, some_lse, out[order], lse[order], rtol=8e-3)
