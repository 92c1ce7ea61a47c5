"""Random weights from a seed, in the checkpoint's shapes."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def randomise(model: nn.Module, seed: int) -> None:
    """Fill every parameter so that activations keep a size near 1 through the stack."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        fill(name, parameter, generator)


@torch.no_grad()
def fill(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Fill the parameter of this name."""
    parameter.normal_(generator=generator)
    if name.endswith("norm.weight"):
        parameter.mul_(0.1).add_(1)
    elif parameter.dim() == 2 and not name.startswith("embed."):
        parameter.mul_(parameter.shape[1] ** -0.5)
