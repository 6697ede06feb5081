"""Where each of the server's options was set, for the console."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortserve.config.options import CONFIG_VARIABLE, ServerOptions, flag_name, variable_name
from ortserve.config.yaml_file import read_yaml


def option_origins(flags: Mapping[str, Any], config_path: Path | None = None) -> dict[str, str]:
    """The flag, the variable or the file that sets an option, by option; options with their default are missing.

    Reads ``os.environ`` and the file as ``read_options`` does, which has accepted both.

    Raises:
        ValueError: The file cannot be read any more.
    """
    config_path = config_path or (Path(named) if (named := os.environ.get(CONFIG_VARIABLE)) else None)
    in_file = read_yaml(config_path) if config_path else {}
    origins: dict[str, str] = {}
    for name in ServerOptions.model_fields:
        if name in flags:
            origins[name] = flag_name(name) if name != "repositories" else "command line"
        elif os.environ.get(variable_name(name)):
            origins[name] = variable_name(name)
        elif name in in_file:
            assert config_path is not None
            origins[name] = config_path.name
    return origins
