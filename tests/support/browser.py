"""Debian's Chromium, headless, driven by Playwright; pages that contact another host than the server fail."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM: Final = shutil.which("chromium")
NEEDS_CHROMIUM: Final = pytest.mark.skipif(CHROMIUM is None, reason="needs the Debian package chromium")

PHONE: Final = (390, 844)
DESKTOP: Final = (1280, 900)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser for the pages of a module."""
    with sync_playwright() as playwright:
        # Without a sandbox, because tests may run as root in a container; all pages are ortserve's.
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield browser
        browser.close()


@contextmanager
def open_page(
    browser: Browser,
    url: str,
    *,
    size: tuple[int, int] = DESKTOP,
    scheme: Literal["light", "dark"] = "light",
    expects_errors: bool = False,
) -> Iterator[Page]:
    """Open a page without stored data of other pages. At its end there must be no error and no request to another host.

    Args:
        browser: The browser that opens the page.
        url: The first address.
        size: The size of the window.
        scheme: The color scheme of the system.
        expects_errors: Whether the test includes rejected calls, which browsers log as errors.
    """
    width, height = size
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(20_000)
    hosts: set[str] = set()
    faults: list[str] = []
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    try:
        page.goto(url)
        yield page
        assert hosts - {""} == {urlsplit(url).netloc}, hosts
        rejected = ("Failed to load resource", "net::ERR")
        unexpected = [fault for fault in faults if not (expects_errors and any(text in fault for text in rejected))]
        assert not unexpected, unexpected
    finally:
        context.close()


def violations(page: Page, *rules: str) -> list[str]:
    """The violations of these rules, by default of all, that axe-core finds on the page, by rule and element."""
    only = {"runOnly": rules} if rules else {}
    # The page's policy forbids inline scripts, so axe is evaluated through the debugger's protocol.
    found: dict[str, Any] = Axe().run(page, options={"resultTypes": ["violations"], **only}).response
    return [f"{one['id']}: {node['target']}" for one in found["violations"] for node in one["nodes"]]
