"""The ``parameters`` of a ``config.pbtxt``, as Triton's ONNX Runtime backend reads them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ortserve.errors import invalid_input

_ARENA_STRATEGIES: Final = {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"}
_ALGORITHM_SEARCHES: Final = {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"}
_MOST_DIGITS: Final = 20
"""Of 64 bits. int() refuses 4,301, in words that are not for who wrote them."""
_ENTRY_PREFIXES: Final = ("session.", "optimization.", "ep.")


@dataclass(slots=True)
class Parameters:
    """What they say.

    Attributes:
        options: Keys of the model's options.
        session: Keys of its session settings.
        cuda: Options of the CUDA execution provider, by its own names.
        without_effect: For each that is not known, its name and why it does nothing.
    """

    options: dict[str, Any] = field(default_factory=dict)
    session: dict[str, Any] = field(default_factory=lambda: {"entries": {}})
    cuda: dict[str, str] = field(default_factory=dict)
    without_effect: list[str] = field(default_factory=list)


def read_parameters(given: Mapping[str, str]) -> Parameters:
    """Read the parameters of a model.

    Raises:
        ServeError: invalid_input, naming a parameter, what was expected and what came.
    """
    read = Parameters()
    for key, value in given.items():
        match key:
            case "intra_op_thread_count":
                read.options |= _threads("intra_op_threads", key, value)
            case "inter_op_thread_count":
                read.session |= _threads("inter_op_threads", key, value)
            case "execution_mode":
                read.session["execution_mode"] = _choice(key, value, {"0": "sequential", "1": "parallel"})
            case "enable_mem_arena":
                read.session["memory_arena"] = parse_bool(key, value)
            case "enable_mem_pattern":
                read.session["memory_pattern"] = parse_bool(key, value)
            case "memory.enable_memory_arena_shrinkage":
                read.session["shrink_arenas"] = [arena.strip() for arena in value.split(";") if arena.strip()]
            case "cudnn_conv_algo_search":
                read.cuda[key] = _choice(key, value, _ALGORITHM_SEARCHES)
            case "arena_extend_strategy":
                read.cuda[key] = _choice(key, value, _ARENA_STRATEGIES)
            case "gpu_mem_limit":
                read.cuda[key] = str(_integer(key, value))
            case "do_copy_in_default_stream":
                read.cuda[key] = str(int(parse_bool(key, value)))
            case _ if key.startswith(_ENTRY_PREFIXES):
                read.session["entries"][key] = value
            case _:
                read.without_effect.append(f"parameters['{key}']: it means nothing to this server")
    return read


def parse_bool(key: str, text: str) -> bool:
    """A truth value as the backend spells it: 1, true, 0, false.

    Raises:
        ServeError: invalid_input.
    """
    is_on: bool = _choice(key, text.lower(), {"1": True, "true": True, "0": False, "false": False})
    return is_on


def _threads(name: str, key: str, text: str) -> dict[str, int]:
    count = _integer(key, text)
    return {name: count} if count else {}  # 0 leaves it to the server


def _integer(key: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise invalid_input(f"parameters['{key}']: expected an unsigned integer, got '{text}'")
    return int(text)


def _choice(key: str, text: str, choices: Mapping[str, Any]) -> Any:
    if text not in choices:
        raise invalid_input(f"parameters['{key}']: expected one of {', '.join(choices)}, got '{text}'")
    return choices[text]
