"""The pages in docs/ops: one per op, complete, and every example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.contract.inputs import OPS, overload, written

PAGES = Path(__file__).parents[2] / "docs" / "ops"
FUNCTIONAL = [op for op in OPS if not op.endswith("_out")]


def page(op: str) -> str:
    return (PAGES / f"{op}.md").read_text()


def test_one_page_per_op_and_an_index() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {*FUNCTIONAL, "README"}
    index = (PAGES / "README.md").read_text()
    for op in FUNCTIONAL:
        assert f"({op}.md)" in index, op


@pytest.mark.parametrize("op", FUNCTIONAL)
def test_page_names_every_argument(op: str) -> None:
    text = page(op)
    names = [argument.name for argument in overload(op)._schema.arguments]
    if f"{op}_out" in OPS:
        assert f"{op}_out(" in text
        names += written(f"{op}_out")
    for name in names:
        assert re.search(rf"^\|.*`{name}`", text, re.MULTILINE), name
    for row in ("| errors |", "| CPU |", "| CUDA |", "| CUDA-graph safe |", "| exportable |"):
        assert row in text, row


@pytest.mark.parametrize("op", FUNCTIONAL)
def test_example_runs(op: str) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", page(op), re.DOTALL)
    assert f"dsv41ops.{op}(" in example
    assert "assert" in example
    exec(compile(example, str(PAGES / f"{op}.md"), "exec"), {})


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.md")), ids=lambda path: path.stem)
def test_links_resolve(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([\w./]+)(?:#([\w-]+))?\)", path.read_text()):
        linked = path.parent / target
        assert linked.is_file(), target
        headings = re.findall(r"^#+ (.*)", linked.read_text(), re.MULTILINE)
        slugs = [heading.lower().replace(" ", "-") for heading in headings]
        assert not anchor or anchor in slugs, anchor
