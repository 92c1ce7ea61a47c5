"""Reads the recorded arrays as tensors; bfloat16 is stored as raw bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).parent


class Golden:
    """One ``.npz`` file, its tensors on ``device``."""

    def __init__(self, name: str, device: torch.device) -> None:
        with np.load(HERE / f"{name}.npz") as arrays:
            self._arrays = {key: arrays[key] for key in arrays.files}
        self._device = device

    def __contains__(self, key: str) -> bool:
        return key in self._arrays

    def names(self) -> list[str]:
        return list(self._arrays)

    def tensor(self, key: str) -> Tensor:
        return torch.from_numpy(self._arrays[key]).to(self._device)

    def bf16(self, key: str) -> Tensor:
        return self.tensor(key).view(torch.bfloat16)

    def lists(self, key: str) -> list:
        return self._arrays[key].tolist()

    def scalar(self, key: str) -> float:
        return self._arrays[key].item()

    def paged(self, key: str, page_size: int, row_bytes: int) -> Tensor:
        """Recorded pages ``[pages, page bytes]`` as a cache, padding in the page stride."""
        pages = self.tensor(key)
        return pages.as_strided(
            (pages.shape[0], page_size, row_bytes), (pages.stride(0), row_bytes, 1)
        )
