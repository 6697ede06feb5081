"""Execution providers (EPs): short names, what this ONNX Runtime offers, and which of a wish list can be used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import onnxruntime as ort

from ortserve.config.session import ProviderWish, provider_parts
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
    """The EP to use.

    Attributes:
        name: In full.
        passed_over: In words, why each EP ahead of it in the wish list was not taken.
        options: Its options, texts.
        behind: EPs for the nodes that it does not take, each with its options: the wishes after it that are offered.
    """

    name: str
    passed_over: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    behind: tuple[tuple[str, Mapping[str, str]], ...] = ()

    @property
    def device_id(self) -> int:
        """Which of the devices of its kind it runs on."""
        text = self.options.get("device_id", "0")
        return int(text) if text.isdecimal() else 0  # else it is up to the EP to refuse it


def choose_provider(wishes: Sequence[ProviderWish], offered: Sequence[str] | None = None) -> ProviderChoice:
    """Take the first wish that the installed ONNX Runtime offers.

    Args:
        wishes: Short or full EP names, best first, with or without options.
        offered: Full EP names; None asks ONNX Runtime.

    Raises:
        ServeError: invalid_input, naming wishes and offer, when none of them can be used.
    """
    offered = ort.get_available_providers() if offered is None else offered
    passed_over: list[str] = []
    named = [provider_parts(wish) for wish in wishes]
    wanted = [(_SHORT_NAMES.get(name.lower(), name), options) for name, options in named]
    for index, (name, options) in enumerate(wanted):
        if name in offered:
            behind = tuple((other, of_other) for other, of_other in wanted[index + 1 :] if other in offered)
            return ProviderChoice(name, tuple(passed_over), options, behind)
        passed_over.append(f"{name} is not offered by this ONNX Runtime")
    raise invalid_input(
        f"execution_providers: none of {', '.join(name for name, _ in named)} can be used; "
        f"this ONNX Runtime offers {', '.join(offered)}"
    )


def session_providers(choice: ProviderChoice) -> list[tuple[str, dict[str, str]]]:
    """What to hand to ONNX Runtime: the chosen EP, those behind it, and last the CPU, for nodes that nobody takes."""
    providers = {choice.name: dict(choice.options)}
    if choice.name != CPU:  # which takes every node, so that nothing is left for others
        for name, options in (*choice.behind, (CPU, {})):
            providers.setdefault(name, dict(options))
        providers[CPU] = providers.pop(CPU)
    return list(providers.items())


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
