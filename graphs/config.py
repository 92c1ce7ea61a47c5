"""Model geometry, read from a JSON file with DeepSeek's field names."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from dsv41ops.layouts import HEAD_DIM, INDEX_HEAD_DIM, ROPE_DIM
from dsv41ops.nn import YarnScaling

CONFIG_DIR = Path(__file__).parent / "configs"
RATIOS = (0, 1, 2)
# What a field's JSON value must be, by the field's annotation.
KINDS = {"int": "a whole number", "float": "a number", "tuple[int, ...]": "a list of whole numbers"}
# Widths that the ops are made for.
WIDTHS = {"head_dim": HEAD_DIM, "qk_rope_head_dim": ROPE_DIM, "index_head_dim": INDEX_HEAD_DIM}


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one line for the user."""


@dataclass(frozen=True)
class RopeScaling:
    """YaRN, applied in layers that have a compressed cache."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int

    @property
    def yarn(self) -> YarnScaling:
        return YarnScaling(
            self.factor, self.beta_fast, self.beta_slow, self.original_max_position_embeddings
        )


@dataclass(frozen=True)
class ModelConfig:
    """Geometry of the attention stack. Layer ids count from 0."""

    hidden_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    num_hidden_layers: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    vocab_size: int
    dspark_block_size: int = 0  # drafts per step; 0: no draft layers
    dspark_noise_token_id: int = 0  # stands for a token of a draft block that is not known yet

    def __post_init__(self) -> None:
        for name, width in WIDTHS.items():
            if getattr(self, name) != width:
                raise ConfigError(f"{name}: expected {width}, got {getattr(self, name)}")
        if len(self.compress_ratios) < self.num_hidden_layers:
            raise ConfigError(
                f"compress_ratios: expected at least num_hidden_layers = {self.num_hidden_layers} "
                f"entries, got {len(self.compress_ratios)}"
            )
        for ratio in self.compress_ratios:
            if ratio not in RATIOS:
                raise ConfigError(f"compress_ratios: expected 0, 1 or 2, got {ratio}")
        for layer in self.compressed_layers:
            for name in ("kv_source_layer_ids", "index_source_layer_ids"):
                if self._source(name, layer) is None:
                    raise ConfigError(f"{name}: no source at or below layer {layer}")
        for layer in self.kv_source_layer_ids:
            if layer not in self.index_source_layer_ids:
                raise ConfigError(f"index_source_layer_ids: expected kv source {layer} among them")
        for layer in self.index_source_layer_ids:
            if self.ratio(layer) != self.ratio(self.kv_source(layer)):
                raise ConfigError(f"layer {layer}: its kv source has another compress ratio")

    @property
    def can_draft(self) -> bool:
        """Are there draft layers, and a block for them to propose?"""
        try:
            self.check_drafts()
        except ConfigError:
            return False
        return True

    def check_drafts(self) -> None:
        """Raise unless the model can propose drafts. Without them, a model may use only the first
        layers of its ``compress_ratios``."""
        if self.dspark_block_size < 1:
            raise ConfigError(
                f"dspark_block_size: expected 1 or more for drafts, got {self.dspark_block_size}"
            )
        if not self.draft_layers:
            raise ConfigError(
                "compress_ratios: expected entries of draft layers after the "
                f"{self.num_hidden_layers} of the stack, got none"
            )
        if not 0 <= self.dspark_noise_token_id < self.vocab_size:
            raise ConfigError(
                f"dspark_noise_token_id: expected 0 to {self.vocab_size - 1}, "
                f"got {self.dspark_noise_token_id}"
            )
        for layer in self.draft_layers:
            if self.ratio(layer):
                raise ConfigError(
                    f"compress_ratios: expected 0 for draft layer {layer}, got {self.ratio(layer)}"
                )

    def ratio(self, layer: int) -> int:
        """Compress ratio of a layer; 0 for a window-only layer."""
        return self.compress_ratios[layer]

    @property
    def compressed_layers(self) -> tuple[int, ...]:
        """Layers that read a compressed cache."""
        return tuple(n for n in range(self.num_hidden_layers) if self.ratio(n) > 0)

    @property
    def draft_layers(self) -> tuple[int, ...]:
        """Layers after the stack that propose drafts."""
        return tuple(range(self.num_hidden_layers, len(self.compress_ratios)))

    def kv_source(self, layer: int) -> int:
        """Layer whose compressed cache this layer reads."""
        source = self._source("kv_source_layer_ids", layer)
        assert source is not None
        return source

    def index_source(self, layer: int) -> int:
        """Layer whose selection this layer uses."""
        source = self._source("index_source_layer_ids", layer)
        assert source is not None
        return source

    def _source(self, name: str, layer: int) -> int | None:
        """The newest source at or below a layer."""
        return max((s for s in getattr(self, name) if s <= layer), default=None)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Build from DeepSeek's field names; fields that it does not know are left out."""
        known = _known_fields(cls, values, "config")
        scaling = _known_fields(RopeScaling, known["rope_scaling"], "rope_scaling")
        return cls(**{**known, "rope_scaling": RopeScaling(**scaling)})


def _known_fields(cls: type, values: Any, where: str) -> dict[str, Any]:
    """The values of a dataclass's fields, each of its kind, and there if it has no default."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {json.dumps(values)}")
    missing = [
        field.name for field in fields(cls) if field.name not in values and field.default is MISSING
    ]
    if missing:
        raise ConfigError(f"{where}: missing {', '.join(missing)}")
    given = [field for field in fields(cls) if field.name in values]
    known = {field.name: values[field.name] for field in given}
    for field in given:
        value, kind = known[field.name], str(field.type)
        if kind in KINDS and not _is_of_kind(value, kind):
            raise ConfigError(f"{field.name}: expected {KINDS[kind]}, got {json.dumps(value)}")
        if isinstance(value, list):
            known[field.name] = tuple(value)
    return known


def _is_of_kind(value: Any, kind: str) -> bool:
    if kind == "tuple[int, ...]":
        return isinstance(value, list) and all(type(number) is int for number in value)
    return type(value) is int or (kind == "float" and isinstance(value, float))


def load_config(name: str) -> ModelConfig:
    """Load ``small``, ``flash`` or a path to a JSON file."""
    path = CONFIG_DIR / f"deepseek_v4_1_{name}.json"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        names = sorted(p.stem.removeprefix("deepseek_v4_1_") for p in CONFIG_DIR.glob("*.json"))
        raise ConfigError(f"unknown config {name!r}: expected {', '.join(names)} or a JSON file")
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a JSON file: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return ModelConfig.from_dict(values)
