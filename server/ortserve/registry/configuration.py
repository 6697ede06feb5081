"""The configuration of a model, whichever of the two files it is said in."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ortserve._pb.model_config_pb2 import ModelConfig
from ortserve.codecs.model_config import parse_config_text
from ortserve.config.model import LoadOptions, ModelOptions, load_model_options
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.config_pbtxt import translate_config

OPTIONS_FILE: Final = "model.yaml"
TRITON_OPTIONS_FILE: Final = "config.pbtxt"


@dataclass(frozen=True, slots=True)
class Configuration:
    """What holds for a model.

    Attributes:
        options: Of the model, the same whichever file said it.
        declared: The fields of its ``config.pbtxt``, for those who ask to see it; empty where there is none.
        without_effect: For each field that has no effect here, its path and why.
    """

    options: ModelOptions
    declared: ModelConfig = field(default_factory=ModelConfig)
    without_effect: tuple[str, ...] = ()


def read_configuration(name: str, path: Path | None, defaults: LoadOptions) -> Configuration:
    """Read the file that configures a model. Blocks on it.

    Args:
        name: Of the model.
        path: A ``model.yaml`` or ``config.pbtxt``; None for a model without either.
        defaults: What holds for what the file does not say.

    Raises:
        ServeError: invalid_input or unsupported, beginning with the file's name, never its folder.
    """
    if path is None or path.name != TRITON_OPTIONS_FILE:
        return Configuration(load_model_options(path, defaults))
    try:
        config = parse_config_text(path.read_bytes())
    except OSError as error:
        raise invalid_input(f"{path.name}: cannot be read: {error.strerror}") from None
    except ServeError as error:
        raise ServeError(error.kind, f"{path.name}: {error.message}") from None
    return configure(name, config, defaults, path.name)


def configure(name: str, config: ModelConfig, defaults: LoadOptions, source: str) -> Configuration:
    """Make the configuration of a model of a message that is already there.

    Raises:
        ServeError: invalid_input or unsupported, beginning with ``source``.
    """
    translation = translate_config(config, name, defaults, source)
    return Configuration(translation.options, config, translation.without_effect)
