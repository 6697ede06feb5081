"""Execution providers (EPs): which EPs of a model's wish list are available, and in what order they are tried.

This module chooses from the list itself, because ONNX Runtime would silently use the next EP, or retry on the CPU.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import onnxruntime as ort

from ortserve.config.declaration import did_you_mean
from ortserve.config.session import ProviderWish, provider_parts
from ortserve.engine.provider_options import (
    CPU,
    CUDA,
    GPU_PROVIDERS,
    OPENVINO,
    TENSORRT,
    asks_for_graphs,
    make_provider_options,
    with_threads,
)
from ortserve.engine.runtime import Offer, Runtime, missing_library, plugin_names
from ortserve.errors import invalid_input

_SHORT_NAMES: Final = {"cpu": CPU, "cuda": CUDA, "tensorrt": TENSORRT, "openvino": OPENVINO}
_EXPECTED_NAMES: Final = f"{', '.join(_SHORT_NAMES)} or a full name"
_GPU_HINT: Final = "; for NVIDIA GPUs: pip uninstall onnxruntime && pip install 'ortserve[gpu]'"
"""Both packages install into the same folder."""


@dataclass(frozen=True, slots=True)
class Provider:
    """One EP.

    Attributes:
        name: The full name.
        options: The checked options.
        devices: The devices of a plug-in; empty for a built-in EP, which sessions select by name.
        wants_graphs: Whether the options request graph replay.
        follows: Whether the device number was taken over from an EP ahead in the list, because none was configured.
    """

    name: str
    options: dict[str, str] = field(default_factory=dict)
    devices: tuple[ort.OrtEpDevice, ...] = ()
    wants_graphs: bool = False
    follows: bool = False

    @property
    def device_id(self) -> int:
        """The number of the EP's device among the devices of its kind."""
        return _device_number(self.options)


@dataclass(frozen=True, slots=True)
class ProviderChoice(Provider):
    """The EP to use.

    Attributes:
        passed_over: The reason why each EP ahead of it in the wish list was not chosen.
        behind: The available EPs after it in the wish list, for the nodes that it does not run.
    """

    passed_over: tuple[str, ...] = ()
    behind: tuple[Provider, ...] = ()

    @staticmethod
    def of(first: Provider, behind: Sequence[Provider], passed_over: Sequence[str]) -> "ProviderChoice":
        """The choice of the first available EP, with GPU EPs behind it on the same device."""
        first, *behind = _on_one_gpu((first, *behind))
        return ProviderChoice(
            first.name,
            first.options,
            first.devices,
            first.wants_graphs,
            passed_over=tuple(passed_over),
            behind=tuple(behind),
        )

    def on_device(self, number: int) -> "ProviderChoice":
        """The same choice on another device, for the EP and the GPU EPs behind it."""
        placed = {"device_id": str(number)}
        behind = (
            replace(other, options={**other.options, **placed}, follows=False) if other.name in GPU_PROVIDERS else other
            for other in self.behind
        )
        return replace(self, options={**self.options, **placed}, behind=tuple(behind))

    def without_first(self, reason: str) -> "ProviderChoice":
        """The choice of the next EP, after the chosen EP failed for ``reason``. ``behind`` must not be empty.

        The next EP uses its own configured device, or the first of its kind.
        """
        first, *others = self.behind
        return ProviderChoice.of(first, others, (*self.passed_over, reason))


def choose_provider(wishes: Sequence[ProviderWish], offer: Callable[[str], Offer] | None = None) -> ProviderChoice:
    """Choose the first available EP of a wish list.

    Args:
        wishes: Short or full EP names, best first, with or without options. The options of all wishes are checked.
        offer: Returns the availability of an EP by its full name; None queries ONNX Runtime.

    Raises:
        ServeError: invalid_input: an option is wrong, GPU EPs of one session have different GPUs, or no EP is
            available.
    """
    offer = Runtime().offer if offer is None else offer
    wanted: list[Provider] = []
    for wish in wishes:
        name, given = full_name(wish), provider_parts(wish)[1]
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
                hint = "" if _is_known(provider.name) else f" (expected {_EXPECTED_NAMES})"
                missing.append(f"{provider.name} {problem}{hint}")
        else:
            usable.append(provider)
    if not usable:
        names = ", ".join(provider_parts(wish)[0] for wish in wishes)
        offered = _offered()
        wants_gpu = CUDA not in offered and any(one.name in (CUDA, TENSORRT) for one in wanted)
        raise invalid_input(
            f"execution_providers (instance_group.kind in a config.pbtxt): none of {names} can be used: "
            f"{'; '.join(missing)}; this ONNX Runtime offers {', '.join(offered)}{_GPU_HINT if wants_gpu else ''}"
        )
    first, *others = usable
    return ProviderChoice.of(first, others, missing)


def check_names(wishes: Sequence[ProviderWish], option: str) -> None:
    """Check that ONNX Runtime, an installed package or a registered plug-in knows each EP, even if unavailable here.

    Raises:
        ServeError: invalid_input: an EP is unknown; the message has the first unknown name.
    """
    for name in map(full_name, wishes):
        if not _is_known(name):
            known = [*_SHORT_NAMES, *sorted(_known_names())]
            raise invalid_input(
                f"{option}: expected {_EXPECTED_NAMES} such as {', '.join(_offered())}, "
                f"got '{name}'{did_you_mean(name, known)}"
            )


def _known_names() -> set[str]:
    return {*ort.get_all_providers(), *_offered()}


def _is_known(name: str) -> bool:
    known = _known_names()
    # A plug-in may have several EPs, such as OpenVINOExecutionProvider.AUTO.
    return name in known or name.partition(".")[0] in {*known, *plugin_names()}


def full_name(wish: ProviderWish) -> str:
    """The full name of a wish: ``CPUExecutionProvider`` for ``cpu``."""
    name, _ = provider_parts(wish)
    return _SHORT_NAMES.get(name, name)


def unused_gpu_providers(wishes: Sequence[ProviderWish]) -> list[str]:
    """The EPs of GPUs that this ONNX Runtime offers, if the wishes name only the CPU; empty otherwise."""
    if any(full_name(wish) != CPU for wish in wishes):
        return []
    return [name for name in ort.get_available_providers() if name in GPU_PROVIDERS]


def attach_providers(
    native: ort.SessionOptions, choice: ProviderChoice, *, threads: int, has_cpu: bool
) -> list[tuple[str, dict[str, str]]] | None:
    """Set the EPs of a session, with the CPU last for all other nodes.

    Args:
        native: The session's options. With plug-ins, all EPs are added here.
        choice: The EP and the EPs behind it.
        threads: Number of threads of a run, for EPs with their own threads.
        has_cpu: Whether the CPU may run nodes although it is not configured.

    Returns:
        The session's argument ``providers``; None with plug-ins, because the argument would override ``native``.
    """
    chain: dict[str, Provider] = {choice.name: choice}
    if choice.name != CPU:  # the CPU runs every node and leaves none to other EPs
        for provider in (*choice.behind, *([Provider(CPU)] if has_cpu else [])):
            chain.setdefault(provider.name, provider)
        if CPU in chain:
            chain[CPU] = chain.pop(CPU)
    attached = [replace(one, options=with_threads(one.name, one.options, threads)) for one in chain.values()]
    if not any(provider.devices for provider in attached):
        return [(provider.name, provider.options) for provider in attached]
    for provider in attached:
        if provider.devices:
            own = {key: value for key, value in provider.options.items() if key not in ("device_type", "device_id")}
            native.add_provider_for_devices(list(provider.devices), own)
        elif provider.name != CPU:  # ONNX Runtime itself appends the CPU
            native.add_provider(provider.name, provider.options)
    return None


def check_providers(choice: ProviderChoice, used: Sequence[str]) -> None:
    """Check that the session uses the chosen EP. ONNX Runtime only warns about an EP that cannot start.

    Raises:
        ServeError: invalid_input: the session does not use the chosen EP.
    """
    if choice.name not in used:
        raise invalid_input(
            f"execution_providers: {choice.name} was chosen, but ONNX Runtime could not start it and uses "
            f"{', '.join(used)}{missing_library(choice.name)}"
        )


def _check_gpus(wanted: Sequence[Provider]) -> None:
    """Check that GPU EPs of one session are on one GPU.

    Unavailable EPs are checked, too, so that a configuration is valid on all machines or on none.
    """
    on_gpus = [provider for provider in wanted if provider.name in GPU_PROVIDERS]
    for position, leader in enumerate(on_gpus):
        names = {leader.name}  # a session uses each EP once; a repeated EP is a fallback on its own device
        for other in on_gpus[position + 1 :]:
            is_elsewhere = "device_id" in other.options and other.device_id != leader.device_id
            if is_elsewhere and other.name not in names:
                raise invalid_input(
                    f"execution_providers: {other.name}: device_id: expected {leader.device_id}, the GPU of "
                    f"{leader.name} before it, got {other.device_id}"
                )
            names.add(other.name)


def _on_one_gpu(providers: Sequence[Provider]) -> list[Provider]:
    """Put GPU EPs without a configured device on the device of the session's first GPU EP.

    EPs of a session read each other's results, which must be on one GPU. A plug-in keeps its chosen device.
    """
    own = [_without_followed(provider) for provider in providers]
    leader = next((provider for provider in own if provider.name in GPU_PROVIDERS), None)
    if leader is None or "device_id" not in leader.options:
        return own
    followed = {"device_id": leader.options["device_id"]}
    return [
        replace(provider, options={**provider.options, **followed}, follows=True)
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
    """The EP on one device: of the configured type, or else the first device's type, with the configured number."""
    wished = provider.options.get("device_type") or devices[0].device.type.name
    alike = [device for device in devices if device.device.type.name == wished]
    number = _device_number(provider.options)
    return replace(provider, devices=tuple(alike[number : number + 1]))


def _device_number(options: Mapping[str, str]) -> int:
    text = options.get("device_id", "0")
    return int(text) if text.isdecimal() else 0  # an EP with unknown options


def _device_wish(provider: Provider) -> str:
    return f"{provider.options.get('device_type', '')} {provider.options.get('device_id', '0')}".strip()


def _offered() -> list[str]:
    names = [*ort.get_available_providers(), *(device.ep_name for device in ort.get_ep_devices())]
    return list(dict.fromkeys(names))
