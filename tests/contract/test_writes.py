"""A mutating op writes what it was told to write; no op writes anything else."""

from __future__ import annotations

import pytest
import torch

from tests.contract.inputs import (
    OPS,
    Arguments,
    argument_sets,
    each_set,
    overload,
    storage_bytes,
    tensors_of,
    written,
)

# A set of each twin whose buffers hold T rows and no more, all of them written.
EXACT = {
    "compressed_slot_mapping_out": "dcp",
    "sliding_window_indices_out": "replay_start",
    "topk_to_slots_out": "strided",
    "decode_metadata_out": "all",
    "sparse_mla_decode_out": "all",
}
OUT = [op for op in OPS if op.endswith("_out")]


@pytest.mark.parametrize(("op", "name"), each_set())
def test_nothing_else_is_written(op: str, name: str, device: torch.device) -> None:
    arguments = argument_sets(op)[name](device)
    read_only = {k: t for k, t in tensors_of(arguments).items() if k not in written(op)}
    before = {k: storage_bytes(t) for k, t in read_only.items()}
    overload(op)(**arguments)
    for key, tensor in read_only.items():
        assert torch.equal(storage_bytes(tensor), before[key]), key


@pytest.mark.parametrize(("op", "name"), each_set(OUT))
def test_out_is_the_functional_result(op: str, name: str, device: torch.device) -> None:
    functional = op.removesuffix("_out")
    arguments = argument_sets(op)[name](device)
    plain = {k: v for k, v in arguments.items() if k not in written(op)}
    expected = overload(functional)(**plain)
    expected = expected if isinstance(expected, tuple) else (expected,)
    addresses = [arguments[k].data_ptr() for k in written(op)]
    overload(op)(**arguments)
    assert addresses == [arguments[k].data_ptr() for k in written(op)]
    for key, want in zip(written(op), expected, strict=True):
        got, T = arguments[key], want.shape[0]
        assert torch.equal(got[:T], want), key
        past_the_end = 77 if op == "sparse_mla_decode_out" else 0 if "lens" in key else -1
        assert bool((got[T:] == past_the_end).all()), key


@pytest.mark.parametrize("op", OUT)
def test_out_writes_inside_its_view_only(op: str, device: torch.device) -> None:
    arguments = argument_sets(op)[EXACT[op]](device)
    guarded = {}
    for key in written(op):
        buffer = arguments[key]
        storage = buffer.new_full((buffer.shape[0] + 4, *buffer.shape[1:]), 55)
        guarded[key], arguments[key] = storage, storage[2:-2]
    overload(op)(**arguments)
    for key, storage in guarded.items():
        assert bool((storage[:2] == 55).all() and (storage[-2:] == 55).all()), key
        assert not bool((storage[2:-2] == 55).any()), key


@pytest.mark.parametrize("kept", written("decode_metadata_out"))
def test_what_is_not_wanted_is_left_out(kept: str, device: torch.device) -> None:
    """Every buffer on its own, the others empty, also of caches that are there."""
    op = "decode_metadata_out"
    arguments, whole = (argument_sets(op)["all"](device) for _ in range(2))
    overload(op)(**whole)
    keep = {kept, "swa_lens"} if kept == "swa_indices" else {kept}
    keep |= {"swa_indices"} if kept == "swa_lens" else set()
    for key in written(op):
        if key not in keep:
            arguments[key] = arguments[key][:0]
    overload(op)(**arguments)
    for key in keep:
        assert torch.equal(arguments[key], whole[key]), key


def written_slots(arguments: Arguments) -> list[int]:
    """Inside the cache and, where rows are rotated, of a known position."""
    num_slots = arguments["cache"].shape[0] * arguments["cache"].shape[1]
    slots = arguments["slot_mapping"].tolist()
    known = [True] * len(slots)
    if "positions" in arguments:
        ratio, num_positions = arguments["compress_ratio"], arguments["cos_sin"].shape[0]
        known = [0 <= p // ratio * ratio < num_positions for p in arguments["positions"].tolist()]
    return [s for s, k in zip(slots, known, strict=True) if k and 0 <= s < num_slots]


@pytest.mark.parametrize(("op", "name"), each_set(["kv_cache_insert", "rope_kv_cache_insert"]))
def test_insert_changes_only_the_named_rows(op: str, name: str, device: torch.device) -> None:
    arguments = argument_sets(op)[name](device)
    cache, valid = arguments["cache"], written_slots(arguments)
    storage = storage_bytes(cache)
    rows = cache.clone()
    overload(op)(**arguments)

    # Which bytes of the storage the named rows own, by the record's own layout.
    _, page_size, width = cache.shape
    item = cache.element_size()
    owned = torch.zeros_like(storage, dtype=torch.bool)
    for slot in valid:
        page = (cache.storage_offset() + slot // page_size * cache.stride(0)) * item
        row = slot % page_size
        if width * item == 584:
            owned[page + row * 576 : page + (row + 1) * 576] = True
            scales = page + page_size * 576 + row * 8
            owned[scales : scales + 8] = True
        else:
            owned[page + row * width * item : page + (row + 1) * width * item] = True
    changed = storage_bytes(cache) != storage
    assert not bool((changed & ~owned).any())
    assert bool(changed.any()) == bool(valid)
    assert valid or torch.equal(cache, rows)
