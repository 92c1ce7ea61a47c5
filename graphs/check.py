"""Keeps what a few requests went through, and compares it with the dense reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphs.config import ModelConfig
from graphs.dense import DenseReference
from graphs.draft import DraftOutputs
from graphs.model import StepOutputs
from graphs.scheduler import Request, Scheduled

MAX_POSITIONS = 256  # compared per request; the keys are always the whole sequence
MAX_BLOCKS = 16  # of drafts, compared per request


@dataclass
class History:
    """One request's part of every step it was in, on the host."""

    hidden: list[Tensor] = field(default_factory=list)  # [layers + 1, t, hidden]
    selected: list[dict[int, Tensor]] = field(default_factory=list)  # source -> [t, K]
    sampled: list[int] = field(default_factory=list)
    # Of each draft block, its first position, drafts and [draft layers + 1, B, hidden].
    blocks: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)


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

    def record(
        self,
        step: int,
        plan: list[Scheduled],
        num_accepted: Sequence[int],
        outputs: StepOutputs,
        draft: DraftOutputs | None,
    ) -> None:
        """Keep a step's rows, without those of rejected drafts."""
        start = 0
        for row, (part, accepted) in enumerate(zip(plan, num_accepted, strict=True)):
            tokens = slice(start, start + part.num_kept(accepted))
            start += part.num_tokens
            if part.request not in self.history:
                continue
            history = self.history[part.request]
            history.hidden.append(outputs.hidden[:, tokens].cpu())
            history.selected.append(
                {layer: states[tokens].cpu() for layer, states in outputs.selected.items()}
            )
            if part.samples:
                history.sampled.extend(outputs.verified.tokens[row, : accepted + 1].tolist())
                if draft is not None:
                    drafts = draft.tokens[row].cpu()
                    block = slice(row * len(drafts), (row + 1) * len(drafts))
                    position = part.first + part.num_kept(accepted)
                    history.blocks.append((position, drafts, draft.hidden[:, block].cpu()))
            self.result.steps.add(step)

    def compare(
        self, config: ModelConfig, weights: dict[str, Tensor], reference: DenseReference
    ) -> Comparison:
        for request, history in self.history.items():
            hidden = torch.cat(history.hidden, 1).to(weights["embed.weight"].device)
            self._compare_tokens(request, history, hidden, config, weights)
            self._compare_layers(history, hidden, config, reference)
            self._compare_drafts(request, history, hidden, config, weights, reference)
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
        last = hidden[-1, len(request.prompt) - 1 :]
        wrong += count_not_greedy(last, sampled.to(last.device), config, weights)
        self.result.wrong_tokens += int(wrong)

    def _compare_drafts(
        self,
        request: Request,
        history: History,
        hidden: Tensor,
        config: ModelConfig,
        weights: dict[str, Tensor],
        reference: DenseReference,
    ) -> None:
        """Some blocks: what was fed, each draft layer's attention, and that drafts are greedy."""
        stride = -(-len(history.blocks) // MAX_BLOCKS) or 1
        for position, drafts, block in history.blocks[::stride]:
            block, drafts = block.to(hidden.device), drafts.to(hidden.device)
            fed = torch.full_like(drafts, config.dspark_noise_token_id)
            fed[0] = history.sampled[position - len(request.prompt)]
            wrong = (block[0] != weights["embed.weight"][fed]).any(1).sum()
            wrong += count_not_greedy(block[-1], drafts, config, weights)
            self.result.wrong_tokens += int(wrong)
            for number, layer in enumerate(config.draft_layers):
                expected = reference.draft_layer(layer, hidden[-1, :position], block[number])
                came = block[number + 1].double() - block[number].double()
                where = torch.arange(position, position + len(drafts))
                self._compare_rows(came, expected, f"draft layer {layer}", where)

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
            self._compare_rows(came, expected, f"layer {layer}", positions)
        self.result.num_tokens += len(positions)

    def _compare_rows(self, came: Tensor, expected: Tensor, what: str, positions: Tensor) -> None:
        error = (came - expected).norm(dim=1) / expected.norm(dim=1)
        worst = float(error.max()) if error.isfinite().all() else float("inf")
        if worst >= self.result.attention:
            where = int(positions[int(error.nan_to_num(torch.inf).argmax())])
            self.result.attention = worst
            self.result.worst = f"{what}, position {where}"


def count_not_greedy(
    hidden: Tensor, tokens: Tensor, config: ModelConfig, weights: dict[str, Tensor]
) -> Tensor:
    """How many of ``tokens [n]`` are not the best after ``hidden [n, hidden]``, near ties aside."""
    x = hidden.double()
    x = x * (x.square().mean(1, keepdim=True) + config.rms_norm_eps).rsqrt()
    logits = x * weights["norm.weight"].double() @ weights["head.weight"].double().T
    margin = logits.amax(1) - logits.gather(1, tokens[:, None])[:, 0]
    is_exact = weights["head.weight"].dtype == torch.float32  # else logits were bf16
    slack = 1e-4 if is_exact else 2**-7
    return (margin > slack * logits.abs().amax(1)).sum()
