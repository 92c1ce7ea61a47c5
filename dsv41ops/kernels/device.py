"""What a launch may ask of its GPU."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache
def sms_and_capability(device: torch.device) -> tuple[int, int]:
    """Number of SMs, and major compute capability."""
    if device.type != "cuda":
        return 132, 9  # Triton's interpreter stands in for an H200
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count), int(properties.major)
