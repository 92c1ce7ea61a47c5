"""Modules that a model holds: a whole layer of DeepSeek-V4.1 attention and a step's metadata.

``import dsv41ops`` does not load this package; ``import dsv41ops.nn`` does.
"""

from dsv41ops.nn.attention import (
    AttentionGeometry,
    CompressedCache,
    Selection,
    SparseMLAAttention,
)
from dsv41ops.nn.metadata import StepMetadata, step_metadata
from dsv41ops.nn.rope import StepRope, YarnScaling, rope_frequencies, rope_table

__all__ = [
    "AttentionGeometry",
    "CompressedCache",
    "Selection",
    "SparseMLAAttention",
    "StepMetadata",
    "StepRope",
    "YarnScaling",
    "rope_frequencies",
    "rope_table",
    "step_metadata",
]
