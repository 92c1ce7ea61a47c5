"""torch.export programs and AOTInductor packages: same process, fresh process, without us."""

from __future__ import annotations

import pytest
import torch

from tests.compile.toy import needs_cxx
from tests.export.conftest import (
    NO_PACKAGE,
    TOKENS,
    InsertAndAttend,
    Saved,
    insert_and_attend_inputs,
)
from tests.export.fresh import run_fresh

# ``python -c REPEAT (steps file)...``: load each file and repeat the recorded steps, for the same
# results and the same bytes in every buffer that the loaded module shows.
REPEAT = """
import sys, torch
import dsv41ops

def load(file):
    if file.endswith("step.pt2"):
        return torch._inductor.aoti_load_package(file)
    return torch.export.load(file).module()

arguments = iter(sys.argv[1:])
for steps, file in zip(arguments, arguments):
    run = load(file)
    for inputs, results, buffers in torch.load(steps):
        with torch.no_grad():
            got = run(*inputs)
        torch.testing.assert_close(got, results, rtol=0, atol=0)
        if isinstance(run, torch.nn.Module):
            mine = dict(run.named_buffers())
            torch.testing.assert_close(mine, buffers, rtol=0, atol=0)
        print("equal")
"""
LOAD_WITHOUT_US = """
import sys, torch
for load, file in zip((torch.export.load, torch._inductor.aoti_load_package), sys.argv[1:]):
    try:
        load(file)
    except RuntimeError as error:
        print(error)
"""


def arguments(*kinds: Saved | None) -> list[str]:
    return [
        str(path) for kind in kinds if kind for file in kind.files for path in (kind.steps, file)
    ]


def test_repeat_in_this_process(
    exported: Saved,
    packaged: Saved | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = arguments(exported, packaged)
    monkeypatch.setattr("sys.argv", ["", *files])
    exec(REPEAT, {})
    assert capsys.readouterr().out.split() == ["equal"] * len(TOKENS) * (len(files) // 2)


@pytest.mark.skipif(NO_PACKAGE is not None, reason=str(NO_PACKAGE))
def test_a_package_is_among_the_files(packaged: Saved | None) -> None:
    assert packaged is not None


def test_repeat_in_a_fresh_process(exported: Saved, packaged: Saved | None) -> None:
    files = arguments(exported, packaged)
    done = run_fresh(REPEAT, *files)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"] * len(TOKENS) * (len(files) // 2)


def test_without_the_package_the_error_says_what_is_missing(
    exported: Saved, packaged: Saved | None
) -> None:
    files = [exported.files[0], *(packaged.files if packaged else [])]
    done = run_fresh(LOAD_WITHOUT_US, *files)
    # torch.export: a vague RuntimeError, and the reason in a warning above it.
    assert "We ran into an error when deserializing the saved file" in done.stdout
    assert "We failed to resolve torch.ops.dsv41.token_to_request.default" in done.stderr
    assert "import the custom op to register it before deserializing" in done.stderr
    if packaged:
        assert "Could not find schema for dsv41::kv_cache_insert" in done.stdout


@needs_cxx
def test_the_packages_steps_depend_on_earlier_inserts() -> None:
    """What the package is compared with would show a lost write."""
    fresh, used = InsertAndAttend(), InsertAndAttend()
    used(*insert_and_attend_inputs(37))
    last = insert_and_attend_inputs(3)
    assert not torch.equal(fresh(*last), used(*last))
