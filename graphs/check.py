"""Keeps what a few requests went through, and compares it with the dense reference."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphs.config import ModelConfig
from graphs.dense import DenseReference
from graphs.model import StepOutputs
from graphs.scheduler import Request, Scheduled

MAX_POSITIONS = 256  # compared per request; the keys are always the whole sequence


@dataclass
class History:
    """One request's part of every step it was in, on the host."""

    hidden: list[Tensor] = field(default_factory=list)  # [layers + 1, t, hidden]
    selected: list[dict[int, Tensor]] = field(default_factory=list)  # source -> [t, K]
    sampled: list[int] = field(default_factory=list)


@dataclass
class Comparison:
    """The largest differences found."""

    attention: float = 0.0  # relative error of a token's attention output, any layer
    worst: str = ""
    wrong_tokens: int = 0  # fed or sampled tokens that are not the greedy ones
    num_tokens: int = 0
    steps: set[int] = field(default_factory=set)


class Checker:
    """Records chosen requests while the loop runs; compares them afterwards."""

    def __init__(self, requests: list[Request]) -> None:
        self.history = {request: History() for request in requests}
        self.result = Comparison()

    def record(self, step: int, plan: list[Scheduled], outputs: StepOutputs) -> None:
        start = 0
        for row, part in enumerate(plan):
            tokens = slice(start, start + part.num_tokens)
            start += part.num_tokens
            if part.request not in self.history:
                continue
            history = self.history[part.request]
            history.hidden.append(outputs.hidden[:, tokens].cpu())
            history.selected.append(
                {layer: states[tokens].cpu() for layer, states in outputs.selected.items()}
            )
            if part.samples:
                history.sampled.append(int(outputs.next_token[row]))
            self.result.steps.add(step)

    def compare(
        self, config: ModelConfig, weights: dict[str, Tensor], reference: DenseReference
    ) -> Comparison:
        for request, history in self.history.items():
            hidden = torch.cat(history.hidden, 1).to(weights["embed.weight"].device)
            self._compare_tokens(request, history, hidden, config, weights)
            self._compare_layers(history, hidden, config, reference)
        return self.result

    def _compare_tokens(
        self,
        request: Request,
        history: History,
        hidden: Tensor,
        config: ModelConfig,
        weights: dict[str, Tensor],
    ) -> None:
        """The prompt and then each sampled token were fed, and each sampled one was greedy."""
        sampled = torch.tensor(history.sampled)
        fed = torch.cat([request.prompt, sampled[:-1]]).to(hidden.device)
        wrong = (hidden[0] != weights["embed.weight"][fed]).any(1).sum()
        last = hidden[-1, len(request.prompt) - 1 :].double()
        last = last * (last.square().mean(1, keepdim=True) + config.rms_norm_eps).rsqrt()
        logits = last * weights["norm.weight"].double() @ weights["head.weight"].double().T
        margin = logits.amax(1) - logits.gather(1, sampled.to(hidden.device)[:, None])[:, 0]
        wrong += (margin > 1e-4 * logits.abs().amax(1)).sum()
        self.result.wrong_tokens += int(wrong)

    def _compare_layers(
        self, history: History, hidden: Tensor, config: ModelConfig, reference: DenseReference
    ) -> None:
        num_positions = hidden.shape[1]
        stride = -(-num_positions // MAX_POSITIONS)
        positions = torch.arange(num_positions - 1, -1, -stride, device=hidden.device).flip(0)
        selected = {
            layer: torch.cat([part[layer] for part in history.selected]).to(hidden.device)
            for layer in config.index_source_layer_ids
        }
        for layer in range(config.num_hidden_layers):
            source = states = None
            if config.ratio(layer):
                source = hidden[config.kv_source(layer)]
                states = selected[config.index_source(layer)][positions]
            expected, _ = reference.layer(layer, hidden[layer], positions, source, states)
            came = (hidden[layer + 1].double() - hidden[layer].double())[positions]
            error = (came - expected).norm(dim=1) / expected.norm(dim=1)
            worst = float(error.max()) if error.isfinite().all() else float("inf")
            if worst >= self.result.attention:
                where = int(positions[error.nan_to_num(torch.inf).argmax()])
                self.result.attention = worst
                self.result.worst = f"layer {layer}, position {where}"
        self.result.num_tokens += len(positions)
