"""Reads a YAML file of options: ``model.yaml``, or the file that ``--config`` names.

YAML allows more than options need. Tags, recursive values and duplicate keys are rejected with their line, and dates
become texts. So the result holds only JSON's types and has a bounded size.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import yaml

from ortserve.paths import read_file

MAX_LEVELS: Final = 64
"""Maximum nesting of mappings and lists; options need at most seven levels."""
_MAX_VALUES: Final = 100_000
"""Maximum number of values. An anchored value counts at each use, because a few hundred bytes of anchors can expand to
any number of values."""
_MAX_NUMBER_LENGTH: Final = 64
"""Maximum number of characters of a number. Python cannot convert integers of more than 4,300 digits to text."""

_MERGE: Final = "tag:yaml.org,2002:merge"
_TEXT: Final = "tag:yaml.org,2002:str"
_TIMESTAMP: Final = "tag:yaml.org,2002:timestamp"
_NOTHING: Final = "tag:yaml.org,2002:null"
_NUMBERS: Final = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def read_yaml(path: Path, read: Callable[[Path], bytes] = read_file) -> dict[str, object]:
    """Read a mapping from a file; an empty file is an empty mapping. Keys and dates are texts, as written.

    ``read`` reads the content of the file. Unless it is given, only a regular file is read.

    Raises:
        ValueError: The file is unreadable or invalid. The message names the problem and the line, never the path.
    """
    try:
        loader = yaml.SafeLoader(read(path))
        try:
            root = loader.get_single_node()
            if root is None or root.tag == _NOTHING:
                return {}
            if not isinstance(root, yaml.MappingNode):
                raise ValueError(f"expected a mapping of keys to values, got a {_kind(root)}")
            _Check(loader).check(root, 0)
            content = loader.construct_document(root)
        finally:
            loader.dispose()
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except yaml.reader.ReaderError as error:
        expected = "expected text in UTF-8 without control characters"
        raise ValueError(f"{expected}, got {error.reason} at position {error.position}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise ValueError(f"is not YAML: {getattr(error, 'problem', error)}{where}") from None
    except RecursionError:  # raised by the parser, before ``_Check`` can count the levels
        raise ValueError(f"nested too deep: expected at most {MAX_LEVELS} levels, got hundreds") from None
    assert isinstance(content, dict)
    return content


class _Check:
    """Rejects values that options cannot have, and converts keys and dates to texts. Changes nodes in place.

    A node may be checked several times, because an anchor may be used several times.
    """

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self._loader = loader
        self._values = 0

    def check(self, node: yaml.Node, depth: int) -> None:
        self._values += 1
        if self._values > _MAX_VALUES:
            raise _bad(node, f"expected at most {_MAX_VALUES} values, got more")
        if depth > MAX_LEVELS:  # this also ends the check of a recursive value
            raise _bad(node, f"nested too deep: expected at most {MAX_LEVELS} levels, got more")
        if isinstance(node, yaml.MappingNode):
            self._check_mapping(node, depth)
        elif isinstance(node, yaml.SequenceNode):
            self._check_tag(node, self._loader.DEFAULT_SEQUENCE_TAG)
            for item in node.value:
                self.check(item, depth + 1)
        elif isinstance(node, yaml.ScalarNode):
            self._check_scalar(node)

    def _check_mapping(self, node: yaml.MappingNode, depth: int) -> None:
        self._check_tag(node, self._loader.DEFAULT_MAPPING_TAG)
        seen: set[str] = set()
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        pairs: list[tuple[yaml.Node, yaml.Node]] = []
        for key, value in node.value:
            self.check(value, depth + 1)
            if key.tag == _MERGE:
                sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
                if not all(isinstance(source, yaml.MappingNode) for source in sources):
                    raise _bad(value, f"expected a mapping or a list of mappings to merge, got a {_kind(value)}")
                # Not by PyYAML: in its version 6.0.4, keys that a source merged itself win over the source's own.
                for pair in (pair for source in sources for pair in source.value):
                    merged.setdefault(pair[0].value, pair)
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise _bad(key, f"expected a text as a key, got a {_kind(key)}")
            # Create a new node, because the key may be an anchor that is also used as a value.
            name = yaml.ScalarNode(_TEXT, key.value, key.start_mark, key.end_mark)
            self._check_scalar(name)
            if name.value in seen:
                raise _bad(key, f"expected each key once, got '{name.value}' again")
            seen.add(name.value)
            pairs.append((name, value))
        node.value = [pair for name, pair in merged.items() if name not in seen] + pairs

    def _check_scalar(self, node: yaml.ScalarNode) -> None:
        if node.tag == _TIMESTAMP:
            node.tag = _TEXT
        if node.tag == _TEXT:
            try:
                # Join surrogate pairs, which JSON's escapes produce.
                node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
            except UnicodeDecodeError:
                raise _bad(node, "expected a text, got a lone surrogate (half of a character)") from None
            if "\0" in node.value:  # the escape of a quoted text; no path or name of the system may hold it
                raise _bad(node, "expected a text without the character NUL, got one")
            return
        plain: str = self._loader.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
        self._check_tag(node, plain)
        if node.tag in _NUMBERS and len(node.value) > _MAX_NUMBER_LENGTH:
            raise _bad(node, f"expected a number of at most {_MAX_NUMBER_LENGTH} characters, got {len(node.value)}")

    def _check_tag(self, node: yaml.Node, expected: str) -> None:
        if node.tag != expected:
            raise _bad(node, f"expected no tag, got {node.tag.replace('tag:yaml.org,2002:', '!!')}")


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "mapping"
    return "list" if isinstance(node, yaml.SequenceNode) else "single value"


def _bad(node: yaml.Node, problem: str) -> ValueError:
    return ValueError(f"{problem} in line {node.start_mark.line + 1}")
