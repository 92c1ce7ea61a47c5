"""Loading checkpoints: exact values, every fault named at once, and the command with them."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphs import checkpoint as checkpoint_module
from graphs import decode, write_checkpoint
from graphs.batch import CacheGeometry
from graphs.checkpoint import BLOCK, INDEX, Checkpoint, CheckpointError, dequantise
from graphs.config import ModelConfig
from graphs.model import DecodeModel
from graphs.weights import randomise
from graphs.write_checkpoint import quantise
from tests.graphs.tiny import draft_config, tiny_config, tiny_trace

# Its ranks are no multiples of a block.
CONFIG = ModelConfig.from_dict(tiny_config(q_lora_rank=40, o_lora_rank=24))
FILES = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
WQ_A = "layers.0.attn.wq_a"
SINK = "layers.0.attn.attn_sink"
FP8 = torch.float8_e4m3fn


def new_model(device: torch.device | str = "cpu") -> DecodeModel:
    geometry = CacheGeometry(max_requests=1, max_positions=64, num_pages=1, num_swa_pages=4)
    with torch.device(device):
        return DecodeModel(CONFIG, geometry)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "written"
    write_checkpoint.write_checkpoint(folder, CONFIG, seed=3)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(written, tmp_path / "weights"))


def read_all(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in FILES for name, tensor in load_file(folder / file).items()}


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """All tensors, changed, in one file without an index."""
    tensors = read_all(folder)
    change(tensors)
    for file in (*FILES, INDEX):
        (folder / file).unlink()
    save_file(tensors, folder / "all.safetensors")


def expected_values(tensors: dict[str, Tensor], name: str) -> Tensor:
    """In float64, each value times its block's power of two."""
    weight = tensors[name].double()
    if tensors[name].dtype != FP8:
        return weight
    exponent = tensors[name.replace(".weight", ".scale")].view(torch.uint8).double() - 127
    row, column = (torch.arange(size) // BLOCK for size in weight.shape)
    return weight * 2 ** exponent[row[:, None], column]


def assert_loaded(model: DecodeModel, tensors: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        came, expected = parameter.detach().cpu(), expected_values(tensors, name)
        assert torch.equal(came, expected.to(came.dtype)), name


def faults_of(folder: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder).check(new_model("meta"))
    faults = caught.value.faults
    assert all(fault in str(caught.value).replace("\n  ", "\n") for fault in faults)
    return faults


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(written: Path, dtype: torch.dtype, device: torch.device) -> None:
    model = new_model(device).to(dtype)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    calls: list[tuple[int, int]] = []
    loaded = Checkpoint(written).load(model, lambda done, total: calls.append((done, total)))
    count = len(addresses)
    assert loaded == (count, len(write_checkpoint.other_parts(CONFIG)))
    assert calls == [(done, count) for done in range(1, count + 1)]
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert_loaded(model, read_all(written))


def test_written_form(written: Path) -> None:
    tensors = read_all(written)
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    assert kinds[f"{WQ_A}.weight"] == FP8
    assert kinds[f"{WQ_A}.scale"] == torch.float8_e8m0fnu
    assert tensors["layers.0.attn.wq_b.scale"].shape == (64, 2)  # of 2048 × 40
    assert kinds["layers.0.attn_norm.weight"] == kinds["embed.weight"] == torch.bfloat16
    assert kinds[SINK] == kinds["layers.1.attn.compressor.wgate.weight"] == torch.float32
    index = json.loads((written / INDEX).read_text())["weight_map"]
    assert index.keys() == kinds.keys()
    assert set(index.values()) == set(FILES)


def test_written_values_are_the_seed_s(written: Path) -> None:
    model, random = new_model(), new_model()
    Checkpoint(written).load(model)
    randomise(random, 3)
    for (name, came), expected in zip(model.named_parameters(), random.parameters(), strict=True):
        error = (came - expected).norm() / expected.norm()
        assert error < (0.04 if came.dim() == 2 else 4e-3), name


def test_without_index_and_with_scales_as_bytes(folder: Path) -> None:
    tensors = read_all(folder)

    def as_bytes(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(".scale"):
                tensors[name] = tensor.view(torch.uint8)

    rewrite(folder, as_bytes)
    model = new_model()
    Checkpoint(folder).load(model)
    assert_loaded(model, tensors)


def test_scale_in_another_file(folder: Path) -> None:
    tensors = read_all(folder)
    rewrite(folder, lambda tensors: tensors.pop(f"{WQ_A}.scale"))
    save_file({f"{WQ_A}.scale": tensors[f"{WQ_A}.scale"]}, folder / "scale.safetensors")
    model = new_model()
    Checkpoint(folder).load(model)
    assert_loaded(model, tensors)


def test_files_of_other_parts_may_be_absent(folder: Path) -> None:
    path = folder / INDEX
    index = json.loads(path.read_text())
    index["weight_map"]["layers.0.ffn.w2.weight"] = "model-00003-of-00003.safetensors"
    path.write_text(json.dumps(index))
    Checkpoint(folder).check(new_model("meta"))


def test_every_scale_byte() -> None:
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    weight = torch.ones(256 * BLOCK, 1, dtype=FP8)
    came = dequantise(weight, scale)[::BLOCK, 0]
    assert came.tolist()[:255] == [2.0 ** (byte - 127) for byte in range(255)]
    assert came[255].isnan()


@pytest.mark.parametrize("factor", [1.0, 2.0**-60, 2.0**60])
def test_quantise(factor: float) -> None:
    weight = torch.randn(70, 33) * factor
    weight[:32, :32] = 0
    weight[40, 3], weight[0, 32] = 448 * factor, 449 * factor
    fp8, scale = quantise(weight)
    assert (fp8.shape, scale.shape) == (weight.shape, (3, 2))
    came = dequantise(fp8, scale)
    torch.testing.assert_close(came, weight, rtol=2**-4, atol=0.01 * factor)
    assert scale.float()[1, 0] == factor  # 448 just fits
    assert scale.float()[0, 1] == 2 * factor
    assert (came[:32, :32] == 0).all()


SPOILT: dict[str, tuple[Callable[[dict[str, Tensor]], object], list[str]]] = {
    "missing": (
        lambda t: [t.pop("norm.weight"), t.pop(SINK)],
        [f"{SINK}: missing", "norm.weight: missing"],
    ),
    "extra": (
        lambda t: t.update({"layers.2.attn.bias": torch.ones(2), "head.bias": torch.ones(2)}),
        ["head.bias: extra", "layers.2.attn.bias: extra"],
    ),
    "extra indexer": (
        lambda t: t.update({"layers.0.attn.indexer.k_norm.weight": torch.ones(128)}),
        ["layers.0.attn.indexer.k_norm.weight: extra"],
    ),
    "extra scale": (
        lambda t: t.update({"layers.0.attn.q_norm.scale": torch.ones(2)}),
        ["layers.0.attn.q_norm.scale: extra"],
    ),
    "shape": (
        lambda t: t.update({SINK: torch.zeros(5), "norm.weight": torch.ones(1, 64)}),
        [
            f"{SINK}: expected shape [4], got [5]",
            "norm.weight: expected shape [64], got [1, 64]",
        ],
    ),
    "shape of an FP8 weight": (
        lambda t: t.update({f"{WQ_A}.weight": t[f"{WQ_A}.weight"][:32].contiguous()}),
        [
            f"{WQ_A}.weight: expected shape [40, 64], got [32, 64]",
            f"{WQ_A}.scale: expected shape [1, 2], one per 32 × 32 values of [32, 64], got [2, 2]",
        ],
    ),
    "dtype": (
        lambda t: t.update({f"{WQ_A}.weight": t[f"{WQ_A}.weight"].view(torch.int8)}),
        [f"{WQ_A}.weight: expected BF16, F32 or F8_E4M3, got I8"],
    ),
    "FP8 vector": (
        lambda t: t.update({SINK: torch.zeros(4, dtype=FP8)}),
        [f"{SINK}: expected BF16 or F32, got F8_E4M3"],
    ),
    "missing scale": (
        lambda t: t.pop(f"{WQ_A}.scale"),
        [f"{WQ_A}.scale: missing, and {WQ_A}.weight is F8_E4M3"],
    ),
    "scale's shape": (
        lambda t: t.update({f"{WQ_A}.scale": torch.ones(1, 1).to(torch.float8_e8m0fnu)}),
        [f"{WQ_A}.scale: expected shape [2, 2], one per 32 × 32 values of [40, 64], got [1, 1]"],
    ),
    "scale's dtype": (
        lambda t: t.update({f"{WQ_A}.scale": torch.ones(2, 2)}),
        [f"{WQ_A}.scale: expected F8_E8M0 or U8, got F32"],
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_fault(case: str, folder: Path) -> None:
    change, expected = SPOILT[case]
    rewrite(folder, change)
    assert faults_of(folder) == expected


def test_all_faults_in_one_error(folder: Path) -> None:
    cases = [SPOILT[case] for case in ("scale's dtype", "missing", "extra")]
    rewrite(folder, lambda tensors: [change(tensors) for change, _ in cases])
    assert sorted(faults_of(folder)) == sorted(fault for _, faults in cases for fault in faults)


def test_missing_and_broken_files(folder: Path) -> None:
    (folder / FILES[0]).unlink()
    with (folder / FILES[1]).open("r+b") as file:
        file.truncate(1000)
    missing, broken = faults_of(folder)
    assert missing == f"{FILES[0]}: missing"
    assert broken.startswith(f"{FILES[1]}: not a readable safetensors file: ")


def test_missing_file_hides_no_other_fault(folder: Path) -> None:
    (folder / FILES[0]).unlink()
    with safe_open(folder / FILES[1], framework="pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del kept["norm.weight"]
    save_file(kept, folder / FILES[1])
    assert faults_of(folder) == [
        f"{FILES[0]}: missing",
        f"norm.weight: not in {FILES[1]}, where {INDEX} puts it",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "not a JSON file: Expecting"),
        ("[]", "expected weight_map, an object of tensor names to file names"),
        ('{"weight_map": {"norm.weight": "../x.safetensors"}}', "expected weight_map"),
    ],
)
def test_bad_index(text: str, fault: str, folder: Path) -> None:
    (folder / INDEX).write_text(text)
    (came,) = faults_of(folder)
    assert came.startswith(f"{INDEX}: {fault}")


def test_bad_folders(folder: Path, tmp_path: Path) -> None:
    assert faults_of(tmp_path / "absent") == ["no such folder"]
    assert faults_of(tmp_path) == ["no safetensors files"]
    (folder / INDEX).unlink()
    shutil.copy(folder / FILES[0], folder / "again.safetensors")
    (folder / "short.safetensors").write_bytes(b"abc")
    *twice, short = faults_of(folder)
    assert f"{WQ_A}.weight: in again.safetensors and in {FILES[0]}" in twice
    assert short.startswith("short.safetensors: not a readable safetensors file: ")


def test_missing_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"python -m pip install -e '\.\[weights\]'"):
        checkpoint_module.require_safetensors()
    with pytest.raises(ImportError, match="checkpoints need safetensors"):
        Checkpoint(folder)


def test_decode(
    written: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The geometry is the checkpoint's, and no random weight is used."""
    monkeypatch.delattr(decode, "randomise")
    arguments = [*tiny_trace(tmp_path), "--no-compile", "--requests", "2"]
    assert decode.main(["--weights", str(written), *arguments]) == 0
    printed = capsys.readouterr().out
    count = sum(1 for _ in new_model("meta").parameters())
    assert f"{count}/{count} weights\n" in printed
    assert re.search(rf"^loaded {count} weights in \d+\.\d s, skipped 7 tensors", printed, re.M)
    assert printed.rstrip().endswith("OK")


def test_decode_with_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "drafts"
    config = ModelConfig.from_dict(draft_config())
    write_checkpoint.write_checkpoint(folder, config, seed=3)
    arguments = ["--weights", str(folder), *tiny_trace(tmp_path), "--no-compile", "--drafts"]
    with monkeypatch.context() as patch:
        patch.delattr(decode, "randomise")
        assert decode.main(arguments) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^loaded \d+ draft weights in ", printed, re.M)
    assert printed.rstrip().endswith("OK")
    rewrite(folder, lambda tensors: (tensors.pop("layers.4.attn.attn_sink"), tensors.pop(SINK)))
    assert decode.main(arguments) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"graphs.decode: checkpoint {folder}: 2 faults",
        f"  {SINK}: missing",
        "  layers.4.attn.attn_sink: missing",
    ]


def test_decode_names_every_fault(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(folder, lambda tensors: (tensors.pop("norm.weight"), tensors.pop(SINK)))
    assert decode.main(["--weights", str(folder), "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        f"graphs.decode: checkpoint {folder}: 2 faults",
        f"  {SINK}: missing",
        "  norm.weight: missing",
    ]
    assert captured.out == ""


def test_decode_without_geometry_or_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.json").unlink()
    assert decode.main(["--weights", str(folder)]) == 2
    message = f"graphs.decode: checkpoint {folder}: config.json: missing (or give --config)\n"
    assert capsys.readouterr().err == message
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert decode.main(["--weights", str(folder)]) == 2
    message = "graphs.decode: checkpoints need safetensors: python -m pip install -e '.[weights]'\n"
    assert capsys.readouterr().err == message


def test_write_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(tiny_config()))
    folder = tmp_path / "weights"
    command = [str(folder), "--config", str(config), "--seed", "1"]
    assert write_checkpoint.main(command) == 0
    assert re.search(r"\d\.\d MiB of weights in 2 files", capsys.readouterr().out)
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 64
    assert write_checkpoint.main(command) == 2
    assert capsys.readouterr().err == f"graphs.write_checkpoint: {folder}: not empty\n"
