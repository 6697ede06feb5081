"""Execution providers (EPs): short names, what this ONNX Runtime offers, and which of a wish list can be used."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import onnxruntime as ort

from ortserve.errors import invalid_input

CPU: Final = "CPUExecutionProvider"

_SHORT_NAMES: Final = {
    "cpu": CPU,
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
}


@dataclass(frozen=True, slots=True)
class ProviderChoice:
    """The EP to use, and in words why each EP ahead of it in the wish list was passed over."""

    name: str
    passed_over: tuple[str, ...] = ()


def choose_provider(wishes: Sequence[str], offered: Sequence[str] | None = None) -> ProviderChoice:
    """Take the first wish that the installed ONNX Runtime offers.

    Args:
        wishes: Short or full EP names, best first.
        offered: Full EP names; None asks ONNX Runtime.

    Raises:
        ServeError: invalid_input, naming wishes and offer, when none of them can be used.
    """
    offered = ort.get_available_providers() if offered is None else offered
    passed_over: list[str] = []
    for wish in wishes:
        name = _SHORT_NAMES.get(wish.lower(), wish)
        if name in offered:
            return ProviderChoice(name, tuple(passed_over))
        passed_over.append(f"{name} is not offered by this ONNX Runtime")
    raise invalid_input(
        f"execution_providers: none of {', '.join(wishes)} can be used; this ONNX Runtime offers {', '.join(offered)}"
    )


def session_providers(choice: ProviderChoice) -> list[str]:
    """What to hand to ONNX Runtime: the chosen EP, and the CPU for the nodes it does not take."""
    return [choice.name] if choice.name == CPU else [choice.name, CPU]


def check_providers(choice: ProviderChoice, used: Sequence[str]) -> None:
    """ONNX Runtime drops an EP that cannot start with no more than a warning; here that is an error.

    Raises:
        ServeError: invalid_input, when the session does not use the chosen EP.
    """
    if choice.name not in used:
        raise invalid_input(
            f"execution_providers: {choice.name} was chosen, but ONNX Runtime could not start it and uses "
            f"{', '.join(used)}"
        )
