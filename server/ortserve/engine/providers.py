"""Execution providers (EPs): which of a model's wishes can be used here, and in what order they are tried.

The list is walked here and not by ONNX Runtime, which takes the next one without a word, or retries on the CPU.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import onnxruntime as ort

from ortserve.config.session import ProviderWish, provider_parts
from ortserve.engine.provider_options import CPU as CPU
from ortserve.engine.provider_options import (
    CUDA,
    GPU_PROVIDERS,
    OPENVINO,
    TENSORRT,
    asks_for_graphs,
    make_provider_options,
    with_threads,
)
from ortserve.engine.runtime import Offer, Runtime, missing_library
from ortserve.errors import invalid_input

_SHORT_NAMES: Final = {"cpu": CPU, "cuda": CUDA, "tensorrt": TENSORRT, "openvino": OPENVINO}


@dataclass(frozen=True, slots=True)
class Provider:
    """One EP.

    Attributes:
        name: In full.
        options: Texts, checked.
        devices: That a plug-in shall use; empty for a built-in EP, which is asked for by its name.
        wants_graphs: Whether its options ask that graphs be replayed.
        follows: Whether the number of its device was not given for it, but is that of another EP ahead of it.
    """

    name: str
    options: dict[str, str] = field(default_factory=dict)
    devices: tuple[ort.OrtEpDevice, ...] = ()
    wants_graphs: bool = False
    follows: bool = False

    @property
    def device_id(self) -> int:
        """Which of the devices of its kind it runs on."""
        return _device_number(self.options)


@dataclass(frozen=True, slots=True)
class ProviderChoice:
    """The EP to use.

    Attributes:
        name: In full.
        passed_over: In words, why each EP ahead of it in the wish list was not taken.
        options: Its options, texts.
        behind: EPs for the nodes that it does not take: the wishes after it that can be used.
        devices: That it shall use, if it is a plug-in.
        wants_graphs: Whether its options ask that graphs be replayed.
    """

    name: str
    passed_over: tuple[str, ...] = ()
    options: dict[str, str] = field(default_factory=dict)
    behind: tuple[Provider, ...] = ()
    devices: tuple[ort.OrtEpDevice, ...] = ()
    wants_graphs: bool = False

    @staticmethod
    def of(first: Provider, behind: Sequence[Provider], passed_over: Sequence[str]) -> "ProviderChoice":
        """The first of those that can be used, with those of GPUs behind it on the device that it is on."""
        first, *behind = _on_one_gpu((first, *behind))
        return ProviderChoice(
            first.name, tuple(passed_over), first.options, tuple(behind), first.devices, first.wants_graphs
        )

    @property
    def device_id(self) -> int:
        """Which of the devices of its kind it runs on."""
        return _device_number(self.options)

    def on_device(self, number: int) -> "ProviderChoice":
        """The same EP on the device of this number among those of its kind, and those of GPUs behind it there, too."""
        told = {"device_id": str(number)}
        behind = (
            replace(other, options={**other.options, **told}, follows=False) if other.name in GPU_PROVIDERS else other
            for other in self.behind
        )
        return replace(self, options={**self.options, **told}, behind=tuple(behind))

    def without_first(self, reason: str) -> "ProviderChoice":
        """The choice once its EP has turned out not to work, for a reason in words. There must be one behind it.

        That one is on the device that was given for it, or the first of its kind, wherever its EP was.
        """
        first, *others = self.behind
        return ProviderChoice.of(first, others, (*self.passed_over, reason))


def choose_provider(wishes: Sequence[ProviderWish], offer: Callable[[str], Offer] | None = None) -> ProviderChoice:
    """Take the first wish that there is here.

    Args:
        wishes: Short or full EP names, best first, with or without options, which are checked for all of them.
        offer: Tells of a full EP name what there is of it; None asks ONNX Runtime.

    Raises:
        ServeError: invalid_input, for an option that is wrong, or another GPU than that of the EP ahead of it, and,
            naming wishes and offer, when none can be used.
    """
    offer = Runtime().offer if offer is None else offer
    wanted: list[Provider] = []
    for wish in wishes:
        name, given = provider_parts(wish)
        name = _SHORT_NAMES.get(name.lower(), name)
        wanted.append(Provider(name, make_provider_options(name, given), wants_graphs=asks_for_graphs(name, given)))
    _check_gpus(wanted)
    usable: list[Provider] = []
    missing: list[str] = []
    for provider in wanted:
        found = offer(provider.name)
        problem = found.problem
        if not problem and found.devices:
            provider = _on_device(provider, found.devices)
            problem = "" if provider.devices else f"has no device {_device_wish(provider)}"
        if problem:
            if not usable:
                missing.append(f"{provider.name} {problem}")
        else:
            usable.append(provider)
    if not usable:
        raise invalid_input(
            f"execution_providers: none of {', '.join(provider_parts(wish)[0] for wish in wishes)} can be used: "
            f"{'; '.join(missing)}; this ONNX Runtime offers {', '.join(_offered())}"
        )
    first, *others = usable
    return ProviderChoice.of(first, others, missing)


def attach_providers(
    native: ort.SessionOptions, choice: ProviderChoice, *, threads: int, has_cpu: bool = True
) -> list[tuple[str, dict[str, str]]] | None:
    """Tell a session its EPs, with the CPU last, for the nodes that nobody takes.

    Args:
        native: What a session with plug-ins is told by; then ``providers`` must be None, or it would win.
        choice: The EP and those behind it.
        threads: For EPs that have threads of their own.
        has_cpu: Whether the CPU may take nodes although nobody wished for it.

    Returns:
        The session's ``providers``.
    """
    chain = {choice.name: Provider(choice.name, choice.options, choice.devices)}
    if choice.name != CPU:  # which takes every node, so that nothing is left for others
        for provider in (*choice.behind, *([Provider(CPU)] if has_cpu else [])):
            chain.setdefault(provider.name, provider)
        if CPU in chain:
            chain[CPU] = chain.pop(CPU)
    told = [replace(one, options=with_threads(one.name, one.options, threads)) for one in chain.values()]
    if not any(provider.devices for provider in told):
        return [(provider.name, provider.options) for provider in told]
    for provider in told:
        if provider.devices:
            own = {key: value for key, value in provider.options.items() if key not in ("device_type", "device_id")}
            native.add_provider_for_devices(list(provider.devices), own)
        elif provider.name != CPU:  # which ONNX Runtime puts last by itself
            native.add_provider(provider.name, provider.options)
    return None


def check_providers(choice: ProviderChoice, used: Sequence[str]) -> None:
    """ONNX Runtime drops an EP that cannot start with no more than a warning; here that is an error.

    Raises:
        ServeError: invalid_input, when the session does not use the chosen EP.
    """
    if choice.name not in used:
        raise invalid_input(
            f"execution_providers: {choice.name} was chosen, but ONNX Runtime could not start it and uses "
            f"{', '.join(used)}{missing_library(choice.name)}"
        )


def _check_gpus(wanted: Sequence[Provider]) -> None:
    """Whichever of them can be used here: what holds on this machine shall hold on the next."""
    on_gpus = [provider for provider in wanted if provider.name in GPU_PROVIDERS]
    for position, leader in enumerate(on_gpus):
        names = {leader.name}  # of which a session has each once: the same one again is for ``allow_fallback``
        for other in on_gpus[position + 1 :]:
            is_elsewhere = "device_id" in other.options and other.device_id != leader.device_id
            if is_elsewhere and other.name not in names:
                raise invalid_input(
                    f"execution_providers: {other.name}: device_id: expected {leader.device_id}, the GPU of "
                    f"{leader.name} ahead of it, got {other.device_id}"
                )
            names.add(other.name)


def _on_one_gpu(providers: Sequence[Provider]) -> list[Provider]:
    """The EPs of one session: those of GPUs that were given no device are on that of the first of them.

    What one EP computes the next one reads: it must not lie on another GPU. A plug-in stays on the device that it was
    given when it was chosen.
    """
    own = [_without_followed(provider) for provider in providers]
    leader = next((provider for provider in own if provider.name in GPU_PROVIDERS), None)
    if leader is None or "device_id" not in leader.options:
        return own
    told = {"device_id": leader.options["device_id"]}
    return [
        replace(provider, options={**provider.options, **told}, follows=True)
        if provider.name in GPU_PROVIDERS and "device_id" not in provider.options and not provider.devices
        else provider
        for provider in own
    ]


def _without_followed(provider: Provider) -> Provider:
    if not provider.follows:
        return provider
    options = {key: value for key, value in provider.options.items() if key != "device_id"}
    return replace(provider, options=options, follows=False)


def _on_device(provider: Provider, devices: Sequence[ort.OrtEpDevice]) -> Provider:
    """On one device: of the wished type, else of that of the first, and of these the one of the wished number."""
    wished = provider.options.get("device_type") or devices[0].device.type.name
    alike = [device for device in devices if device.device.type.name == wished]
    number = _device_number(provider.options)
    return replace(provider, devices=tuple(alike[number : number + 1]))


def _device_number(options: Mapping[str, str]) -> int:
    text = options.get("device_id", "0")
    return int(text) if text.isdecimal() else 0  # of an EP whose options are not known here


def _device_wish(provider: Provider) -> str:
    return f"{provider.options.get('device_type', '')} {provider.options.get('device_id', '0')}".strip()


def _offered() -> list[str]:
    names = [*ort.get_available_providers(), *(device.ep_name for device in ort.get_ep_devices())]
    return list(dict.fromkeys(names))
