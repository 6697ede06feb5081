"""Archives behind HTTP: the extracted files, and the causes of failure."""

import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from archives import file_site, write_archive
from ortserve.config.model import LoadOptions
from ortserve.config.repository_url import RepositoryUrl, parse_repository
from ortserve.registry.stores import archive
from ortserve.registry.stores.archive import ArchiveStore
from ortserve.registry.stores.cache import StoreCache
from ortserve.registry.stores.mirror import Mirror
from ortserve.registry.stores.objects import StoreError


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder behind HTTP, and its address."""
    folder = tmp_path / "site"
    folder.mkdir()
    with file_site(folder) as address:
        yield folder, address


def store_of(address: str, digest: str, tmp_path: Path, max_bytes: int = 1 << 20, timeout_s: float = 5) -> ArchiveStore:
    url = parse_repository(f"{address}/models.tar.gz#sha256={digest}")
    assert isinstance(url, RepositoryUrl)
    return ArchiveStore(url, timeout_s, tmp_path / "unpacked", max_bytes)


def test_files_are_members_and_an_unchanged_archive_is_fetched_only_to_read_one(
    site: tuple[Path, str], tmp_path: Path
) -> None:
    folder, address = site
    digest = write_archive(folder / "models.tar.gz", [("m/1/model.onnx", b"model"), ("m/labels.txt", b"cat")])
    store = store_of(address, digest, tmp_path)
    listed = {found.path: found for found in store.list({})}
    assert {path: found.size for path, found in listed.items()} == {"m/1/model.onnx": 5, "m/labels.txt": 3}
    store.settle()
    assert not (tmp_path / "unpacked").exists()
    assert {found.path: found for found in store.list(listed)} == listed
    assert not (tmp_path / "unpacked").exists()
    assert b"".join(store.read(listed["m/labels.txt"])) == b"cat"


def test_the_last_member_of_a_name_is_the_file_as_tar_extracts_it(site: tuple[Path, str], tmp_path: Path) -> None:
    """``tar --append`` adds a changed file after its earlier content."""
    folder, address = site
    members = [("m/1/model.onnx", b"first"), ("m/1/model.onnx", b"second"), ("m/labels.txt", b"cat")]
    store = store_of(address, write_archive(folder / "models.tar.gz", members), tmp_path)

    assert {found.path: b"".join(store.read(found)) for found in store.list({})} == dict(members)


def test_file_can_be_read_while_another_sync_ends(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = site
    digest = write_archive(folder / "models.tar.gz", [("m/1/model.onnx", b"model")])

    class UnpackedFile(type(tmp_path)):  # type: ignore[misc]
        """Lets another thread finish its sync just before the file is opened for reading."""

        def open(self, mode: str = "r", *arguments: Any) -> Any:
            if mode == "rb":
                settling = threading.Thread(target=store.settle)
                settling.start()
                settling.join(0.2)
            return super().open(mode, *arguments)

    store = store_of(address, digest, UnpackedFile(tmp_path))
    (found,) = store.list({})
    assert b"".join(store.read(found)) == b"model"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("link", "link or device"),
        ("digest", "expected an archive with the SHA-256 digest"),
        ("torn", "the archive cannot be read"),
        ("large", "expected an archive of at most"),
        ("folders", "expected an archive of at most"),
        ("missing", "404 Not Found|it cannot be found|not found"),
    ],
)
def test_unsafe_and_wrong_archives_are_refused(
    site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, reason: str
) -> None:
    folder, address = site
    file = folder / "models.tar.gz"
    more: tuple[tarfile.TarInfo, ...] = ()
    if kind == "link":
        more = (tarfile.TarInfo("m/1/link"),)
        more[0].type, more[0].linkname = tarfile.SYMTYPE, "/etc/passwd"
    if kind == "folders":
        monkeypatch.setattr(archive, "MAX_OBJECTS", 2)
        more = tuple(tarfile.TarInfo(f"m/{number}") for number in range(3))
        for folder_member in more:
            folder_member.type = tarfile.DIRTYPE
    digest = write_archive(file, [("m/1/model.onnx", bytes(range(256)) * 400)], *more)
    if kind == "torn":
        file.write_bytes(file.read_bytes()[:-100])
    if kind == "missing":
        file.unlink()
    store = store_of(
        address, digest[::-1] if kind == "digest" else digest, tmp_path, 1000 if kind == "large" else 1 << 20
    )
    with pytest.raises(StoreError, match=reason):
        store.list({})
    assert not (tmp_path / "unpacked").exists()


@pytest.mark.parametrize(
    "name", ["..", "../../evil/1/model.onnx", "/evil/1/model.onnx", "e\\vil/1/model.onnx", "\udce9/1/m"]
)
def test_name_that_no_model_can_have_is_left_out_and_the_others_are_served(
    site: tuple[Path, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    mirror = mirror_of(*site, tmp_path, name)
    assert mirror.problems() == []
    assert "objects are left out: no model can have their name" in caplog.text
    assert list(mirror.folder.iterdir()) == [mirror.folder / "m"]
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize(
    "name", ["bad/../../evil", "bad//1/model.onnx", "bad/1/\udce9", f"bad/1/{'long' * 100}", "bad/a\n"]
)
def test_file_that_cannot_be_written_fails_its_model_with_the_name(
    site: tuple[Path, str], tmp_path: Path, name: str
) -> None:
    mirror = mirror_of(*site, tmp_path, name)
    (source,) = mirror.problems()
    assert source.name == "bad"
    assert source.problem.startswith("its files cannot be fetched: expected ")
    assert repr(name[:200]) in source.problem
    assert list(mirror.folder.iterdir()) == [mirror.folder / "m"]
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_archive_whose_headers_trickle_is_an_error(
    site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    folder, address = site
    digest = write_archive(folder / "models.tar.gz", [("m/1/model.onnx", b"model")])
    is_over = threading.Event()
    send_response = SimpleHTTPRequestHandler.send_response

    def trickle(handler: SimpleHTTPRequestHandler, code: int, message: str | None = None) -> None:
        send_response(handler, code, message)
        handler.flush_headers()
        with suppress(ConnectionError):  # the client gives up
            while handler.command == method and not is_over.wait(0.05):
                handler.wfile.write(b"X-Trickles: yes\r\n")

    monkeypatch.setattr(SimpleHTTPRequestHandler, "send_response", trickle)
    with pytest.raises(StoreError, match="HTTP error: error sending request: Timeout"):
        store_of(address, digest, tmp_path, timeout_s=0.5).list({})
    is_over.set()


def mirror_of(folder: Path, address: str, tmp_path: Path, name: str) -> Mirror:
    """A mirror of an archive with the model ``m``, and with a file of another name."""
    member = tarfile.TarInfo(name)
    digest = write_archive(folder / "models.tar.gz", [("m/1/model.onnx", b"model")], member)
    cache = StoreCache(tmp_path / "cache", 1 << 20)
    store = store_of(address, digest, tmp_path)
    mirror = Mirror("https://site", store, cache, cache.view / "repository-0", LoadOptions(), time.monotonic_ns)
    mirror.sync()
    assert (mirror.folder / "m" / "1" / "model.onnx").read_bytes() == b"model"
    return mirror
