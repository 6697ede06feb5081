"""Mirrors and caches with a store in memory and virtual time: retries, eviction, damaged and offline caches."""

import hashlib
import os
import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from types import SimpleNamespace

import pytest

from fakes.store import StoreInMemory
from http_wire import wait_until
from ortserve.config.model import LoadOptions
from ortserve.registry.stores import cache, mirrors
from ortserve.registry.stores.cache import StoreCache, digest_of
from ortserve.registry.stores.mirror import Mirror
from ortserve.registry.stores.objects import StoredObject, StoreError
from scarcity import no_threads

SHORT_S = 0.3


class Lab:
    def __init__(self, tmp_path: Path, store: StoreInMemory, max_bytes: int = 1000) -> None:
        self.store = store
        self.now_ns = 0
        self.cache = StoreCache(tmp_path / "cache", max_bytes)
        self.mirror = Mirror(
            "s3://b", store, self.cache, self.cache.view / "repository-0", LoadOptions(), lambda: self.now_ns
        )

    def poll(self) -> list[Future[None]]:
        return self.mirror.begin_sync()[1]

    def content(self, model: str) -> bytes:
        return (self.mirror.folder / model / "1" / "model.onnx").read_bytes()


def problems(lab: Lab) -> dict[str, str]:
    return {source.name: source.problem for source in lab.mirror.problems()}


def test_wrong_content_keeps_the_old_one_and_is_fetched_again_after_growing_waits(tmp_path: Path) -> None:
    lab = Lab(tmp_path, StoreInMemory(a=b"first", b=b"other"))
    lab.mirror.sync()
    lab.store.files["a/1/model.onnx"] = b"second"
    lab.store.wrong = {"a/1/model.onnx"}
    lab.store.reads.clear()
    for _ in range(100):  # polls at intervals of 1 s
        lab.mirror.sync()
        lab.now_ns += 10**9
    assert len(lab.store.reads) == 2 * 4  # at 0, 10, 30 and 70 s; each with a second attempt
    assert lab.content("a") == b"first"
    assert "expected the MD5 digest" in problems(lab)["a"]
    lab.store.files["a/1/model.onnx"] = b"first"  # restored
    lab.mirror.sync()
    assert problems(lab) == {}


def test_files_are_fetched_while_no_further_thread_can_start(tmp_path: Path) -> None:
    lab = Lab(tmp_path, StoreInMemory(a=b"first", b=b"other"))
    with no_threads():
        lab.mirror.sync()
    assert problems(lab) == {}
    assert (lab.content("a"), lab.content("b")) == (b"first", b"other")


def test_model_that_is_gone_from_the_store_does_not_come_back_while_the_store_is_down(tmp_path: Path) -> None:
    lab = Lab(tmp_path, StoreInMemory(a=b"first", b=b"other"))
    lab.mirror.sync()
    del lab.store.files["a/1/model.onnx"]
    assert not lab.poll()
    lab.cache.close()
    lab.store.is_up = False
    after = Lab(tmp_path, lab.store)
    after.mirror.sync()
    assert after.mirror.names() == ["b"]


def test_load_by_name_does_not_wait_for_the_next_retry(tmp_path: Path) -> None:
    lab = Lab(tmp_path, StoreInMemory(a=b"first"))
    lab.store.wrong = {"a/1/model.onnx"}
    lab.mirror.sync()
    assert problems(lab)
    lab.store.wrong.clear()
    lab.mirror.sync(["a"])
    assert lab.content("a") == b"first"


def test_unused_contents_leave_by_least_recent_use_and_used_ones_never(tmp_path: Path) -> None:
    lab = Lab(tmp_path, StoreInMemory(a=b"a" * 400, b=b"b" * 400, c=b"c" * 400, d=b"d" * 700), max_bytes=1000)
    lab.mirror.sync(["a"])
    lab.mirror.release("a")
    lab.mirror.sync(["b"])
    lab.mirror.sync(["c"])  # evicts a
    assert lab.cache.size_bytes() == 800
    lab.mirror.sync(["d"])  # nothing is left to evict
    assert "store_cache_bytes: expected 500 bytes more than 1000" in problems(lab)["d"]
    assert (lab.content("b"), lab.content("c")) == (b"b" * 400, b"c" * 400)
    lab.mirror.release("b")
    lab.mirror.release("c")
    lab.mirror.sync(["d"])
    assert lab.content("d") == b"d" * 700


def test_without_the_store_only_models_that_are_complete_in_the_cache_appear(tmp_path: Path) -> None:
    store = StoreInMemory(a=b"first", b=b"other")
    lab = Lab(tmp_path, store)
    lab.mirror.sync(["a"])
    lab.cache.close()
    store.is_up = False
    restarted = Lab(tmp_path, store)
    restarted.mirror.sync()
    assert restarted.content("a") == b"first"
    assert "the cache lacks 1 of its files" in problems(restarted)["b"]
    with pytest.raises(StoreError, match="down"):
        restarted.mirror.sync(["b"])


def test_store_that_was_never_listed_fails_the_first_sync(tmp_path: Path) -> None:
    store = StoreInMemory(a=b"first")
    store.is_up = False
    with pytest.raises(StoreError, match="down"):
        Lab(tmp_path, store).mirror.sync()


def test_views_of_ended_processes_are_removed_and_those_of_others_are_not(tmp_path: Path) -> None:
    first = Lab(tmp_path, StoreInMemory(a=b"first"))
    abandoned = tmp_path / "cache" / "views" / "gone"
    abandoned.mkdir()
    abandoned.with_suffix(".lock").touch()
    without_lock = tmp_path / "cache" / "views" / "remainder"
    without_lock.mkdir()
    first.mirror.sync()
    second = Lab(tmp_path, first.store)
    assert not abandoned.exists()
    assert not without_lock.exists()
    assert first.content("a") == b"first"
    assert second.cache.view != first.cache.view


def test_unchanged_files_of_a_changed_model_keep_their_inodes(tmp_path: Path) -> None:
    lab = Lab(tmp_path, StoreInMemory(a=b"first"))
    lab.mirror.sync()
    file = lab.mirror.folder / "a" / "1" / "model.onnx"
    before = file.stat()
    lab.store.files["a/labels.txt"] = b"cat"
    lab.mirror.sync()
    after = file.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert (lab.mirror.folder / "a" / "labels.txt").read_bytes() == b"cat"
    assert len(list((lab.cache.view / "incoming").iterdir())) == 1  # the previous tree has been removed


def test_process_that_fetches_the_same_content_later_changes_no_file_of_the_first(tmp_path: Path) -> None:
    first, second = (Lab(tmp_path, StoreInMemory(a=b"first")) for _ in range(2))
    second.store.slow["a/1/model.onnx"] = is_over = threading.Event()
    fetches = second.poll()
    first.mirror.sync()
    file = first.mirror.folder / "a" / "1" / "model.onnx"
    before = file.stat()
    is_over.set()
    wait(fetches)
    assert second.content("a") == b"first"
    assert (second.mirror.folder / "a" / "1" / "model.onnx").samefile(file)
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("damaged", [b"fir", b"thief"])
def test_damaged_content_is_replaced(tmp_path: Path, damaged: bytes) -> None:
    lab = Lab(tmp_path, StoreInMemory(a=b"first"))
    content = tmp_path / "cache" / "contents" / hashlib.sha256(b"first").hexdigest()
    content.write_bytes(damaged)
    lab.mirror.sync()
    assert lab.content("a") == b"first"
    assert content.samefile(lab.mirror.folder / "a" / "1" / "model.onnx")
    lab.mirror.release("a")
    content.chmod(0o644)
    content.write_bytes(damaged[:3])
    lab.mirror.sync(["a"])
    assert lab.content("a") == content.read_bytes() == b"first"
    assert lab.cache.size_bytes() == 5


def test_content_that_two_models_have_takes_the_disk_once(tmp_path: Path) -> None:
    """Its digest is known only after both fetches."""
    lab = Lab(tmp_path, StoreInMemory(a=b"first", b=b"first"))
    lab.mirror.sync()
    files = [lab.mirror.folder / name / "1" / "model.onnx" for name in ("a", "b")]
    assert files[0].samefile(files[1])


def test_version_that_a_call_named_since_is_fetched_and_nothing_else_again(tmp_path: Path) -> None:
    lab = Lab(tmp_path, StoreInMemory(a=b"first"))
    lab.store.files["a/2/model.onnx"] = b"second"
    lab.mirror.sync()
    named: set[int] = set()
    lab.mirror.named_versions = lambda name: named if name == "a" else ()
    named.add(1)
    lab.mirror.sync()
    lab.mirror.sync()
    assert lab.store.reads == ["a/2/model.onnx", "a/1/model.onnx"]
    assert lab.content("a") == b"first"


def test_model_that_left_the_store_leaves_the_folder(tmp_path: Path) -> None:
    lab = Lab(tmp_path, StoreInMemory(a=b"first", b=b"other"))
    lab.mirror.sync()
    del lab.store.files["a/1/model.onnx"]
    lab.mirror.sync()
    assert [entry.name for entry in lab.mirror.folder.iterdir()] == ["b"]


def test_required_model_stays_required_if_its_files_cannot_be_fetched(tmp_path: Path) -> None:
    lab = Lab(tmp_path, StoreInMemory(a=b"first", b=b"other"))
    lab.store.files["a/model.yaml"] = b"required: true\n"
    lab.store.wrong = {"a/1/model.onnx", "b/1/model.onnx"}
    lab.mirror.sync()
    assert {source.name: source.is_required for source in lab.mirror.problems()} == {"a": True, "b": False}


def test_digests_that_another_process_wrote_are_kept(tmp_path: Path) -> None:
    store = StoreInMemory(a=b"first", b=b"other")
    one, other = Lab(tmp_path, store), Lab(tmp_path, store)
    other.mirror.sync(["b"])
    one.mirror.sync(["a"])
    store.files["c/1/model.onnx"] = b"third"
    other.mirror.sync(["c"])
    store.reads.clear()
    Lab(tmp_path, store).mirror.sync()
    assert store.reads == []


def test_model_that_a_load_fetches_during_a_sync_stays(tmp_path: Path) -> None:
    """The sync has an older listing and is not finished when another thread loads a new model."""
    lab = Lab(tmp_path, StoreInMemory(a=b"first"))

    def load_b() -> None:
        lab.store.on_settle = lambda: None
        lab.store.files["b/1/model.onnx"] = b"other"
        lab.mirror.sync(["b"])

    lab.store.on_settle = load_b
    lab.mirror.sync()
    assert (lab.content("a"), lab.content("b")) == (b"first", b"other")


def test_model_that_leaves_the_store_during_another_sync_leaves_the_folder(tmp_path: Path) -> None:
    lab = Lab(tmp_path, StoreInMemory(a=b"first", b=b"other"))
    lab.mirror.sync()

    def named_versions(model: str) -> tuple[int, ...]:
        if lab.store.files.pop("b/1/model.onnx", None) is not None:
            lab.mirror.sync(["a"])  # another thread's load does this after the sync has its listing
        return ()

    lab.mirror.named_versions = named_versions
    lab.mirror.sync()
    assert [path.name for path in lab.mirror.folder.iterdir()] == ["a"]


def test_fetch_that_takes_long_delays_no_other_model(tmp_path: Path) -> None:
    lab = Lab(tmp_path, StoreInMemory(a=b"large"))
    lab.store.slow["a/1/model.onnx"] = is_over = threading.Event()
    (slow,) = lab.poll()
    for content in (b"first", b"second"):
        lab.store.files["b/1/model.onnx"] = content
        (quick,) = lab.poll()
        wait([quick])
        assert lab.content("b") == content
    lab.mirror.sync(["b"])
    assert not slow.done()
    assert not (lab.mirror.folder / "a").exists()
    is_over.set()
    wait([slow])


def test_fetched_file_takes_its_room_once_while_other_files_of_its_model_arrive(tmp_path: Path) -> None:
    lab = Lab(tmp_path, StoreInMemory(a=bytes(400)), max_bytes=1000)
    lab.store.files["a/1/weights"] = bytes(range(250))
    lab.store.slow["a/1/weights"] = is_over = threading.Event()
    (slow,) = lab.poll()
    wait_until(lambda: lab.cache.size_bytes() == 400)
    lab.store.files["b/1/model.onnx"] = bytes(300)
    (quick,) = lab.poll()
    wait([quick])
    is_over.set()
    wait([slow])
    assert problems(lab) == {}


def test_bytes_that_have_arrived_need_no_free_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = StoreCache(tmp_path / "cache", 1000)
    free = 200
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with cache.room(150) as give_back:
        file = cache.new_path()
        file.write_bytes(bytes(100))
        free -= 100
        for _ in range(2):
            with cache.room(50):
                pass
            with pytest.raises(StoreError, match="has 100 bytes free: expected 101 bytes"), cache.room(51):
                pass
            if file.exists():
                give_back(file)
        cache.add(file, digest_of(file), cache.view / "m.onnx")
    with cache.room(100):
        pass
    other = cache.new_path()
    other.write_bytes(bytes(50))
    with pytest.raises(StoreError, match="the cache cannot be used"):
        cache.add(other, digest_of(other), cache.view / "m.onnx" / "no_folder")
    assert not other.exists()


def test_upload_replaces_the_fetch_of_the_one_before_it(tmp_path: Path) -> None:
    lab = Lab(tmp_path, StoreInMemory(a=b"large"))
    lab.store.slow["a/1/model.onnx"] = threading.Event()
    lab.poll()
    assert lab.poll() == []
    lab.store.files["a/1/model.onnx"] = b"second"
    del lab.store.slow["a/1/model.onnx"]
    lab.mirror.sync(["a"])
    assert lab.content("a") == b"second"
    assert problems(lab) == {}
    assert lab.mirror.reading().failed_models == 0
    assert len(list((lab.cache.view / "incoming").iterdir())) == 1


def test_digests_survive_a_process_that_is_killed_during_a_fetch(tmp_path: Path) -> None:
    lab = Lab(tmp_path, StoreInMemory(a=b"large", b=b"other"))
    lab.store.slow["a/1/model.onnx"] = is_over = threading.Event()
    lab.now_ns = 10**10
    slow, quick = lab.poll()
    wait([quick])
    lab.store.reads.clear()
    lab.store.is_up = False
    Lab(tmp_path, lab.store).mirror.sync()
    assert lab.store.reads == []
    is_over.set()
    wait([slow])


def test_listing_that_is_written_slowly_replaces_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is slow for the listing after the first model, so that the second model arrives meanwhile."""
    lab = Lab(tmp_path, StoreInMemory(a=b"first", b=b"other"))
    lab.now_ns = 10**10
    lab.store.slow["b/1/model.onnx"] = is_first_here = threading.Event()
    is_second_written = threading.Event()
    write = StoreCache.write_listing

    def write_slowly(cache: StoreCache, url: str, objects: Iterable[StoredObject]) -> None:
        is_later = is_first_here.is_set()
        is_first_here.set()
        if not is_later:
            is_second_written.wait(SHORT_S)
        write(cache, url, objects)
        if is_later:
            is_second_written.set()

    monkeypatch.setattr(StoreCache, "write_listing", write_slowly)
    lab.mirror.sync()
    lab.store.reads.clear()
    Lab(tmp_path, lab.store).mirror.sync()
    assert lab.store.reads == []


def test_files_with_listed_digests_are_taken_from_the_cache(tmp_path: Path) -> None:
    """For example a version that is uploaded again under another number."""
    lab = Lab(tmp_path, StoreInMemory(a=b"first"))
    lab.mirror.sync()
    lab.store.files["b/7/model.onnx"] = b"first"
    lab.store.files["b/SHA256SUMS"] = f"{hashlib.sha256(b'first').hexdigest()}  7/model.onnx\n".encode()
    lab.store.reads.clear()
    lab.mirror.sync()
    assert lab.store.reads == ["b/SHA256SUMS"]
    assert (lab.mirror.folder / "b" / "7" / "model.onnx").read_bytes() == b"first"


@pytest.mark.parametrize("size", [6, 7])
def test_digest_that_a_store_makes_up_leads_to_no_file_outside_the_cache(tmp_path: Path, size: int) -> None:
    (tmp_path / "victim").write_bytes(b"secret")
    cache = StoreCache(tmp_path / "cache", 1000)
    for digest in ("../../victim", str(tmp_path / "victim"), "../views"):
        assert not cache.link(StoredObject("m/1/model.onnx", size, "tag", digest), cache.view / "target")
    assert (tmp_path / "victim").read_bytes() == b"secret"


def test_content_that_another_process_links_during_an_eviction_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would take disk that no process counts, and be fetched again."""
    mine, others = StoreCache(tmp_path / "cache", 1000), StoreCache(tmp_path / "cache", 1000)
    known = [StoredObject("", 400, "", hashlib.sha256(byte * 400).hexdigest()) for byte in (b"a", b"b")]
    for number, one in enumerate(known):
        file = mine.new_path()
        file.write_bytes((b"a", b"b")[number] * 400)
        mine.add(file, one.sha256, mine.view / "m" / str(number))
    shutil.rmtree(mine.view / "m")
    read, linked = cache._read, others.view / "m" / "0"

    def read_slowly(folder: Path) -> Iterable[tuple[Path, os.stat_result]]:
        found = list(read(folder))
        if folder.name == "contents" and not linked.exists():
            others.link(known[0], linked)
        return found

    monkeypatch.setattr(cache, "_read", read_slowly)
    with mine.room(500):
        assert mine.size_bytes() == 400
    with pytest.raises(StoreError, match="expected 400 bytes more than 1000"), mine.room(1000):
        pass
    assert mine.link(known[0], mine.view / "m" / "0")
    assert list(read(mine.view / "incoming")) == []


def test_listed_digest_of_an_incomplete_object_damages_no_content(tmp_path: Path) -> None:
    lab = Lab(tmp_path, StoreInMemory(a=b"first"))
    lab.mirror.sync()
    lab.store.files["b/1/model.onnx"] = b"fir"
    lab.store.files["b/SHA256SUMS"] = f"{hashlib.sha256(b'first').hexdigest()}  1/model.onnx\n".encode()
    lab.mirror.sync()
    assert "expected the SHA-256 digest" in problems(lab)["b"]
    lab.store.reads.clear()
    Lab(tmp_path, lab.store).mirror.sync(["a"])
    assert lab.store.reads == []


async def test_size_that_is_read_slowly_is_shown_by_the_next_scrape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "_SIZE_WAIT_S", 0.01)
    lab = Lab(tmp_path, StoreInMemory(a=b"first"))
    lab.mirror.sync()
    may_read = threading.Semaphore(0)
    read = lab.cache.size_bytes

    def read_slowly() -> int:
        may_read.acquire()
        return read()

    monkeypatch.setattr(lab.cache, "size_bytes", read_slowly)
    stores = mirrors.Mirrors([lab.mirror], lab.cache)
    assert stores.reading().cache_bytes == 0
    may_read.release()
    assert stores._sizing is not None
    wait([stores._sizing])
    assert stores.reading().cache_bytes == 5
    may_read.release()
    await stores.close()
