"""``dsv41ops.capture`` as far as a CPU shows it; the rest is in ``tests/cuda/test_runner.py``."""

from __future__ import annotations

import pytest
import torch

from dsv41ops.capture import GraphRunner, pick_bucket


@pytest.mark.parametrize(("num_tokens", "bucket"), [(0, 8), (1, 8), (8, 8), (9, 64), (64, 64)])
def test_smallest_bucket_that_fits(num_tokens: int, bucket: int) -> None:
    assert pick_bucket({64: None, 8: None}, num_tokens) == bucket


@pytest.mark.parametrize("num_tokens", [-1, 65])
def test_nothing_fits(num_tokens: int) -> None:
    message = f"num_tokens: expected 0 to 64, the largest bucket, got {num_tokens}"
    with pytest.raises(ValueError, match=f"^{message}$"):
        pick_bucket((8, 64), num_tokens)


@pytest.mark.parametrize("sizes", [(), (0, 8)])
def test_bad_buckets(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="buckets: expected sizes of at least 1"):
        GraphRunner(lambda inputs: inputs, dict.fromkeys(sizes))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_needs_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="need a CUDA device, there is none here"):
        GraphRunner(lambda inputs: inputs, {8: None})
