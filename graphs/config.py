"""Model geometry, read from a JSON file with DeepSeek's field names."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

CONFIG_DIR = Path(__file__).parent / "configs"
RATIOS = (0, 1, 2)


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one line for the user."""


@dataclass(frozen=True)
class RopeScaling:
    """YaRN, applied in layers that have a compressed cache."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


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

    def __post_init__(self) -> None:
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
        for layer in self.index_source_layer_ids:
            if self.ratio(layer) != self.ratio(self.kv_source(layer)):
                raise ConfigError(f"layer {layer}: its kv source has another compress ratio")

    def ratio(self, layer: int) -> int:
        """Compress ratio of a layer; 0 for a window-only layer."""
        return self.compress_ratios[layer]

    @property
    def compressed_layers(self) -> tuple[int, ...]:
        """Layers that read a compressed cache."""
        return tuple(n for n in range(self.num_hidden_layers) if self.ratio(n) > 0)

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
        missing = [field.name for field in fields(cls) if field.name not in values]
        if missing:
            raise ConfigError(f"config: missing {', '.join(missing)}")
        known = {field.name: values[field.name] for field in fields(cls)}
        known["rope_scaling"] = RopeScaling(
            **{field.name: known["rope_scaling"][field.name] for field in fields(RopeScaling)}
        )
        for name, value in known.items():
            if isinstance(value, list):
                known[name] = tuple(value)
        return cls(**known)


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
