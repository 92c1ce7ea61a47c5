"""A model and a trace for quick runs of the main job."""

from __future__ import annotations

import json
from pathlib import Path

from graphs.config import CONFIG_DIR

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def tiny_config(**changes: object) -> dict:
    """Three layers, one of each ratio."""
    values = json.loads((CONFIG_DIR / "deepseek_v4_1_small.json").read_text())
    values.update(
        num_hidden_layers=3,
        compress_ratios=[0, 2, 1],
        kv_source_layer_ids=[1, 2],
        index_source_layer_ids=[1, 2],
        candidate_source_layer_id=2,
        sliding_window=32,
        hidden_size=64,
        num_attention_heads=4,
        index_n_heads=2,
        index_topk=8,
    )
    return {**values, **changes}


def draft_config(**changes: object) -> dict:
    """The same with three draft layers."""
    return tiny_config(compress_ratios=[0, 2, 1, 0, 0, 0], **changes)


def tiny_trace(folder: Path) -> list[str]:
    """Arguments of a run of three requests, one longer than the window, on the CPU."""
    trace = folder / "trace.csv"
    lengths = [(5, 6), (70, 3), (9, 1)]
    trace.write_text(
        HEADER + "".join(f"2023-11-16 18:17:0{i},{c},{g}\n" for i, (c, g) in enumerate(lengths))
    )
    return ["--trace", str(trace), "--pool-tokens", "192", "--device", "cpu"]
