"""Option files: the supported subset of YAML."""

from pathlib import Path

import pytest

from ortserve.config.yaml_file import read_yaml


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.yaml"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("", {}),
        ("# nothing\n---\n", {}),
        ("a: 1\nb: [1.5, true, null, 'x', .inf]", {"a": 1, "b": [1.5, True, None, "x", float("inf")]}),
        ("1: a\non: b\n~: c\n0x10: d\n1e3: e", {"1": "a", "on": "b", "~": "c", "0x10": "d", "1e3": "e"}),
        ("2020-01-01: {a: 2020-13-45}", {"2020-01-01": {"a": "2020-13-45"}}),
        ("a: &x 5\nb: *x\nc: {*x : 6}", {"a": 5, "b": 5, "c": {"5": 6}}),
        ("a: &x {k: 1, l: 2}\nb: {<<: *x, k: 3}\nc: &y {<<: *x, l: 4}\nd: {<<: *y}",
         {"a": {"k": 1, "l": 2}, "b": {"k": 3, "l": 2}, "c": {"k": 1, "l": 4}, "d": {"k": 1, "l": 4}}),
        ("a: &x {k: 1}\nb: &y {k: 2, l: 3}\nc: {<<: [*x, *y]}",
         {"a": {"k": 1}, "b": {"k": 2, "l": 3}, "c": {"k": 1, "l": 3}}),
        (r'a: "\ud83d\ude00"', {"a": "😀"}),
        ("a: !!str 5", {"a": "5"}),
        ("a: " + "9" * 64, {"a": int("9" * 64)}),
        ("a: " + "[" * 64 + "]" * 64, None),
    ],
)  # fmt: skip
def test_content_has_jsons_types_and_unchanged_keys(file: Path, text: str, content: object) -> None:
    file.write_text(text)
    read = read_yaml(file)
    assert content is None or read == content


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3", "expected each key once, got 'a' again in line 3"),
        ("x:\n  a: {}\n  'a': {}", "expected each key once, got 'a' again in line 3"),
        ("a:\n  <<: 5", "expected a mapping or a list of mappings to merge, got a single value in line 2"),
        ("a: {<<: [{}, []]}", "expected a mapping or a list of mappings to merge, got a list in line 1"),
        ("1: x\n'1': y", "expected each key once, got '1' again in line 2"),
        ("\na: &a\n  b: *a", "nested too deep: expected at most 64 levels, got more in line 2"),
        ("a: &a [*a]", "nested too deep: expected at most 64 levels, got more in line 1"),
        ("a: " + "[" * 65 + "]" * 65, "nested too deep: expected at most 64 levels, got more in line 1"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deep: expected at most 64 levels, got hundreds"),
        (BOMB, "expected at most 100000 values, got more in line 1"),
        ("a: 0x" + "f" * 6000, "expected a number of at most 64 characters, got 6002 in line 1"),
        ("a: " + "9" * 6000, "expected a number of at most 64 characters, got 6000 in line 1"),
        ("a: 1" + ":0" * 200, "expected a number of at most 64 characters, got 401 in line 1"),
        (r'a: "\ud800"', "expected a text, got a lone surrogate (half of a character) in line 1"),
        (r'{b: 1, c: "a\0b"}', "expected a text without the character NUL, got one in line 1"),
        (r'{b: 1, "\ud800": 1}', "expected a text, got a lone surrogate (half of a character) in line 1"),
        ("a: !!bool maybe", "expected no tag, got !!bool in line 1"),
        ("a: !!binary aGVsbG8=", "expected no tag, got !!binary in line 1"),
        ("a: !!set {b, c}", "expected no tag, got !!set in line 1"),
        ("a: !mine [b]", "expected no tag, got !mine in line 1"),
        ("? [a, b]\n: c", "expected a text as a key, got a list in line 1"),
        ("- a", "expected a mapping of keys to values, got a list"),
        ("a", "expected a mapping of keys to values, got a single value"),
        ("a: [", "is not YAML: expected the node content, but found '<stream end>' in line 1"),
        ("a: 1\n---\nb: 2", "is not YAML: but found another document in line 2"),
    ],
    ids=lambda text: text[:16],
)
def test_yaml_values_without_an_option_type_are_rejected_with_their_line(file: Path, text: str, problem: str) -> None:
    file.write_text(text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - all of the text is compared
        read_yaml(file)
    assert str(caught.value) == problem


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"a: stra\xdfe\n", "got invalid continuation byte at position 7"), (b"a: \x00\n", "special characters")],
)
def test_text_in_another_encoding_is_rejected_with_the_expected_one(file: Path, content: bytes, problem: str) -> None:
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"^expected text in UTF-8 without control characters, .*{problem}"):
        read_yaml(file)


def test_unreadable_file_is_named_without_its_folder(file: Path) -> None:
    with pytest.raises(ValueError, match=r"^cannot be read: No such file or directory$"):
        read_yaml(file)
