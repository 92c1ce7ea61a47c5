"""FlashMLA's kernels by themselves, for the ratio: without what the ``flash_mla`` backend adds.

They take 64 or 128 heads; fewer are padded, as a caller would have to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv41ops.bench.inputs import Inputs, Prepared, decode_reference
from dsv41ops.bench.problems import DecodeCase
from dsv41ops.kernels.flash_mla import library
from dsv41ops.layouts import FP8_DS_MLA, HEAD_DIM

RECORD = FP8_DS_MLA.name


class UnavailableError(Exception):
    """FlashMLA cannot run here; the message says why in one line."""


def padded_case(case: DecodeCase) -> DecodeCase:
    """The call that FlashMLA's time is taken from, whatever records ``case`` has."""
    num_heads = library.padded_heads(case.num_heads)
    return replace(case, window_record=RECORD, record=RECORD, num_heads=num_heads)


def load(device: torch.device) -> Callable[..., Any]:
    """FlashMLA's sparse decode op.

    Raises:
        UnavailableError: Not installed, or not for this GPU or this torch.
    """
    reason = library.unavailable(device)
    if reason is not None:
        raise UnavailableError(reason)
    return library.sparse_decode_op()


def prepare(op: Callable[..., Any], inputs: Inputs, case: DecodeCase) -> Prepared:
    """A padded case; its split plan is computed once, before the graph, and reused by all calls.

    Raises:
        UnavailableError: FlashMLA refuses the call.
    """
    arguments = inputs.decode_arguments(case)

    def call(i: int, plan: tuple[Tensor | None, Tensor | None]) -> Any:
        given = arguments(i)
        return op(
            given["q"][:, None],
            given["swa_cache"].unsqueeze(2),
            given["swa_indices"][:, None],
            given["swa_lens"],
            given["attn_sink"],
            *plan,
            given["cache"].unsqueeze(2),
            given["topk_indices"][:, None],
            given["topk_lens"],
            HEAD_DIM,
            HEAD_DIM**-0.5,
            None,
        )

    try:
        plan = call(0, (None, None))[2:4]
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise UnavailableError(f"refuses {case.label}: {library.first_line(error)}") from error

    def result(i: int) -> tuple[Tensor, Tensor]:
        out, lse = call(i, plan)[:2]
        return out[:, 0], lse.reshape(case.num_tokens, case.num_heads)

    return Prepared(
        run=lambda i: call(i, plan),
        reference=lambda i: decode_reference(arguments(i)),
        warm=inputs.decode_warm(case, arguments(0)["q"]),
        exact=False,
        result=result,
    )
