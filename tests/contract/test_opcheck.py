"""torch's own checks of every registration, over every argument set."""

from __future__ import annotations

import pytest
import torch

from tests.contract.inputs import OPS, argument_sets, overload, schema_order

# A twin shares its functional form's check and reference; its own part is the buffers.
TWIN_SETS = {"T0", "T1", "T17", "strided", "replay_start", "all", "dcp_slot_mapping"}
SETS = [
    (op, name)
    for op in OPS
    for name in argument_sets(op)
    if not op.endswith("_out") or name in TWIN_SETS
]


@pytest.mark.parametrize(("op", "name"), SETS)
def test_opcheck(op: str, name: str, device: torch.device) -> None:
    positional, keywords = schema_order(op, argument_sets(op)[name](device))
    results = torch.library.opcheck(overload(op), positional, keywords)
    assert results == dict.fromkeys(
        (
            "test_schema",
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        ),
        "SUCCESS",
    )
