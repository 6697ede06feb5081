"""Describes values of options in words, without folders and credentials, for the console."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ortserve.config.repository_url import RepositoryUrl


def show_value(value: object) -> str:
    """Describe a value of an option in words. Paths are shortened to their last part, and URLs to their host."""
    if value is None:
        return "unset"
    if isinstance(value, BaseModel):
        plain = _plain(value)
        return json.dumps(plain, ensure_ascii=False) if plain else "default"
    if isinstance(value, (tuple, list, Mapping)):
        return json.dumps(_plain(value), ensure_ascii=False) if value else "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(mode="json", exclude_defaults=True))
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    if isinstance(value, Path):
        return value.name
    if isinstance(value, RepositoryUrl):
        return value.host
    if isinstance(value, str):
        if "://" in value:  # may hold credentials
            return re.split("[/?#]", value.partition("://")[2], maxsplit=1)[0].rpartition("@")[2]
        return Path(value).name if value.startswith("/") else value
    return f"{value:g}" if isinstance(value, float) else value
