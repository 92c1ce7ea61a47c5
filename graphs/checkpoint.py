"""Weights from a folder of safetensors files under DeepSeek's names.

Parameters are matched by name alone, so any module that names them as the checkpoint does can be
loaded. Tensors of parts that the module does not have are left on the disk.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

INDEX = "model.safetensors.index.json"
BLOCK = 32  # rows and columns that share one scale
# safetensors' words for the dtypes that a weight and a block scale may have.
PLAIN = ("BF16", "F32")
FP8 = "F8_E4M3"
SCALES = ("F8_E8M0", "U8")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message has one line per fault."""

    def __init__(self, folder: Path, faults: list[str]) -> None:
        lines = faults if len(faults) == 1 else [f"{len(faults)} faults", *faults]
        super().__init__(f"checkpoint {folder}: " + "\n  ".join(lines))
        self.faults = faults


class Entry(NamedTuple):
    """One tensor, as the header of its file describes it."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]


class Source(NamedTuple):
    """Where a parameter's values come from; ``scale`` belongs to an FP8 weight."""

    parameter: Tensor
    weight: Entry
    scale: Entry | None


class Loaded(NamedTuple):
    """What was done with the checkpoint's tensors; block scales count with their weight."""

    num_parameters: int
    num_skipped: int  # tensors of parts that the module does not have


class Checkpoint:
    """A folder of safetensors files, by its index or, without one, every file in it.

    Raises:
        CheckpointError: The folder, its index or, without an index, one of its files is unusable.
        ImportError: safetensors is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self._library = require_safetensors()
        self.folder = folder
        if not folder.is_dir():
            raise CheckpointError(folder, ["no such folder"])
        has_index = (folder / INDEX).is_file()
        self._files = self._read_index() if has_index else self._list_files()

    @property
    def config_path(self) -> Path:
        """The geometry that came with the weights."""
        path = self.folder / "config.json"
        if not path.is_file():
            raise CheckpointError(self.folder, ["config.json: missing (or give --config)"])
        return path

    def check(self, module: nn.Module) -> None:
        """Raise one CheckpointError that names everything that does not fit; reads headers only."""
        self._match(module)

    @torch.no_grad()
    def load(
        self, module: nn.Module, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Loaded:
        """Fill every parameter, on its device and in its dtype, one tensor at a time.

        Args:
            module: Its parameters keep their addresses.
            progress: Called after each parameter with the number done and the number of all.
        """
        sources, num_skipped = self._match(module)
        for done, source in enumerate(sources, 1):
            device = source.parameter.device
            values = self._read(source.weight, device)
            if source.scale is not None:
                values = dequantise(values, self._read(source.scale, device))
            source.parameter.copy_(values)
            progress(done, len(sources))
        return Loaded(len(sources), num_skipped)

    def _read_index(self) -> dict[str, str]:
        """Tensor names to file names."""
        try:
            index = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
        except ValueError as error:  # JSON or its encoding
            raise CheckpointError(self.folder, [f"{INDEX}: not a JSON file: {error}"]) from None
        files = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(files, dict) or not all(map(is_file_name, files.values())):
            reason = f"{INDEX}: expected weight_map, an object of tensor names to file names"
            raise CheckpointError(self.folder, [reason])
        return files

    def _list_files(self) -> dict[str, str]:
        names = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not names:
            raise CheckpointError(self.folder, ["no safetensors files"])
        files: dict[str, str] = {}
        faults = []
        for file in names:
            opened = self._open(file)
            if isinstance(opened, str):
                faults.append(opened)
                continue
            with opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    if name in files:
                        faults.append(f"{name}: in {files[name]} and in {file}")
                    files[name] = file
        if faults:
            raise CheckpointError(self.folder, faults)
        return files

    def _open(self, file: str, device: torch.device | str = "cpu") -> Any:
        """An open file, or the reason why it cannot be opened."""
        path = self.folder / file
        if not path.is_file():
            return f"{file}: missing"
        try:
            return self._library.safe_open(path, framework="pt", device=str(device))
        except (OSError, self._library.SafetensorError) as error:
            return f"{file}: not a readable safetensors file: {error}"

    def _read(self, entry: Entry, device: torch.device) -> Tensor:
        opened = self._open(entry.file, device)
        if isinstance(opened, str):
            raise CheckpointError(self.folder, [opened])
        with opened:
            tensor: Tensor = opened.get_tensor(entry.name)
        return tensor

    def _read_headers(self, owned: dict[str, str]) -> tuple[dict[str, Entry], list[str]]:
        """What the files say about some tensors, and what is wrong with the files."""
        entries: dict[str, Entry] = {}
        faults = []
        for file in sorted(set(owned.values())):
            opened = self._open(file)
            if isinstance(opened, str):
                faults.append(opened)
                continue
            with opened:
                held = set(opened.keys())
                for name in (name for name, where in owned.items() if where == file):
                    if name in held:
                        header = opened.get_slice(name)
                        shape = tuple(header.get_shape())
                        entries[name] = Entry(name, file, header.get_dtype(), shape)
                    else:
                        faults.append(f"{name}: not in {file}, where {INDEX} puts it")
        return entries, faults

    def _match(self, module: nn.Module) -> tuple[list[Source], int]:
        """Sources in the order of the files, and the number of tensors of other parts."""
        parameters = dict(module.named_parameters())
        parts = set(map(part_of, parameters))
        owned = {name: file for name, file in self._files.items() if part_of(name) in parts}
        entries, faults = self._read_headers(owned)
        sources, used = [], set(parameters)
        for name, parameter in parameters.items():
            weight = entries.get(name)
            if weight is None or weight.dtype not in PLAIN:
                used.add(scale_name(name))
            if weight is None:
                if name not in owned:  # else the fault of its file is named already
                    faults.append(f"{name}: missing")
                continue
            faults.extend(weight_faults(weight, tuple(parameter.shape)))
            scale = None
            if weight.dtype == FP8 and parameter.dim() == 2:
                scale = entries.get(scale_name(name))
                if scale is not None:
                    faults.extend(scale_faults(scale, weight))
                elif scale_name(name) not in owned:
                    faults.append(f"{scale_name(name)}: missing, and {name} is {FP8}")
            sources.append(Source(parameter, weight, scale))
        faults.extend(f"{name}: extra" for name in sorted(entries.keys() - used))
        if faults:
            raise CheckpointError(self.folder, faults)
        sources.sort(key=lambda source: source.weight.file)
        return sources, len(self._files) - len(owned)


def require_safetensors() -> Any:
    """The library, or an ImportError that says how to install it."""
    try:
        importlib.import_module("safetensors.torch")
        return importlib.import_module("safetensors")
    except ImportError as error:
        raise ImportError(
            "checkpoints need safetensors: python -m pip install -e '.[weights]'"
        ) from error


def is_file_name(value: object) -> bool:
    """A plain name: an index has no say outside its folder."""
    return isinstance(value, str) and Path(value).name == value


def part_of(name: str) -> str:
    """The part of a model that a tensor belongs to: ``embed``, ``layers.{L}.attn`` ..."""
    words = name.split(".")
    return ".".join(words[:3]) if words[0] == "layers" else words[0]


def scale_name(name: str) -> str:
    """Where the block scales of an FP8 weight are."""
    return name.removesuffix(".weight") + ".scale"


def weight_faults(weight: Entry, shape: tuple[int, ...]) -> list[str]:
    """What keeps a tensor from filling a parameter of this shape."""
    faults = []
    accepted = (*PLAIN, FP8) if len(shape) == 2 else PLAIN  # blocks have two dimensions
    if weight.dtype not in accepted:
        faults.append(f"{weight.name}: expected {any_of(accepted)}, got {weight.dtype}")
    if weight.shape != shape:
        faults.append(f"{weight.name}: expected shape {list(shape)}, got {list(weight.shape)}")
    return faults


def scale_faults(scale: Entry, weight: Entry) -> list[str]:
    """What keeps a tensor from being the block scales of a weight."""
    faults = []
    if scale.dtype not in SCALES:
        faults.append(f"{scale.name}: expected {any_of(SCALES)}, got {scale.dtype}")
    blocks = [-(-size // BLOCK) for size in weight.shape]
    if list(scale.shape) != blocks:
        faults.append(
            f"{scale.name}: expected shape {blocks}, one per {BLOCK} × {BLOCK} values of "
            f"{list(weight.shape)}, got {list(scale.shape)}"
        )
    return faults


def any_of(words: Iterable[str]) -> str:
    *head, last = words
    return f"{', '.join(head)} or {last}"


def dequantise(weight: Tensor, scale: Tensor) -> Tensor:
    """FP8 ``[N, M]`` with a UE8M0 scale (or its byte) per block to float32."""
    rows, columns = weight.shape
    factor = scale.view(torch.float8_e8m0fnu).float()
    factor = factor.repeat_interleave(BLOCK, 0)[:rows]
    return weight.float() * factor.repeat_interleave(BLOCK, 1)[:, :columns]
