"""Model geometry files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphs.config import CONFIG_DIR, ConfigError, ModelConfig, load_config


def test_flash_is_the_released_geometry() -> None:
    config = load_config("flash")
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (
        40,
        5120,
        64,
    )
    assert len(config.compress_ratios) == 43
    assert [config.ratio(layer) for layer in (0, 1, 2, 19, 20, 39)] == [0, 0, 2, 2, 1, 1]
    assert [config.kv_source(layer) for layer in (2, 7, 8, 19, 20, 39)] == [2, 2, 8, 14, 20, 20]
    assert [config.index_source(layer) for layer in (3, 13, 23, 24, 39)] == [2, 8, 20, 24, 36]
    assert config.candidate_topk_blocks == 2048
    assert config.draft_layers == (40, 41, 42)
    assert config.dspark_block_size == 5


def test_small_keeps_what_matters() -> None:
    config, flash = load_config("small"), load_config("flash")
    assert config.compress_ratios == (0, 0, 2, 2, 1, 1, 0, 0, 0)
    assert config.draft_layers == (6, 7, 8)
    assert config.dspark_block_size == flash.dspark_block_size
    assert config.kv_source_layer_ids == (2, 4)
    assert config.index_source_layer_ids == (2, 4, 5)
    assert config.candidate_source_layer_id == 4
    for name in ("head_dim", "sliding_window", "qk_rope_head_dim", "rope_scaling", "rms_norm_eps"):
        assert getattr(config, name) == getattr(flash, name)


def small(**changes: object) -> dict:
    path = CONFIG_DIR / "deepseek_v4_1_small.json"
    return {**json.loads(path.read_text()), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [0, 0, 2, 2, 1, 3]}, "compress_ratios: expected 0, 1 or 2, got 3"),
        ({"compress_ratios": [0]}, "compress_ratios: expected at least"),
        ({"kv_source_layer_ids": [4]}, "kv_source_layer_ids: no source at or below layer 2"),
        ({"kv_source_layer_ids": [2]}, "its kv source has another compress ratio"),
        ({"index_source_layer_ids": [2, 5]}, "index_source_layer_ids: expected kv source 4 among"),
        ({"head_dim": 576}, "head_dim: expected 512, got 576"),
        ({"index_head_dim": 64}, "index_head_dim: expected 128, got 64"),
        ({"hidden_size": "128"}, 'hidden_size: expected a whole number, got "128"'),
        ({"vocab_size": 1.5}, "vocab_size: expected a whole number, got 1.5"),
        ({"rope_theta": True}, "rope_theta: expected a number, got true"),
        ({"compress_ratios": 2}, "compress_ratios: expected a list of whole numbers, got 2"),
        ({"rope_scaling": None}, "rope_scaling: expected a JSON object, got null"),
        ({"rope_scaling": {"factor": 16, "beta_slow": 1}}, "rope_scaling: missing beta_fast, orig"),
    ],
)
def test_refuses(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(small(**changes))


def test_no_drafts() -> None:
    values = small(compress_ratios=[0, 0, 2, 2, 1, 1])
    del values["dspark_block_size"], values["dspark_noise_token_id"]
    config = ModelConfig.from_dict(values)
    assert (config.draft_layers, config.dspark_block_size) == ((), 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dspark_block_size": 0}, "dspark_block_size: expected 1 or more for drafts, got 0"),
        ({"dspark_noise_token_id": 512}, "dspark_noise_token_id: expected 0 to 511, got 512"),
        (
            {"compress_ratios": [0, 0, 2, 2, 1, 1]},
            "compress_ratios: expected entries of draft layers after the 6 of the stack, got none",
        ),
        (
            {"compress_ratios": [0, 0, 2, 2, 1, 1, 2]},
            "compress_ratios: expected 0 for draft layer 6, got 2",
        ),
    ],
)
def test_cannot_draft(changes: dict, message: str) -> None:
    config = ModelConfig.from_dict(small(**changes))
    with pytest.raises(ConfigError, match=message):
        config.check_drafts()


def test_drafts() -> None:
    load_config("small").check_drafts()
    load_config("flash").check_drafts()


def test_missing_field() -> None:
    values = small()
    del values["hidden_size"]
    with pytest.raises(ConfigError, match="missing hidden_size"):
        ModelConfig.from_dict(values)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(small(vocab_size=77)))
    assert load_config(str(path)).vocab_size == 77
    path.write_text("{")
    with pytest.raises(ConfigError, match="not a JSON file"):
        load_config(str(path))
    path.write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object"):
        load_config(str(path))
    with pytest.raises(ConfigError, match="unknown config 'tiny': expected flash, small or"):
        load_config("tiny")
