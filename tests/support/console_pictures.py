"""Takes the pictures of ``docs/console.md``; as a script it replaces them, a test takes them elsewhere."""

import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Final

import httpx
import numpy as np
from playwright.sync_api import Browser

from browser import PHONE, chromium, open_page
from ortserve.example import repository_path
from servers import serving

FOLDER: Final = Path(__file__).parents[2] / "docs" / "console"
LOAD_S: Final = 75
SIZE: Final = (1100, 700)
DIGITS: Final = """\
labels: {stable: 1}
rollout: {candidate: 2, mode: shadow, share: 0.5, rules: {max_disagreement: 0.01, max_p99_ratio: 20}}
"""


def send(url: str, ends: Event) -> None:
    """Send requests of varying sizes to two of the example models, a few of them invalid."""
    rng = np.random.default_rng(0)
    with httpx.Client(base_url=url, timeout=30) as client:
        while not ends.is_set():
            rows = int(rng.choice([1, 1, 1, 2, 4, 8]))
            image = rng.integers(0, 17, (rows, 1, 8, 8)).tolist()
            inputs = [{"name": "image", "shape": [rows, 1, 8, 8], "datatype": "FP32", "data": image}]
            client.post("/v2/models/digits/infer", json={"inputs": inputs})
            if rng.random() < 0.3:
                numbers = [
                    {"name": name, "shape": [rows, 16], "datatype": "INT32", "data": [1] * 16 * rows}
                    for name in ("INPUT0", "INPUT1")
                ]
                client.post("/v2/models/simple/infer", json={"inputs": numbers})
            if rng.random() < 0.02:
                client.post("/v2/models/digits/infer", json={"inputs": []})
            time.sleep(float(rng.exponential(0.01)))


def take(browser: Browser, folder: Path, load_s: float) -> None:
    """Take all pictures into a folder, from a server that has answered requests for ``load_s``.

    Charts of later pictures also fill for ``load_s``, but at most 3 s.
    """
    ends = Event()
    temporary = tempfile.TemporaryDirectory()
    repository = Path(temporary.name) / "repository"
    shutil.copytree(repository_path(), repository)
    shutil.copytree(repository / "digits" / "1", repository / "digits" / "2")
    (repository / "digits" / "model.yaml").write_text(DIGITS)
    (repository / "text_stats" / "model.yaml").write_text("load_policy: on_demand\n")
    with temporary, serving(repository) as server, ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(send, server.url, ends)
        try:
            with open_page(browser, f"{server.url}/#/models/digits/1", size=SIZE) as page:
                time.sleep(load_s)
                page.screenshot(path=folder / "model.png")
                pad = page.get_by_role("img", name="Drawing for image")
                pad.scroll_into_view_if_needed()
                box = pad.bounding_box()
                assert box is not None
                stroke = [(0.3, 0.12), (0.7, 0.12), (0.5, 0.42), (0.7, 0.6), (0.6, 0.85), (0.3, 0.88)]
                points = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in stroke]
                page.mouse.move(*points[0])
                page.mouse.down()
                for point in points[1:]:
                    page.mouse.move(*point, steps=5)
                page.mouse.up()
                page.get_by_role("button", name="Run").click()
                page.get_by_role("heading", name="Answer").wait_for()
                pad.evaluate("element => element.scrollIntoView({block: 'start'})")
                page.screenshot(path=folder / "try.png")
                page.get_by_role("heading", name="Actions").evaluate("element => element.scrollIntoView()")
                page.screenshot(path=folder / "rollout.png")
                page.get_by_role("link", name="Models", exact=True).click()
                time.sleep(min(load_s, 2))
                page.screenshot(path=folder / "models.png", clip={"x": 0, "y": 0, "width": SIZE[0], "height": 560})
            with open_page(browser, f"{server.url}/#/models/digits/1", size=PHONE, scheme="dark") as page:
                time.sleep(min(load_s, 3))
                page.screenshot(path=folder / "phone.png")
        finally:
            ends.set()


if __name__ == "__main__":
    with chromium() as started:
        take(started, FOLDER, LOAD_S)
