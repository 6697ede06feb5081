"""What becomes of content that changes, settles, cannot be used or cannot be had. Looks are taken by hand."""

import asyncio
from typing import Final

import pytest

from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.service.followed_files import FollowedFiles

LONG_S: Final = 30.0
"""A wait that only a failing test sees the end of."""


class Files:
    """Holds a text, and what is to be raised in the place of it or of its use; notes what was made of it."""

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
            take=self._take,
            refuse=lambda reason: self._note(f"refused: {reason}"),
            recover=lambda: self._note("recovered"),
        )

    async def look(self, times: int) -> list[str]:
        for _ in range(times):
            await self.followed.look()
        return self.notes

    def _read(self) -> str:
        if self.faults:
            raise self.faults.pop()
        if self.unreadable is not None:
            raise self.unreadable
        return self.content

    async def _take(self, content: str) -> None:
        if self.unusable is not None:
            raise self.unusable
        self._note(f"took {content}")

    def _note(self, note: str) -> None:
        self.notes.append(note)
        self.news.set()


async def test_content_is_taken_once_when_two_looks_agree() -> None:
    files = Files()
    files.content = "half"
    assert await files.look(1) == []
    files.content = "new"
    assert await files.look(1) == []
    assert await files.look(3) == ["took new"]


async def test_content_that_goes_back_before_it_settles_changes_nothing() -> None:
    files = Files()
    files.content = "new"
    await files.look(1)
    files.content = "old"
    assert await files.look(3) == []


@pytest.mark.parametrize("where", ["unreadable", "unusable"])
async def test_trouble_is_told_once_for_each_content_and_forgotten_when_it_is_over(where: str) -> None:
    files = Files()
    files.content = "bad"
    setattr(files, where, invalid_input("no PEM"))
    assert await files.look(5) == ["refused: no PEM"]
    files.content, files.unreadable, files.unusable = "old", None, None
    assert await files.look(3) == ["refused: no PEM", "recovered"]
    files.content = "bad"
    setattr(files, where, invalid_input("no PEM"))
    assert await files.look(5) == ["refused: no PEM", "recovered", "refused: no PEM"]
    files.content, files.unreadable, files.unusable = "new", None, None
    assert (await files.look(3))[3:] == ["took new"]


async def test_content_that_may_do_later_is_tried_again_and_told_once() -> None:
    files = Files()
    files.content = "early"
    files.unusable = ServeError(ErrorKind.NOT_READY, "not yet")
    assert await files.look(5) == ["refused: not yet"]
    files.unusable = None
    assert await files.look(3) == ["refused: not yet", "took early"]


async def test_content_that_will_never_do_is_not_tried_again() -> None:
    files = Files()
    files.content = "bad"
    files.unusable = invalid_input("no PEM")
    await files.look(2)
    files.unusable = None
    assert await files.look(3) == ["refused: no PEM"]


async def test_faults_are_told_once_and_do_not_end_the_following(caplog: pytest.LogCaptureFixture) -> None:
    """A key that is taken out later would count for ever."""
    files = Files()
    files.content = "new"
    files.faults = [RuntimeError("cannot start another thread") for _ in range(3)]
    following = asyncio.create_task(files.followed.follow(0.001))
    async with asyncio.timeout(LONG_S):
        await files.news.wait()
    following.cancel()
    assert files.notes == ["took new"]
    assert [record.getMessage() for record in caplog.records] == ["followed files could not be looked at"]


async def test_unsettled_content_is_looked_at_again_before_a_long_interval_is_over(
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
