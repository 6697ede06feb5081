"""Key files: their content, and the rule that an invalid file changes nothing."""

import logging
from collections.abc import Set
from pathlib import Path

import pytest

from ortserve.errors import ErrorKind, ServeError
from ortserve.service.access import Access, Group, digest_of
from ortserve.service.key_files import KeyFiles, read_keys

FIRST, SECOND, THIRD = "first-key-0123456789", "second-key-0123456789", "third/key+0123456789=="


def digests(*keys: str) -> frozenset[bytes]:
    return frozenset(digest_of(key.encode()) for key in keys)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "infer"
    file.write_text(FIRST + "\n")
    return file


class Opened:
    """A keyring that follows the files of some groups. The tests trigger each check."""

    def __init__(self, paths: dict[Group, Path]) -> None:
        files = KeyFiles(paths)
        self.access = Access(list(Group), files.keyring(), on_refusal=lambda *_: None)
        self._followed = files.followed(self.access)

    def groups_of(self, key: str) -> Set[Group]:
        return self.access.keyring.groups_of(key.encode())

    async def check(self, times: int = 1) -> None:
        for _ in range(times):
            for files in self._followed:
                await files.check()


def put(file: Path, text: str) -> None:
    """Replace a file atomically."""
    new = file.with_name(".new")
    new.write_text(text)
    new.replace(file)


def write(file: Path, text: str) -> None:
    """Overwrite a file in place, as an editor or a copy does."""
    file.write_text(text)


def spoil_file(file: Path, spoil: str) -> None:
    if spoil == "gone":
        file.unlink()
    elif spoil == "unreadable":
        file.unlink()
        file.symlink_to(file.name)  # a loop
    else:
        put(file, "" if spoil == "empty" else "short")


@pytest.mark.parametrize(
    "text",
    [
        f"{FIRST}\n{THIRD}\n",
        f"# of the old client\n{FIRST}\n\n  # of the new one\n  {THIRD}  \n",
        f"{FIRST}\r\n{THIRD}",
        f"{THIRD}\n{FIRST}\n{THIRD}\n",
    ],
)
def test_each_line_holds_a_key_or_a_comment(file: Path, text: str) -> None:
    file.write_text(text)
    assert read_keys(file) == digests(FIRST, THIRD)


def test_folder_is_read_file_by_file_as_kubernetes_mounts_it(tmp_path: Path) -> None:
    version = tmp_path / "..2030_01_31"
    version.mkdir()
    (version / "client-a").write_text(FIRST)
    (version / "client-b").write_text(f"{SECOND}\n{THIRD}\n")
    (tmp_path / "..data").symlink_to(version.name)
    for name in ("client-a", "client-b"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    assert read_keys(tmp_path) == digests(FIRST, SECOND, THIRD)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected at least one key, got none"),
        ("# all gone\n\n", "expected at least one key, got none"),
        (f"{FIRST}\nshort\n", "line 2: expected a key of 16 to 512 letters, digits and -._~+/, got a key of 5 bytes"),
        ("a key with blanks in it", "line 1: expected a key of 16 to 512"),
        ("x" * 513, "got a key of 513 bytes"),
        ("schlüssel-0123456789", "line 1: expected a key"),
        ("\n".join(f"key-number-{number:06}" for number in range(65)), "expected at most 64 keys, got 65"),
        ("#" * 70_000, "expected at most 65536 bytes, got more"),
    ],
)
def test_error_of_a_file_does_not_contain_its_content(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ServeError) as caught:
        read_keys(file)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert message in caught.value.message
    assert not text.strip() or text not in caught.value.message


def test_error_of_a_key_given_as_a_path_does_not_contain_it(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match=r"^infer_keys_file: expected a file of keys.*: No such file") as caught:
        KeyFiles({Group.INFER: tmp_path / FIRST})
    assert FIRST not in caught.value.message


def test_bad_file_in_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "good").write_text(FIRST)
    (tmp_path / "worse").write_text("short")
    with pytest.raises(ServeError, match=r"^control_keys_file: file 'worse', line 1: "):
        KeyFiles({Group.CONTROL: tmp_path})


async def test_changed_file_takes_effect_when_two_checks_agree(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    opened = Opened({Group.INFER: file})
    await opened.check()
    put(file, f"{FIRST}\n{SECOND}\n")
    await opened.check()
    assert not opened.groups_of(SECOND)
    await opened.check()
    assert opened.groups_of(FIRST) == opened.groups_of(SECOND) == {Group.INFER}
    put(file, SECOND)
    await opened.check(2)
    assert not opened.groups_of(FIRST)
    fields = [vars(record)["fields"] for record in caplog.records]
    assert fields == [
        {"group": Group.INFER, "keys": 2, "added": 1, "gone": 0},
        {"group": Group.INFER, "keys": 1, "added": 0, "gone": 1},
    ]


async def test_half_written_file_changes_nothing(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened = Opened({Group.INFER: file})
    for half in ("", SECOND[:-3], f"{SECOND}\n{THIRD[:-4]}"):
        write(file, half)
        await opened.check()
        assert opened.groups_of(FIRST)
    assert not opened.groups_of(SECOND[:-3])
    write(file, f"{SECOND}\n{THIRD}")
    await opened.check(2)
    assert not opened.groups_of(FIRST)
    assert opened.groups_of(SECOND) == opened.groups_of(THIRD) == {Group.INFER}
    assert not caplog.records


@pytest.mark.parametrize("spoil", ["empty", "malformed", "gone", "unreadable"])
async def test_invalid_file_leaves_the_old_keys_and_is_logged_once(
    file: Path, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    opened = Opened({Group.INFER: file})
    spoil_file(file, spoil)
    for _ in range(4):
        await opened.check()
        assert opened.groups_of(FIRST) == {Group.INFER}
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "the new keys cannot be used; the old keys stay valid")
    ]
    put(file, FIRST)
    await opened.check(2)
    assert caplog.records[-1].getMessage() == "keys can be read again"


async def test_invalid_file_does_not_delay_another(file: Path) -> None:
    control = file.with_name("control")
    control.write_text(SECOND)
    opened = Opened({Group.INFER: file, Group.CONTROL: control})
    put(file, "")
    put(control, THIRD)
    await opened.check(2)
    assert opened.groups_of(FIRST) == {Group.INFER}
    assert opened.groups_of(THIRD) == {Group.CONTROL}
