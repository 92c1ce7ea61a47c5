"""The kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv41ops.kernels.triton import merge_topk as kernels
from dsv41ops.kernels.triton.merge_topk import launch_merge_topk
from dsv41ops.reference.indexer import merge_topk
from tests.support import assert_same_bits


def lists(N: int, T: int, K: int, numbers: int) -> tuple[Tensor, Tensor]:
    indices = torch.randint(-1, numbers, (N, T, K), dtype=torch.int32)
    scores = torch.randint(-4, 5, (N, T, K)).float()
    for share, value in ((0.1, torch.nan), (0.1, torch.inf), (0.1, -torch.inf), (0.1, -0.0)):
        scores[torch.rand(scores.shape) < share] = value
    return indices, scores


def check(indices: Tensor, scores: Tensor, topk: int) -> None:
    expected = merge_topk(indices, scores, topk)
    for mine, reference in zip(launch_merge_topk(indices, scores, topk), expected, strict=True):
        assert_same_bits(mine, reference)


@pytest.mark.parametrize("topk", [1, 5, 200])
@pytest.mark.parametrize(
    "shape", [(1, 2, 9), (2, 3, 5), (3, 1, 70), (8, 2, 16), (2, 0, 4), (0, 2, 3), (2, 2, 0)]
)
def test_lists(shape: tuple[int, int, int], topk: int) -> None:
    check(*lists(*shape, 40), topk)


@pytest.mark.parametrize("topk", [1, 250])
def test_more_than_fit_at_once(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MAX_ENTRIES", 512)
    check(*lists(3, 1, 300, 700), topk)


def test_release_sizes() -> None:
    check(*lists(2, 1, 512, 3000), 512)


def test_extreme_numbers() -> None:
    indices = torch.tensor([[[2**31 - 1, 0, -(2**31)]], [[2**31 - 1, -1, 2**31 - 2]]])
    scores = torch.tensor([[[1.0, 2, 9]], [[3, 9, 1]]])
    check(indices.int(), scores, 3)


def test_strided() -> None:
    indices, scores = lists(3, 4, 11, 30)
    transposed = [t.permute(1, 0, 2).contiguous().permute(1, 0, 2) for t in (indices, scores)]
    check(*transposed, 8)
