"""Followed files whose content changes, settles, is invalid or cannot be read. The tests trigger each check."""

import asyncio
from typing import Final

import pytest

from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.service.followed_files import FollowedFiles

LONG_S: Final = 30.0
"""Upper bound of waits; only failing tests reach it."""


class Files:
    """Holds a text, and errors to raise when it is read or accepted; records the calls."""

    def __init__(self) -> None:
        self.content = "old"
        self.unreadable: Exception | None = None
        self.unusable: Exception | None = None
        self.faults: list[Exception] = []
        self.notes: list[str] = []
        self.news = asyncio.Event()
        self.followed = FollowedFiles(
            self.content,
            read=self._read,
            accept=self._accept,
            reject=lambda reason: self._note(f"rejected: {reason}"),
            recover=lambda: self._note("recovered"),
        )

    async def check(self, times: int) -> list[str]:
        for _ in range(times):
            await self.followed.check()
        return self.notes

    def _read(self) -> str:
        if self.faults:
            raise self.faults.pop()
        if self.unreadable is not None:
            raise self.unreadable
        return self.content

    async def _accept(self, content: str) -> None:
        if self.unusable is not None:
            raise self.unusable
        self._note(f"accepted {content}")

    def _note(self, note: str) -> None:
        self.notes.append(note)
        self.news.set()


async def test_content_is_accepted_once_when_two_checks_agree() -> None:
    files = Files()
    files.content = "half"
    assert await files.check(1) == []
    files.content = "new"
    assert await files.check(1) == []
    assert await files.check(3) == ["accepted new"]


async def test_content_that_goes_back_before_it_settles_changes_nothing() -> None:
    files = Files()
    files.content = "new"
    await files.check(1)
    files.content = "old"
    assert await files.check(3) == []


@pytest.mark.parametrize("where", ["unreadable", "unusable"])
async def test_problem_is_reported_once_per_content_and_again_after_a_recovery(where: str) -> None:
    files = Files()
    files.content = "bad"
    setattr(files, where, invalid_input("no PEM"))
    assert await files.check(5) == ["rejected: no PEM"]
    files.content, files.unreadable, files.unusable = "old", None, None
    assert await files.check(3) == ["rejected: no PEM", "recovered"]
    files.content = "bad"
    setattr(files, where, invalid_input("no PEM"))
    assert await files.check(5) == ["rejected: no PEM", "recovered", "rejected: no PEM"]
    files.content, files.unreadable, files.unusable = "new", None, None
    assert (await files.check(3))[3:] == ["accepted new"]


async def test_content_that_is_not_ready_is_tried_again_and_reported_once() -> None:
    files = Files()
    files.content = "early"
    files.unusable = ServeError(ErrorKind.NOT_READY, "not yet")
    assert await files.check(5) == ["rejected: not yet"]
    files.unusable = None
    assert await files.check(3) == ["rejected: not yet", "accepted early"]


async def test_invalid_content_is_not_tried_again() -> None:
    files = Files()
    files.content = "bad"
    files.unusable = invalid_input("no PEM")
    await files.check(2)
    files.unusable = None
    assert await files.check(3) == ["rejected: no PEM"]


async def test_faults_are_reported_once_and_do_not_end_the_checks(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise a key that is removed later would stay valid."""
    files = Files()
    files.content = "new"
    files.faults = [RuntimeError("cannot start another thread") for _ in range(3)]
    following = asyncio.create_task(files.followed.follow(0.001))
    async with asyncio.timeout(LONG_S):
        await files.news.wait()
    following.cancel()
    assert files.notes == ["accepted new"]
    assert [record.getMessage() for record in caplog.records] == ["followed files could not be checked"]


async def test_unsettled_content_is_checked_again_before_a_long_interval_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = Files()
    files.content = "new"
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 4:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await files.followed.follow(3600)
    assert slept == [3600, 1, 3600, 3600]
