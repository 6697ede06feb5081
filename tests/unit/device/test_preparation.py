"""Reasons against capturing a graph that are known before a trial."""

import pytest

from ortserve.config.session import SessionSettings
from ortserve.device.preparation import NoReplay, why_no_replay

CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"


@pytest.mark.parametrize(
    ("operators", "settings", "reason", "detail"),
    [
        ({CUDA: {"MatMul", "Relu"}}, SessionSettings(), "", ""),
        (
            {CUDA: {"MatMul"}, CPU: {"Unique"}},
            SessionSettings(),
            "other_provider",
            f"not all of it is on {CUDA}: {CPU} runs Unique",
        ),
        ({CUDA: {"MatMul", "Reshape"}, CPU: {"Shape", "Gather", "Concat"}}, SessionSettings(), "", ""),
        (
            {CUDA: {"MatMul"}, CPU: {"Shape"}, "Other": {"Relu"}},
            SessionSettings(),
            "other_provider",
            f"not all of it is on {CUDA}: {CPU} runs Shape; Other runs Relu",
        ),
        (
            {CUDA: {"MatMul", "Loop"}},
            SessionSettings(),
            "control_flow",
            "which nodes run is decided during the run, by Loop",
        ),
        (
            {CUDA: {"MatMul"}, CPU: {"If", "Scan"}},
            SessionSettings(),
            "control_flow",
            "which nodes run is decided during the run, by If, Scan",
        ),
        (
            {CUDA: {"MatMul"}},
            SessionSettings(shrink_arenas=("gpu:0",)),
            "shrinks_arena",
            "session.shrink_arenas releases memory that captured graphs still use",
        ),
        ({CUDA: {"MatMul"}}, SessionSettings(shrink_arenas=("cpu:0",)), "", ""),
    ],
)
def test_model_is_captured_or_has_a_reason(
    operators: dict[str, set[str]], settings: SessionSettings, reason: str, detail: str
) -> None:
    found = why_no_replay(CUDA, {name: frozenset(kinds) for name, kinds in operators.items()}, settings)
    assert found == (NoReplay(reason, detail) if reason else None)
