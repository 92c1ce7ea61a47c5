"""SparseMLAAttention in paged, chunked steps against a dense float64 computation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from dsv41ops.nn import SparseMLAAttention
from tests.nn.dense import Dense, best
from tests.nn.layers import (
    KINDS,
    SOURCES,
    LayerOutputs,
    Layers,
    geometry,
    make_step,
    metadata_of,
    mixed_steps,
    new_sequences,
    run_sequence,
)

# bf16 queries and outputs; with bf16 projections every activation between them too.
TOLERANCE = {torch.float32: 4e-3, torch.bfloat16: 1e-2}
LSE_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 3e-2}
SCORE_TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 4e-2}
SELECTING = [kind for kind in KINDS if kind != "window"]


class Run:
    """All layers over one sequence, and the inputs that the dense computation needs."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.module = Layers(dtype).to(device)
        with torch.no_grad():
            self.came = run_sequence(self.module, dtype, device)
        self.x = new_sequences(dtype)[0].x.double()  # [n, layers, hidden]

    def dense(self, kind: str) -> Dense:
        rope = self.module.rope if kind == "window" else self.module.compressed_rope
        return Dense(self.module.layer(kind), rope)

    def input(self, kind: str) -> Tensor:
        return self.x[:, self.module.kinds.index(kind)]

    def states(self, kind: str) -> Tensor:
        return self.came.states[SELECTING.index(kind)]


@pytest.fixture(scope="module")
def runs() -> dict[tuple[torch.dtype, str], Run]:
    return {}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def run(
    request: pytest.FixtureRequest, device: torch.device, runs: dict[tuple[torch.dtype, str], Run]
) -> Run:
    key = (request.param, device.type)
    if key not in runs:
        runs[key] = Run(request.param, device)
    return runs[key]


@pytest.mark.parametrize("kind", KINDS)
def test_output_matches(run: Run, kind: str) -> None:
    number, dense = run.module.kinds.index(kind), run.dense(kind)
    keys = states = None
    if kind != "window":
        source = SOURCES.get(kind, kind)
        owner = run.dense(source)
        keys, states = owner.keys(owner.latents(run.input(source))), run.states(kind)
    expected, lse = dense.attend(run.input(kind), keys, states)
    difference = run.came.out[number].double() - expected
    assert difference.norm() / expected.norm() <= TOLERANCE[run.dtype]
    per_token = difference.norm(dim=1) / expected.norm(dim=1)
    assert per_token.max() <= 2 * TOLERANCE[run.dtype]
    assert (run.came.lse[number].double() - lse).abs().max() <= LSE_TOLERANCE[run.dtype]


@pytest.mark.parametrize("kind", ["c2a source", "c2a selects", "c1a source", "c1a selects"])
def test_selects_the_best_states(run: Run, kind: str) -> None:
    """Also inside candidates: those of the source's own scores, unless two blocks nearly tie."""
    source, slack = SOURCES.get(kind, kind), SCORE_TOLERANCE[run.dtype]
    owner = run.dense(source)
    index_keys = owner.index_keys(owner.latents(run.input(source)))
    scores = run.dense(kind).scores(run.input(kind), index_keys)
    compared = 0
    for position, states in enumerate(run.states(kind)):
        row = scores[position]
        if kind == "c1a selects":
            blocks = owner.scores(run.input(source), index_keys)[position]
            padded = torch.nn.functional.pad(blocks, (0, -len(blocks) % 4), value=-torch.inf)
            blocks = padded.unflatten(0, (-1, 4)).amax(1)
            blocks[position // 4] = torch.inf
            candidates = best(blocks, 2)
            if candidates.worst - candidates.next <= slack:
                continue
            inside = [state // 4 in candidates.states for state in range(len(row))]
            row = row.masked_fill(~torch.tensor(inside), -torch.inf)
        expected = best(row, 5)
        came = states[states >= 0].tolist()
        assert came == sorted(set(came))
        assert len(came) == len(expected.states)
        assert (row[came] >= expected.worst - slack).all()
        if expected.worst - expected.next > slack:
            assert set(came) == expected.states
            compared += len(came) == 5
    assert compared >= 6


def test_nothing_is_copied_between_layers() -> None:
    source, reader = (SparseMLAAttention(geometry(f"c2a {role}")) for role in ("source", "reuse"))
    step = mixed_steps(torch.float32)[0]
    metadata, cache = metadata_of(step), source.compressed_cache
    assert cache is not None
    assert cache.states is source.cache
    assert cache.index_keys is source.index_keys
    _, _, selection = source(step.x[:, 1], metadata)
    assert reader(step.x[:, 2], metadata, cache, selection)[2] is selection


def test_readers_reuse_the_selection() -> None:
    outputs = run_sequence(Layers(), torch.float32, torch.device("cpu"))
    states = dict(zip(SELECTING, outputs.states, strict=True))
    assert torch.equal(states["c2a reuse"], states["c2a source"])
    assert torch.equal(states["c1a reuse"], states["c1a selects"])
    assert not torch.equal(states["c2a reuse"], states["c2a selects"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_is_zero_and_writes_nothing(dtype: torch.dtype) -> None:
    module, (step, *_) = Layers(dtype), mixed_steps(dtype)
    module(*step)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    nobody = step._replace(
        x=torch.full_like(step.x, torch.nan),
        query_start_loc=torch.zeros_like(step.query_start_loc),
        seq_lens=torch.zeros_like(step.seq_lens),
    )
    outputs = module(*nobody)
    assert bool((outputs.lse == -torch.inf).all())
    assert bool((outputs.out == 0).all())
    assert bool((outputs.states == -1).all())
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_rejected_tokens_leave_no_trace() -> None:
    """Two drafts that are rejected, then the right tokens from an earlier position."""
    plain, rolled = Layers(), Layers()
    ours, theirs = new_sequences(torch.float32)[0], new_sequences(torch.float32)[0]
    for count in (7, 1, 3, 1, 2):
        want = plain(*make_step([(ours, count)]))
        if theirs.done:
            drafts = copy.copy(theirs)
            drafts.x = drafts.x.clone()
            drafts.x[drafts.done + 1 :] += 1
            rolled(*make_step([(drafts, 3)]))
        got = rolled(*make_step([(theirs, count)]))
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)


def test_two_modules_share_nothing() -> None:
    one, other = Layers(), Layers()
    pointers = [
        {tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())}
        for module in (one, other)
    ]
    assert not pointers[0] & pointers[1]
    before = {name: buffer.clone() for name, buffer in other.named_buffers()}
    run_sequence(one, torch.float32, torch.device("cpu"))
    for name, buffer in other.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_state_dict_has_the_checkpoint_s_names() -> None:
    everything = {
        *("attn_sink", "wq_a.weight", "q_norm.weight", "wq_b.weight", "wkv.weight"),
        *("kv_norm.weight", "wo_a.weight", "wo_b.weight"),
        *("compressor.wkv.weight", "compressor.wgate.weight", "compressor.norm.weight"),
        *("indexer.wq_b.weight", "indexer.weights_proj.weight"),
        *("indexer.wk.weight", "indexer.k_norm.weight"),
    }
    left_out = {
        "window": ("compressor.", "indexer."),
        "c2a source": (),
        "c2a reuse": ("compressor.", "indexer."),
        "c2a selects": ("compressor.", "indexer.wk.", "indexer.k_norm."),
        "c1a source": ("compressor.wgate.",),
    }
    for kind, prefixes in left_out.items():
        module = SparseMLAAttention(geometry(kind))
        expected = {name for name in everything if not name.startswith(prefixes or ("none",))}
        assert set(module.state_dict()) == expected
        assert set(dict(module.named_parameters())) == expected


def test_dtypes() -> None:
    module = SparseMLAAttention(geometry("c2a source"), torch.bfloat16)
    exact = {name for name, p in module.named_parameters() if p.dtype == torch.float32}
    assert exact == {"attn_sink", "compressor.wkv.weight", "compressor.wgate.weight"}
    assert module.ring.dtype == torch.float32
    assert (module.cache.dtype, module.index_keys.dtype) == (torch.bfloat16, torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_converting_keeps_the_caches(dtype: torch.dtype) -> None:
    """``.to(dtype)`` on someone's whole model: the layer still runs, on the state it had."""
    module = Layers(torch.float32)
    steps = mixed_steps(torch.float32)
    module(*steps[0])
    before = {name: b.clone() for name, b in module.layers.named_buffers()}
    module.layers.to(dtype)
    for name, buffer in module.layers.named_buffers():
        assert buffer.dtype == before[name].dtype
        assert torch.equal(buffer, before[name]), name
    expected = Layers(torch.float32)
    expected(*steps[0])
    want = expected(*steps[1])
    got = module(*steps[1]._replace(x=steps[1].x.to(dtype)))
    assert got.out.dtype == dtype
    relative = (got.out.float() - want.out).norm() / want.out.norm()
    assert relative <= (0 if dtype == torch.float32 else 0.1)


def test_no_tokens() -> None:
    module, (step, *_) = Layers(), mixed_steps(torch.float32)
    outputs = module(
        *step._replace(x=step.x[:0], query_start_loc=torch.zeros_like(step.query_start_loc))
    )
    assert isinstance(outputs, LayerOutputs)
    assert outputs.out.shape == (len(KINDS), 0, step.x.shape[2])
