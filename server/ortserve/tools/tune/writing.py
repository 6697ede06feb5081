"""Changes values in a ``model.yaml``. Everything else in the file stays, with comments and order."""

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError
from ruamel.yaml.util import load_yaml_guess_indent

from ortserve.config.model import LoadOptions, ModelOptions, load_model_options
from ortserve.errors import ErrorKind, ServeError
from ortserve.tools.staging import replacement
from ortserve.tools.tune.space import Changes, key_path

_WIDTH: Final = 4096
_OLD_COMMENT: Final = re.compile(r"(; |(?<=# ))ortserve tune: [^;]*")


def edit_text(text: str, changes: Changes, comments: Mapping[str, str]) -> str:
    """The text of a ``model.yaml`` with changed values, each with a comment at the end of its line.

    Args:
        text: Text of the file; empty if there is no file.
        changes: Values by key. None becomes ``null``, which also overrides a default of the server.
        comments: Comments by key.

    Raises:
        ServeError: internal: the text cannot be edited.
    """
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = _WIDTH
    yaml.representer.add_representer(
        type(None), lambda representer, _: representer.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    nested = re.search(r"^[^#\n-][^\n]*:[^\n]*\n(?:\s*(?:#.*)?\n)*( +)[^ #-]", text, re.MULTILINE)
    mapping = len(nested[1]) if nested else 2
    try:
        root, _, offset = load_yaml_guess_indent(text, yaml=yaml) if text.strip() else (None, None, None)
    except (YAMLError, ValueError) as error:
        raise ServeError(ErrorKind.INTERNAL, f"model.yaml cannot be edited: {error}") from None
    yaml.indent(mapping=mapping, sequence=(offset or 0) + 2, offset=offset or 0)
    head = text.rstrip("\n") + "\n" if root is None and text.strip() else ""  # nothing but comments
    root = CommentedMap() if root is None else root
    for key, value in changes.items():
        _set(root, key_path(key), value, comments.get(key, ""))
    out = io.StringIO()
    yaml.dump(root, out)
    return head + out.getvalue()


def _set(root: CommentedMap, path: tuple[str, ...], value: Any, comment: str) -> None:
    place, has_braces = root, False
    *outer, last = path
    for name in outer:
        if not isinstance(place.get(name), CommentedMap):
            place[name] = CommentedMap()
        place = place[name]
        has_braces = has_braces or bool(place.fa.flow_style())
    place[last] = _styled(value)
    if not comment:
        return
    if has_braces:  # a comment would end the line within the braces
        root.yaml_set_comment_before_after_key(path[0], before=f"{last}: {comment}")
        return
    token = (place.ca.items.get(last) or [None] * 4)[2]
    if token is None:
        place.yaml_add_eol_comment(comment, last)
        return
    own, _, following = token.value.partition("\n")  # the comment of this line, and the lines up to the next key
    own = _OLD_COMMENT.sub("", own)
    token.value = f"{own + '; ' if own.strip(' #') else '# '}{comment}\n{following}"


def _styled(value: Any) -> Any:
    """The value; a list is written in one line."""
    if not isinstance(value, list):
        return value
    styled = CommentedSeq(value)
    styled.fa.set_flow_style()
    return styled


def write_options(file: Path, changes: Changes, comments: Mapping[str, str], expected: ModelOptions) -> None:
    """Write values to a ``model.yaml`` atomically.

    Args:
        file: The file; created if it does not exist. A link stays, and its target is replaced.
        changes: As in ``edit_text``.
        comments: As in ``edit_text``.
        expected: The options that the edited file must have.

    Raises:
        ServeError: internal: the edited file would have other options. Nothing is written.
        OSError: The folder cannot be written.
    """
    old = file.read_text(encoding="utf-8") if file.exists() else ""
    with replacement(file) as staged:
        staged.write_text(edit_text(old, changes, comments), encoding="utf-8")
        if load_model_options(staged, LoadOptions()) != expected:
            raise ServeError(
                ErrorKind.INTERNAL, f"{file.name}: the edited file would not have the options, so it stays"
            )
