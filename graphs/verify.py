"""Greedy sampling that verifies drafts: which of them a step keeps, and the token after those.

A step's token ids below 0 stand for what the device holds of the request, in ``pending
[max_requests + 1, 1 + drafts]``: -1 the token that it sampled last, -1 - i the i-th draft after
that one. The last row takes padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from graphs.batch import StepInputs


class Verified(NamedTuple):
    """What a step adds to each request; rows of padding hold anything."""

    tokens: Tensor  # [R, 1 + drafts] int64: the accepted drafts, the new token, then anything
    num_accepted: Tensor  # [R] int64
    position: Tensor  # [R] int64 of the new token, which is in no cache yet


def fed_tokens(inputs: StepInputs, req_id_per_token: Tensor, pending: Tensor) -> Tensor:
    """``[T]`` int64 token ids; ``req_id_per_token [T]`` is -1 for padding."""
    column = (-1 - inputs.token_ids).clamp(0, pending.shape[1] - 1)
    slots = inputs.request_slots[req_id_per_token.clamp(min=0).long()]
    held = pending[slots, column]
    return torch.where(inputs.token_ids >= 0, inputs.token_ids, held)


def verify(
    inputs: StepInputs, fed: Tensor, pending: Tensor, greedy: Callable[[Tensor], Tensor]
) -> Verified:
    """Accept the longest prefix of the drafts that is greedy; the new token goes to ``pending``.

    Args:
        inputs: A request with drafts has them as its last tokens.
        fed: ``[T]`` from :func:`fed_tokens`.
        pending: Column 0 is written.
        greedy: Step rows ``[N]`` to the greedy token after each.
    """
    num_columns = pending.shape[1]
    last = (inputs.query_start_loc[1:] - 1).clamp(min=0).long()
    num_drafts = (-1 - inputs.token_ids[last]).clamp(0, num_columns - 1)
    column = torch.arange(num_columns, device=last.device)
    rows = torch.minimum((last - num_drafts)[:, None] + column, last[:, None]).clamp(min=0)
    tokens = greedy(rows.flatten()).unflatten(0, (-1, num_columns))
    agrees = (fed[rows[:, 1:]] == tokens[:, :-1]) & (column[:-1] < num_drafts[:, None])
    num_accepted = agrees.long().cumprod(1).sum(1)
    pending[inputs.request_slots, 0] = tokens.gather(1, num_accepted[:, None])[:, 0]
    return Verified(tokens, num_accepted, inputs.seq_lens - num_drafts + num_accepted)
