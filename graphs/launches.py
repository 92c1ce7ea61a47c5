"""``python -m graphs.decode --launches``: what each layer of a step launches.

Without a GPU the step is traced, and each operator of the graph that is not a view counts as one
launch; on CUDA the eager step is profiled, and kernels, copies and fills are counted. Compiled
steps launch less: inductor fuses what lies between our ops.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import nn

from dsv41ops.nn import AttentionGeometry

STEP = "step"  # what belongs to no layer
OURS = re.compile(r"dsv41(?:\.|::)(\w+)")
OTHER = "other"
LAYER = re.compile(r"layers\.(\d+)")
Launches = dict[str, Counter[str]]  # layer, or STEP -> our op, or OTHER -> launches


def show_launches(title: str, model: nn.Module, inputs: Any, device: torch.device) -> None:
    """Count and print those of one step.

    Args:
        title: Printed above the table.
        model: Has its layers, each with an ``attn``, in ``layers``.
        inputs: Of one step, padding or not.
        device: CUDA, or the CPU: then the model and inputs may be on the meta device.
    """
    count = count_profiled if device.type == "cuda" else count_traced
    print(f"\n{title}")
    print_table(table_of(count(model, inputs), model))


def count_traced(model: nn.Module, inputs: Any) -> Launches:
    """By the traced graph; parameters and inputs may be on the meta device."""
    program = torch.export.export(model, (inputs,), strict=False)
    found: Launches = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        *_, innermost = node.meta["nn_module_stack"].values()
        count = found.setdefault(layer_of(innermost[0]), Counter())
        if match := OURS.match(str(node.target)):
            count[match[1]] += 1
        elif is_launch(node):
            count[OTHER] += 1
    return found


def layer_of(path: str) -> str:
    """``layers.3.attn.indexer`` is a part of layer 3."""
    match = LAYER.match(path)
    return match[1] if match else STEP


def is_launch(node: torch.fx.Node) -> bool:
    """Does an operator make a new tensor? A conversion does if it changes the dtype."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False  # getitem
    if target._schema.name == "aten::to":
        before = cast(torch.fx.Node, node.args[0])
        return bool(before.meta["val"].dtype != node.meta["val"].dtype)
    aliases = [result.alias_info for result in target._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return bool(aliases) and not is_view


def count_profiled(model: nn.Module, inputs: Any) -> Launches:
    """By the profiler, of one eager step on CUDA whose kernels are warm."""
    from torch.profiler import ProfilerActivity, profile

    model(inputs)
    torch.cuda.synchronize()
    with ExitStack() as stack:
        for name, layer in layers_of(model):
            for handle in mark(name, layer):
                stack.callback(handle.remove)
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        profiler = stack.enter_context(profile(activities=activities))
        model(inputs)
        torch.cuda.synchronize()
    return count_events(profiler.events() or ())


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [pair for pair in model.named_modules() if LAYER.fullmatch(pair[0])]


def mark(name: str, layer: nn.Module) -> list[Any]:
    """Hooks that put a layer's forward inside a profiler range of its name."""
    ranges: list[Any] = []

    def enter(module: nn.Module, args: object) -> None:
        ranges.append(torch.profiler.record_function(name))
        ranges[-1].__enter__()

    def leave(module: nn.Module, args: object, output: object) -> None:
        ranges.pop().__exit__(None, None, None)

    return [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]


def count_events(events: Iterable[Any]) -> Launches:
    """Launches of profiler events, by the ranges and ops around them."""
    found: Launches = {}
    for event in events:
        if not event.kernels:
            continue
        layer, op, around = STEP, OTHER, event
        while around is not None:
            if match := OURS.match(around.name):
                op = match[1]
            if LAYER.fullmatch(around.name):
                layer = layer_of(around.name)
            around = around.cpu_parent
        found.setdefault(layer, Counter())[op] += len(event.kernels)
    return found


def table_of(found: Launches, model: nn.Module) -> list[tuple[str, ...]]:
    """A row per layer, what is outside of them first, their sum last."""
    rows: list[tuple[str, ...]] = [("layer", "kind", "dsv41 ops", "dsv41", OTHER)]
    for layer in sorted(found, key=lambda layer: -1 if layer == STEP else int(layer)):
        kind = ""
        if layer != STEP:
            attn: Any = model.get_submodule(f"layers.{layer}.attn")
            kind = kind_of(attn.geometry)
        rows.append((layer, kind, *cells(found[layer])))
    total: Counter[str] = sum(found.values(), Counter())
    return [*rows, ("all", "", "", *cells(total)[1:])]


def kind_of(geometry: AttentionGeometry) -> str:
    if geometry.compress_ratio == 0:
        return "window"
    kind = f"ratio {geometry.compress_ratio}"
    if geometry.is_kv_source:
        return f"{kind}, kv source"
    return f"{kind}, index source" if geometry.is_index_source else kind


def cells(count: Counter[str]) -> tuple[str, str, str]:
    """Our ops by name, their launches, and the other launches."""
    ours = {op: number for op, number in count.items() if op != OTHER}
    names = [op if number == 1 else f"{op} ×{number}" for op, number in ours.items()]
    return ", ".join(names), str(sum(ours.values())), str(count[OTHER])


def print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = [
            cell.rjust(width) if number > 2 else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(padded).rstrip())
