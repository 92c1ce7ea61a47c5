"""How much of a step an engine may capture with a builder's metadata, under vLLM's names."""

from __future__ import annotations

from enum import IntEnum


class AttentionCGSupport(IntEnum):
    """CUDA-graph support, ordered: an engine takes the minimum over its builders."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1  # decode batches of one token per request
    UNIFORM_BATCH = 2  # batches of one query length, speculative decodes included
    ALWAYS = 3  # any mix of prompt chunks, decodes, empty and padded requests
