"""What an engine asks for: ``description`` (capabilities, page shapes), ``builder``, ``window``
and ``step`` (a step's metadata), ``split`` (decodes and prompts), ``dcp``, ``layer_types``,
``metadata``.
"""

from dsv41ops.backend.builder import FlashMLASparseDSV41MetadataBuilder, SparseMLAMetadataBuilder
from dsv41ops.backend.capture import AttentionCGSupport
from dsv41ops.backend.dcp import DCPGeometry
from dsv41ops.backend.description import FlashMLASparseDSV41Backend
from dsv41ops.backend.layer_types import LayerType, layer_type, layer_types
from dsv41ops.backend.metadata import (
    CommonAttentionMetadata,
    DecodePlan,
    SlidingWindowMetadata,
    SparseMLAMetadata,
)
from dsv41ops.backend.split import DecodeSplit, split_decodes_and_prefills
from dsv41ops.backend.step import StepMetadata, StepMetadataBuilder
from dsv41ops.backend.window import SlidingWindowMetadataBuilder, draft_window_width

__all__ = [
    "AttentionCGSupport",
    "CommonAttentionMetadata",
    "DCPGeometry",
    "DecodePlan",
    "DecodeSplit",
    "FlashMLASparseDSV41Backend",
    "FlashMLASparseDSV41MetadataBuilder",
    "LayerType",
    "SlidingWindowMetadata",
    "SlidingWindowMetadataBuilder",
    "SparseMLAMetadata",
    "SparseMLAMetadataBuilder",
    "StepMetadata",
    "StepMetadataBuilder",
    "draft_window_width",
    "layer_type",
    "layer_types",
    "split_decodes_and_prefills",
]
