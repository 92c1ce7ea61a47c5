"""The draft layers: a block of greedy proposals for the tokens after the one sampled last.

They are window-only layers after the stack. Of a position that the stack has run, their windows
hold a row of the stack's output; a block is the token sampled last and noise tokens, which see
each other and the window before them.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from dsv41ops.backend import draft_window_width
from dsv41ops.nn import StepMetadata, step_metadata
from graphs.batch import StepInputs
from graphs.model import DecodeModel, Layer, StepOutputs, attention_geometry


class DraftInputs(NamedTuple):
    """A step that the stack has run."""

    step: StepInputs
    hidden: Tensor  # [T, hidden] output of the stack
    position: Tensor  # [R] int64 of the new token


class DraftOutputs(NamedTuple):
    """What a draft step returns, ``B`` drafts per request; rows of padding hold anything."""

    tokens: Tensor  # [R, B] int64
    hidden: Tensor  # [draft layers + 1, R * B, hidden]: the input of each, and the last output


def draft_inputs(inputs: StepInputs, outputs: StepOutputs) -> DraftInputs:
    return DraftInputs(inputs, outputs.hidden[-1], outputs.verified.position)


class DraftModel(nn.Module):
    """The draft layers, with window caches of their own on the stack's pages.

    Embedding, norm, head and pending tokens are the stack's, and its parameters stay there.
    """

    def __init__(self, stack: DecodeModel) -> None:
        super().__init__()
        self._stack = (stack,)  # in a tuple, so that it is no submodule of a second module
        config, geometry, dtype = stack.config, stack.geometry, stack.head.weight.dtype
        self.layers = nn.ModuleDict(
            {
                str(n): Layer(config, attention_geometry(config, geometry, n, stack.types), dtype)
                for n in config.draft_layers
            }
        )

    def forward(self, inputs: DraftInputs) -> DraftOutputs:
        """Insert the step's rows and propose. The drafts also go to the stack's ``pending``."""
        (stack,) = self._stack
        step, num_drafts = inputs.step, stack.geometry.num_drafts
        metadata = self._metadata(step)
        layers = [cast(Layer, layer) for layer in self.layers.values()]
        for layer in layers:
            layer.insert_window(inputs.hidden, metadata)
        # A block's rows replace those of rejected tokens; the next step inserts over them in turn.
        block = self._block(step, inputs.position)
        width = draft_window_width(stack.config.sliding_window, num_drafts)
        metadata = self._metadata(block, width, causal=False)
        hidden = stack.embed(block.token_ids).float()
        hiddens = [hidden]
        for layer in layers:
            attn_out, _, _ = layer(hidden, metadata, None, None)
            hidden = hidden + attn_out
            hiddens.append(hidden)
        tokens = stack.greedy(hidden).unflatten(0, (-1, num_drafts))
        stack.pending[step.request_slots, 1:] = tokens
        return DraftOutputs(tokens, torch.stack(hiddens))

    def _block(self, step: StepInputs, position: Tensor) -> StepInputs:
        """Of each request with tokens in the step, a block from ``position [R]`` on."""
        (stack,) = self._stack
        num_drafts, num_requests = stack.geometry.num_drafts, len(step.seq_lens)
        tokens = stack.pending[step.request_slots, :1]
        noise = tokens.new_full((num_requests, num_drafts - 1), stack.config.dspark_noise_token_id)
        starts = torch.arange(num_requests + 1, dtype=torch.int32, device=tokens.device)
        has_tokens = step.query_start_loc[1:] > step.query_start_loc[:-1]
        # A length of 0 puts a block before the first position, where no token is valid.
        lens = torch.where(has_tokens, position + num_drafts, 0)
        return step._replace(
            token_ids=torch.cat([tokens, noise], 1).flatten(),
            query_start_loc=starts * num_drafts,
            seq_lens=lens.int(),
        )

    def _metadata(
        self, step: StepInputs, width: int | None = None, causal: bool = True
    ) -> StepMetadata:
        (stack,) = self._stack
        return step_metadata(
            step.query_start_loc,
            step.seq_lens,
            step.token_ids.shape[0],
            step.swa_block_table,
            stack.geometry.swa_page_size,
            stack.rope,
            window=stack.config.sliding_window,
            width=width,
            causal=causal,
        )
