"""A caller's shared memory object, including changes by its owner during use."""

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from ortserve.errors import ErrorKind, ServeError
from ortserve.service.shared_object import FOLDER, RESERVED_PREFIX, SharedObject

CONTENT = bytes(range(64))


@pytest.fixture
def path() -> Iterator[Path]:
    """An unused name in the folder of shared memory objects."""
    path = FOLDER / f"ortserve-test-{uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def owned(path: Path) -> Path:
    """An object that holds ``CONTENT``."""
    path.write_bytes(CONTENT)
    return path


def refusal(key: str, offset: int = 0, byte_size: int = 1) -> ServeError:
    with pytest.raises(ServeError) as caught:
        SharedObject("r", key, offset, byte_size)
    return caught.value


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.parametrize("slash", ["", "/"])
def test_object_is_opened_by_its_name_with_or_without_the_slash(owned: Path, slash: str) -> None:
    opened = SharedObject("r", slash + owned.name, 8, 16)
    assert opened.read(0, 16) == CONTENT[8:24]
    assert opened.read(4, 2) == CONTENT[12:14]
    assert opened.read(16, 0).tobytes() == b""
    opened.write(1, b"ab")
    opened.close()
    assert owned.read_bytes() == CONTENT[:9] + b"ab" + CONTENT[11:]


def test_copy_does_not_change_when_the_owner_writes(owned: Path) -> None:
    opened = SharedObject("r", owned.name, 0, 64)
    read = opened.read(0, 64)
    owned.write_bytes(bytes(64))
    assert read == CONTENT
    assert opened.read(0, 64) == bytes(64)
    opened.close()


def test_unlinked_object_stays_until_it_is_closed(owned: Path) -> None:
    opened = SharedObject("r", owned.name, 0, 64)
    owned.unlink()
    assert opened.read(0, 64) == CONTENT
    opened.write(0, b"z")
    assert opened.read(0, 1).tobytes() == b"z"
    opened.close()


def test_shortened_object_is_an_error_and_is_not_made_longer(owned: Path) -> None:
    opened = SharedObject("r", owned.name, 0, 64)
    os.truncate(owned, 10)
    with pytest.raises(ServeError, match=r"shared memory region: 'r'.* shortened to 10 bytes, expected.* 64") as caught:
        opened.read(0, 64)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    with pytest.raises(ServeError, match="shortened to 10 bytes, expected at least 11"):
        opened.write(8, b"abc")
    assert owned.read_bytes() == CONTENT[:10]
    assert opened.read(0, 10) == CONTENT[:10]
    opened.close()


def test_partial_reads_and_writes_are_continued(owned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda file, parts, offset: preadv(file, [parts[0][:7]], offset))
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:7], offset))
    opened = SharedObject("r", owned.name, 0, 64)
    assert opened.read(1, 50) == CONTENT[1:51]
    opened.write(1, b"x" * 50)
    assert owned.read_bytes() == CONTENT[:1] + b"x" * 50 + CONTENT[51:]
    opened.close()


def test_write_without_memory_is_an_error(owned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", no_space)
    opened = SharedObject("r", owned.name, 0, 64)
    with pytest.raises(ServeError, match="cannot write to shared memory region 'r': No space left on device") as caught:
        opened.write(0, b"x")
    assert caught.value.kind is ErrorKind.INTERNAL
    opened.close()


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        ".",
        "..",
        "/..",
        "//x",
        "a/b",
        "/a/b",
        "../etc/passwd",
        "/../etc/passwd",
        "x\0y",
        f"/{RESERVED_PREFIX}1",
    ],
)
def test_invalid_key_is_rejected_unopened(key: str) -> None:
    error = refusal(key)
    assert error.kind is ErrorKind.INVALID_INPUT
    assert error.message.startswith("failed to register shared memory region 'r': invalid args: ")


@pytest.mark.parametrize("key", ["ortserve-test-missing", "x" * 300, "\ud800"])
def test_missing_object_is_rejected(key: str) -> None:
    error = refusal(key)
    assert error.kind is ErrorKind.INTERNAL
    assert error.message == f"Unable to open shared memory region: '{key}'"


def test_key_of_a_link_folder_pipe_or_socket_is_rejected(path: Path, tmp_path: Path) -> None:
    before = open_descriptors()
    target = tmp_path / "elsewhere"
    target.write_bytes(CONTENT)
    path.symlink_to(target)
    assert refusal(path.name).kind is ErrorKind.INTERNAL
    path.unlink()
    path.mkdir()
    assert refusal(path.name).kind is ErrorKind.INTERNAL
    path.rmdir()
    os.mkfifo(path)
    assert refusal(path.name).kind is ErrorKind.INTERNAL
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert refusal(path.name).kind is ErrorKind.INTERNAL
    assert open_descriptors() == before


@pytest.mark.parametrize(("offset", "byte_size"), [(0, 65), (64, 1), (65, 0), (2**63 - 1, 2**63 - 1)])
def test_bytes_beyond_the_end_are_rejected(owned: Path, offset: int, byte_size: int) -> None:
    before = open_descriptors()
    error = refusal(owned.name, offset, byte_size)
    assert error.kind is ErrorKind.INVALID_INPUT
    assert error.message == (
        "failed to register shared memory region 'r': invalid args: expected offset + byte_size within the 64 bytes of "
        f"'{owned.name}', got {offset} + {byte_size}"
    )
    assert open_descriptors() == before
