"""``dsv41ops.warmup``: its arguments, and that it runs every variant that a step launches."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv41ops
from dsv41ops import dispatch
from dsv41ops.configs import DecodeProblem, decode_config, decode_variants
from dsv41ops.schemas import SCHEMAS
from tests.export.fresh import run_fresh

CPU = torch.device("cpu")
NUM_SMS = 132


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_heads": 0}, ValueError, "num_heads: expected at least 1, got 0"),
        ({"num_heads": 129}, ValueError, "num_heads: expected at most 128, got 129"),
        ({"num_heads": 8.0}, TypeError, "num_heads: expected an int, got float"),
        ({"swa_cache_dtype": "int4"}, ValueError, "kv_cache_dtype: expected one of .* 'int4'"),
        ({"cache_dtype": ""}, ValueError, "kv_cache_dtype: expected one of .* ''"),
        ({"index_cache_dtype": "int4"}, ValueError, "index_cache_dtype: expected one of .* 'int4'"),
        ({"index_heads": 0}, ValueError, "index_heads: expected at least 1, got 0"),
        ({"index_heads": 65}, ValueError, "index_heads: expected at most 64, got 65"),
        (
            {"num_candidate_blocks": 2049},
            ValueError,
            "num_candidate_blocks: expected at most 2048, got 2049",
        ),
        ({"candidate_block_size": 0.5}, TypeError, "candidate_block_size: expected an int, .*"),
        ({"window_width": 0}, ValueError, "window_width: expected at least 1, got 0"),
        ({"draft_width": 0}, ValueError, "draft_width: expected at least 1, got 0"),
        ({"topk": 0}, ValueError, "topk: expected at least 1, got 0"),
        ({"max_num_tokens": 0}, ValueError, "max_num_tokens: expected at least 1, got 0"),
        ({"dcp_rank": 1}, ValueError, "dcp_rank: expected 0 <= rank < dcp_world_size = 1, got 1"),
        ({"backend": "fast"}, ValueError, "backend: expected one of auto, .*, got 'fast'"),
        ({"cp_interleave": 0}, ValueError, "cp_interleave: expected at least 1, got 0"),
        ({"device": "meta"}, ValueError, "device: expected a CUDA device or a CPU, got meta"),
    ],
)
def test_arguments_are_checked(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        dsv41ops.warmup(**{"num_heads": 8, "device": "cpu", **arguments})


def test_nothing_to_do_on_a_cpu() -> None:
    code = """
import sys, dsv41ops
dsv41ops.warmup(64, "mxfp8", "nvfp4", dcp_world_size=2, device="cpu")
assert "triton" not in sys.modules
"""
    done = run_fresh(code)
    assert done.returncode == 0, done.stderr


class Launches:
    """Every op by its Triton launcher, on CPU tensors; nothing runs, the variants are kept."""

    def __init__(self) -> None:
        cross_compile = pytest.importorskip("tests.kernels.cross_compile")
        self._record = cross_compile.record_launches
        self.api = SimpleNamespace(
            **{op: self._through_launcher(op) for op in SCHEMAS if not op.endswith("_out")}
        )

    def _through_launcher(self, op: str) -> Callable[..., Any]:
        from dsv41ops import ops

        public = inspect.signature(getattr(dsv41ops, op))

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = public.bind(*args, **kwargs)
            bound.apply_defaults()
            return ops._launcher(op)(*bound.args)

        return call

    def of(self, call: Callable[[], object]) -> set[tuple[object, ...]]:
        return {variant.key for variant in self._record(call, "")}


def only_triton(backend: str, device: torch.device, problem: DecodeProblem | None) -> str | None:
    return None if backend == "triton" else "not here"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """With a CPU in the place of a GPU."""
    recorder = Launches()
    dispatch._chosen.cache_clear()
    module = sys.modules["dsv41ops.warmup"]  # the package's attribute is the function
    monkeypatch.setattr(module, "api", recorder.api)
    monkeypatch.setattr(module, "_cuda_device", lambda device: CPU)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(dispatch, "refusal", only_triton)
    return recorder


def shifted(shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
    """A dense tensor that begins some elements into its storage."""
    size = int(torch.Size(shape).numel())
    return torch.zeros(size + offset, dtype=dtype)[offset:].view(shape)


def step(
    api: SimpleNamespace,
    num_tokens: int,
    *,
    heads: int = 64,
    swa: str = "mxfp8",
    record: str | None = "nvfp4",
    topk: int = 512,
    draft: int | None = None,
    sink: bool = True,
    dcp: tuple[int, int, int] = (1, 0, 1),
    slots: torch.dtype = torch.int64,
    batch_invariant: bool = False,
    rope: bool = False,
    index: str | None = None,
    blocks: tuple[int, int] = (0, 8),
    offset: int = 0,
) -> None:
    """What the layers of a model launch in one step; index rows lie at odd addresses."""
    T = num_tokens

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return shifted(shape, dtype, 3)

    batch, table = (ints(8), ints(7)), ints(7, 40)
    world, _, interleave = dcp
    api.token_to_request(batch[0], T)
    if world > 1:
        api.dcp_local_seq_lens(batch[1], 2, *dcp)
    api.compressed_slot_mapping(*batch, table, T, 32, 1)
    if draft is None:
        api.sliding_window_indices(*batch, table, T, 32)
        api.sliding_window_indices(*batch, table, T, 32, replay_start=ints(7))
    else:
        api.sliding_window_indices(*batch, table, T, 32, width=draft, causal=False)
    window: dict[str, Any] = {"swa_block_table": table, "swa_page_size": 32}
    if draft is not None:
        window |= {"width": draft, "causal": False}
    rank = {"dcp_world_size": world, "dcp_rank": dcp[1]}
    interleaves = {"cp_interleave_c1a": 2 * interleave, "cp_interleave_c2a": interleave}
    pages = {"block_table_c1a": table, "block_table_c2a": table, "block_size": 16 * interleave}
    for mapping in (None, ints(T, dtype=slots)):
        api.decode_metadata(*batch, T, **window, slot_mapping=mapping)
        if record is not None:
            compressed = {**pages, **rank, **interleaves, "slot_mapping": mapping}
            api.decode_metadata(*batch, T, **window, **compressed, replay_start=ints(7))
            api.decode_metadata(*batch, T, **compressed)
    kv, latent = (shifted((T, 512), t, offset) for t in (torch.bfloat16, torch.float32))
    turns = {"positions": ints(T, dtype=slots), "cos_sin": shifted((99, 64), torch.float32, 1)}
    back = turns if rope else {}
    swa_cache = dsv41ops.new_kv_cache(9, 32, swa)
    q = shifted((T, heads, 512), torch.bfloat16, offset)
    rows = (q, swa_cache, ints(T, draft or 128), ints(T))
    attn_sink = torch.zeros(heads) if sink else None
    api.kv_cache_insert(kv, ints(T, dtype=slots), swa_cache)
    api.rope_kv_cache_insert(kv, **turns, slot_mapping=ints(T, dtype=slots), cache=swa_cache)
    api.sparse_mla_decode(*rows, attn_sink=attn_sink, batch_invariant=batch_invariant, **back)
    if record is None:
        return
    cache = dsv41ops.new_kv_cache(9, 8 * interleave, record)
    for mapping in (None, ints(T, dtype=slots)):
        api.compressed_slot_mapping(*batch, table, T, 8 * interleave, 2, mapping, *dcp)
    api.kv_cache_insert(kv, ints(T, dtype=slots), cache)
    api.rope_kv_cache_insert(
        latent, **turns, slot_mapping=ints(T, dtype=slots), cache=cache, compress_ratio=2
    )
    api.kv_cache_gather(cache, ints(T, dtype=slots))
    api.topk_to_slots(ints(T, topk, dtype=slots), *batch, table, 8 * interleave, 2, *dcp)
    api.sparse_mla_decode(
        *rows,
        cache,
        ints(T, topk),
        ints(T),
        attn_sink if world == 1 else None,
        batch_invariant=batch_invariant,
        **back,
    )
    if index is not None:
        compress_and_index(api, T, index, batch, slots, offset)
        select(api, T, index, batch, topk, blocks, dcp, offset)
    if world > 1:
        outs = shifted((world, T, heads, 512), torch.bfloat16, offset)
        api.merge_attention_states(outs, torch.zeros(world, T, heads), attn_sink)


def compress_and_index(
    api: SimpleNamespace,
    num_tokens: int,
    index_cache_dtype: str,
    batch: tuple[Tensor, Tensor],
    slots: torch.dtype,
    offset: int,
) -> None:
    """A layer with a compressor and an indexer; norm weights as they are loaded, or as f32."""
    kv, key = (shifted((num_tokens, size), torch.float32, offset) for size in (512, 128))
    ring, table = torch.zeros(9, 8, 2, 512), shifted((99, 64), torch.float32, 1)
    cache = dsv41ops.new_index_cache(3, 64, index_cache_dtype)
    numbers = [shifted((size,), slots, 3) for size in (7, num_tokens, num_tokens)]
    for dtype in (torch.bfloat16, torch.float32):
        norm = torch.zeros(512, dtype=dtype)
        api.compress_kv(kv, None, *batch, norm, None, None, 1)
        api.compress_kv(kv, kv, *batch, norm, numbers[0], ring, 2, out_dtype=torch.float32)
        arguments = (norm[:128], numbers[1], table, numbers[2], cache)
        api.indexer_k_insert(key, *arguments)
        api.indexer_k_insert(key.bfloat16(), *arguments, compress_ratio=2)


def select(
    api: SimpleNamespace,
    num_tokens: int,
    index_cache_dtype: str,
    batch: tuple[Tensor, Tensor],
    topk: int,
    blocks: tuple[int, int],
    dcp: tuple[int, int, int],
    offset: int,
) -> None:
    """Indexers over short and long tables: of one that keeps candidates, of one that uses them."""
    count, size = blocks
    page_size = 4 * dcp[2]
    cache = dsv41ops.new_index_cache(3, page_size, index_cache_dtype)
    cache = shifted(tuple(cache.shape), torch.uint8, offset)
    q = shifted((num_tokens, 32, 128), torch.bfloat16, 1)
    weights = shifted((num_tokens, 32), torch.float32, 1)
    rest = dict(zip(("dcp_world_size", "dcp_rank", "cp_interleave"), dcp, strict=True))
    for states in (1, 600, 1500, 4000, 10**4, 10**6):
        table = shifted((7, -(-states // page_size)), torch.int32, 3)
        arguments = (q, weights, cache, *batch, table, topk, 2)
        api.indexer_topk(*arguments, **rest)
        if count:
            candidates = shifted((num_tokens, count), torch.int32, 3)
            api.indexer_topk(
                *arguments, num_candidate_blocks=count, candidate_block_size=size, **rest
            )
            api.indexer_topk(*arguments, candidates, candidate_block_size=size, **rest)
    if dcp[0] > 1:
        for width in (topk, count) if count else (topk,):
            lists = shifted((dcp[0], num_tokens, width), torch.int32, 3)
            api.merge_topk(lists, lists.float(), width)


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "release": {},
    "few_heads": {"heads": 3, "swa": "fp8_ds_mla", "record": "fp8_ds_mla", "topk": 5},
    "all_heads": {"heads": 128, "swa": "bf16", "record": "bf16", "topk": 2048},
    "window_only": {"record": None, "slots": torch.int32},
    "no_sink": {"sink": False, "heads": 32},
    "draft": {"draft": 192},
    "dcp": {"dcp": (4, 3, 2), "heads": 16, "slots": torch.int32},
    "batch_invariant": {"batch_invariant": True},
    "inverse_rope": {"rope": True, "slots": torch.int32},
    "fp8_index": {"index": "fp8"},
    "mxfp4_index": {"index": "mxfp4", "slots": torch.int32, "blocks": (2048, 8)},
    "few_candidates": {"index": "fp8", "topk": 5, "blocks": (7, 3)},
    "dcp_index": {"index": "fp8", "dcp": (4, 3, 2), "blocks": (600, 8)},
    "unaligned": {"offset": 1, "index": "fp8"},
    "unaligned_dcp": {"offset": 1, "dcp": (2, 0, 1), "sink": False},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_variant_of_a_step_is_warm(launches: Launches, name: str) -> None:
    chosen = CONFIGURATIONS[name]
    world, rank, interleave = chosen.get("dcp", (1, 0, 1))
    warm = launches.of(
        lambda: dsv41ops.warmup(
            chosen.get("heads", 64),
            chosen.get("swa", "mxfp8"),
            chosen.get("record", "nvfp4"),
            topk=chosen.get("topk", 512),
            draft_width=chosen.get("draft"),
            attn_sink=chosen.get("sink", True),
            batch_invariant=chosen.get("batch_invariant", False),
            inverse_rope=chosen.get("rope", False),
            index_cache_dtype=chosen.get("index"),
            num_candidate_blocks=chosen.get("blocks", (0, 8))[0],
            candidate_block_size=chosen.get("blocks", (0, 8))[1],
            dcp_world_size=world,
            dcp_rank=rank,
            cp_interleave=interleave,
            unaligned=chosen.get("offset", 0) > 0,
        )
    )
    for num_tokens in (1, 2, 3, 8, 15, 16, 17, 64, 132, 300, 600):
        needed = launches.of(lambda T=num_tokens: step(launches.api, T, **chosen))
        assert needed
        missing = {key[0] for key in needed - warm}
        assert not missing, (num_tokens, missing)


def test_variants_follow_every_step_size() -> None:
    """Split and unsplit are two variants; the number of splits makes none."""
    problems = [DecodeProblem(T, 64, 128, 512, NUM_SMS) for T in range(1, 1025)]
    assert len({decode_config(problem).num_splits for problem in problems}) > 2
    assert {config.num_splits for config in decode_variants(problems)} == {1, 2}


def test_refuses_while_capturing(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="warmup: called while a CUDA graph is captured"):
        dsv41ops.warmup(8)


@pytest.mark.parametrize("named", [True, False])
def test_runs_the_backends_that_serve(
    launches: Launches, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The named one alone; for ``auto`` every one that a step may choose."""
    module = SimpleNamespace(ran=[], variants=lambda problems: [{}])
    module.launch_sparse_mla_decode = lambda *args, **kwargs: module.ran.append(args)
    monkeypatch.setitem(sys.modules, "dsv41ops.kernels.flash_mla.sparse_mla_decode", module)
    monkeypatch.setattr(dispatch, "refusal", lambda backend, device, problem: None)
    times = {64: {8: {"triton": 1.0, "flash_mla": 2.0}, 16: {"triton": 2.0, "flash_mla": 1.0}}}
    monkeypatch.setattr(
        dispatch, "measured_times", lambda capability: {"fp8_ds_mla+fp8_ds_mla": times}
    )
    backend = "flash_mla" if named else "auto"
    keys = launches.of(
        lambda: dsv41ops.warmup(64, "auto", "auto", backend=backend, max_num_tokens=16)
    )
    assert len(module.ran) == 2  # with and without the compressed cache
    assert any(key[0] == "_sparse_mla_decode_kernel" for key in keys) != named


def test_a_backend_that_cannot_serve_is_refused(launches: Launches) -> None:
    with pytest.raises(dsv41ops.UnsupportedError, match="flash_mla: not here"):
        launches.of(lambda: dsv41ops.warmup(64, backend="flash_mla"))
