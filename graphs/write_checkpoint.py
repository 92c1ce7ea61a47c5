"""``python -m graphs.write_checkpoint``: a checkpoint of random weights in the released form.

FP8 projections with block scales, bfloat16 and float32 for the rest, two files and their index,
and some tensors of parts that ``graphs`` does not have.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from graphs.batch import CacheGeometry
from graphs.checkpoint import BLOCK, INDEX, require_safetensors, scale_name
from graphs.config import ConfigError, ModelConfig, load_config
from graphs.draft import DraftModel
from graphs.model import DecodeModel
from graphs.weights import fill

NUM_FILES = 2
FP8_PROJECTIONS = ("wq_a", "wq_b", "wkv", "wk", "wo_a", "wo_b")
FP8_MAX = 448.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m graphs.write_checkpoint", description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or empty folder")
    parser.add_argument("--config", default="small", help="small, flash, or a JSON file")
    parser.add_argument("--seed", type=int, default=0, help="as graphs.decode without --weights")
    args = parser.parse_args(argv)
    try:
        num_bytes = write_checkpoint(args.folder, load_config(args.config), args.seed)
    except (ConfigError, ImportError, OSError) as error:
        print(f"graphs.write_checkpoint: {error}", file=sys.stderr)
        return 2
    print(f"{args.folder}: {num_bytes / 2**20:.1f} MiB of weights in {NUM_FILES} files")
    return 0


def write_checkpoint(folder: Path, config: ModelConfig, seed: int) -> int:
    """Write the files into a new or empty folder; the number of bytes of all tensors."""
    require_safetensors()
    save_file = importlib.import_module("safetensors.torch").save_file
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder}: not empty")
    tensors = {**random_tensors(config, seed), **other_parts(config)}
    names = list(tensors)
    files = {}
    for number in range(NUM_FILES):
        file = f"model-{number + 1:05}-of-{NUM_FILES:05}.safetensors"
        held = names[number * len(names) // NUM_FILES : (number + 1) * len(names) // NUM_FILES]
        save_file({name: tensors[name] for name in held}, folder / file, {"format": "pt"})
        files.update(dict.fromkeys(held, file))
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": files})
    quantisation = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [BLOCK, BLOCK],
    }
    values = {**dataclasses.asdict(config), "quantization_config": quantisation}
    write_json(folder / "config.json", values)
    return num_bytes


def write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def random_tensors(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Parameters of the stack and of draft layers, from the values that ``graphs.decode`` has for
    the seed on a CPU."""
    with torch.device("meta"):
        geometry = CacheGeometry(max_requests=1, max_positions=1, num_pages=1, num_swa_pages=1)
        stack = DecodeModel(config, geometry)
        parts = (stack, DraftModel(stack)) if config.can_draft else (stack,)
    tensors = {}
    for number, part in enumerate(parts):
        generator = torch.Generator().manual_seed(seed + number)
        for name, parameter in part.named_parameters():
            values = torch.empty(parameter.shape)
            fill(name, values, generator)
            dtype = stored_dtype(name)
            if dtype == torch.float8_e4m3fn:
                tensors[name], tensors[scale_name(name)] = quantise(values)
            else:
                tensors[name] = values.to(dtype)
    return tensors


def stored_dtype(name: str) -> torch.dtype:
    """Norms, embeddings and the indexer's head weights are bf16; what must be exact is float32."""
    owner, _, field = name.removesuffix(".weight").rpartition(".")
    if field == "attn_sink" or (owner.endswith(".compressor") and field != "norm"):
        return torch.float32
    return torch.float8_e4m3fn if field in FP8_PROJECTIONS else torch.bfloat16


def other_parts(config: ModelConfig) -> dict[str, Tensor]:
    """A few tensors that whoever loads only the attention stack must skip."""
    hidden, beyond = config.hidden_size, len(config.compress_ratios)
    return {
        "hc_head_base": torch.zeros(4),
        "layers.0.hc_attn_base": torch.zeros(24),
        "layers.0.ffn_norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "layers.0.ffn.gate.weight": torch.zeros(8, hidden, dtype=torch.bfloat16),
        "layers.0.ffn.experts.0.w1.weight": torch.zeros(BLOCK, hidden // 2, dtype=torch.int8),
        f"layers.{beyond}.attn_norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        f"layers.{beyond}.attn.attn_sink": torch.zeros(config.num_attention_heads),
    }


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``[N, M]`` to FP8 and, per block, the smallest power of two that keeps it in range."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [n, 32, m, 32]
    mantissa, exponent = torch.frexp(blocks.abs().amax((1, 3)) / FP8_MAX)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(-127, 127)
    scaled = torch.ldexp(blocks, -exponent[:, None, :, None])
    fp8 = scaled.flatten(2).flatten(0, 1)[:rows, :columns].to(torch.float8_e4m3fn)
    return fp8.contiguous(), (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


if __name__ == "__main__":
    sys.exit(main())
