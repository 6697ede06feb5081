"""The console in a real browser: its views, its form, its keys, and its behaviour while the server changes."""

import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import httpx
import numpy as np
import onnx
import onnx.parser
import pytest

pytest.importorskip("playwright", reason="needs playwright")

from playwright.sync_api import Browser, Locator, Page, expect

import console_pictures
from browser import DESKTOP, NEEDS_CHROMIUM, PHONE, chromium, open_page, violations
from held_files import held_file
from http_wire import wait_until
from models import builders
from ortserve.core.dtypes import DataType
from ortserve.example import repository_path
from proxies import free_ports
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, json_input, rest_url, serving, starting

pytestmark = NEEDS_CHROMIUM

expect.set_options(timeout=20_000)

CONTROL = ("--model-control-mode", "explicit", "--load-model", "*")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the server's models."""
    return tmp_path_factory.mktemp("console") / "repository"


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    """Models that serve, and a model whose load failed."""
    shutil.copytree(repository_path(), repository)
    for datatype in DataType:
        add_model(repository, f"identity_{datatype.value.lower()}", builders.identity, datatype=datatype)
    for name in ("pair", "other_pair"):
        add_model(repository, name, builders.identity)
        folder = add_model(repository, name, builders.identity, version=2)
        (folder / "model.yaml").write_text("labels: {stable: 1, next: 2}\n")
    (repository / "renewed.onnx").write_bytes(builders.identity(repository.parent / "renewed").read_bytes())
    add_model(repository, "color", builders.image_classifier)
    (repository / "color" / "model.yaml").write_text("outputs: {scores: {labels: labels.txt}}\n")
    (repository / "color" / "labels.txt").write_text("zero\none\ntwo\nthree\n<b>four</b>\n")
    (repository / "broken.onnx").write_bytes(b"no model")
    flags = (*CONTROL, "--warmup-s", "0.1", "--intra-op-threads", "1")
    with starting(repository, *flags) as server:
        for model in ("digits", "color", "identity_bytes", "identity_fp32", "pair", "renewed"):
            server.wait_for_line("model is ready", f"model={model} ")
        server.wait_for_line("model cannot be served", "model=broken ")
        server.wait_until_loaded()
        yield server
        server.stop()


@pytest.fixture
def patient(server: ServerProcess, repository: Path) -> Iterator[None]:
    """The model ``patient`` keeps loading while the test runs."""
    calls = f"{server.url}/v2/repository/models/patient"
    file = builders.identity(repository / "patient.onnx")
    with ThreadPoolExecutor(1) as threads, held_file(file) as hold:
        loading = threads.submit(httpx.post, f"{calls}/load", timeout=LONG_S)
        wait_until(lambda: hold.is_awaited)
        yield
        hold.release()
        loading.result().raise_for_status()
    httpx.post(f"{calls}/unload", timeout=LONG_S).raise_for_status()
    file.unlink()


@pytest.fixture
def page(browser: Browser, server: ServerProcess) -> Iterator[Page]:
    with open_page(browser, f"{server.url}/") as page:
        yield page


def rows_of(page: Page, table: str = "Models") -> Locator:
    """The rows of a table that is updated in place."""
    return page.get_by_role("region", name=table, exact=True).locator("tbody tr")


def row_of(page: Page, model: str) -> str:
    """Wait for the row of a model in the list. Returns its text."""
    row = rows_of(page).filter(has=page.get_by_role("link", name=model, exact=True))
    row.wait_for()
    return row.inner_text()


def open_model(page: Page, server: ServerProcess, model: str) -> None:
    page.goto(f"{server.url}/#/models/{model}/1")
    page.get_by_role("heading", name=f"{model}, version 1").wait_for()


def png(pixels: np.ndarray) -> bytes:
    """An RGB image as a PNG file."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels.astype(np.uint8))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def memory_bytes(text: str) -> float:
    """The value of a cell such as ``1.42 MiB``; 0 for an empty cell."""
    number, _, unit = text.strip().partition(" ")
    return float(number.replace(",", "")) * 1024 ** ("B", "KiB", "MiB", "GiB").index(unit) if number else 0.0


@pytest.mark.usefixtures("patient")
def test_list_shows_models_that_serve_load_and_fail(page: Page) -> None:
    assert "ready" in row_of(page, "digits")
    expect(page.get_by_text(re.compile(r"loading: waiting for its file, for \d+ s"))).to_be_visible()
    assert "failed: " in row_of(page, "broken")
    expect(page.get_by_text("1 failed")).to_be_visible()


def test_list_is_filtered_and_sorted(page: Page) -> None:
    row_of(page, "digits")
    rows = rows_of(page)
    page.get_by_label("Filter by name, label or state").fill("FAILED")
    expect(rows).to_have_count(1)
    page.get_by_label("Filter by name, label or state").fill("identity_int")
    expect(rows).to_have_count(4)
    assert [row.split("\t")[0] for row in rows.all_inner_texts()] == [f"identity_int{size}" for size in (16, 32, 64, 8)]
    page.get_by_role("button", name="Model", exact=True).click()
    expect(rows.first).to_contain_text("identity_int8")
    expect(page.locator("th[aria-sort]:visible")).to_have_attribute("aria-sort", "descending")
    page.get_by_label("Filter by name, label or state").fill("")
    page.get_by_role("button", name="Memory").click()
    expect(page.locator("th[aria-sort]:visible")).to_contain_text("Memory")
    sizes = [memory_bytes(row.rpartition("\t")[2]) for row in rows.all_inner_texts()]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 0


def test_views_of_a_model_show_live_numbers_and_each_value_with_its_origin(page: Page, server: ServerProcess) -> None:
    open_model(page, server, "identity_fp32")
    expect(page.locator("#connection")).to_have_text("ready")
    document = {"inputs": [json_input("x", np.ones((2, 4), np.float32))]}
    for _ in range(20):
        httpx.post(rest_url(server, "identity_fp32"), json=document, timeout=LONG_S).raise_for_status()
    httpx.post(rest_url(server, "identity_fp32"), json={"inputs": []}, timeout=LONG_S)
    expect(page.get_by_role("img", name=re.compile(r"Batches by number of rows.*2: \d+"))).to_be_visible()
    expect(page.get_by_role("img", name=re.compile(r"L\(n\).*2 rows [\d.]+"))).to_be_visible()
    expect(page.get_by_role("row", name="invalid_input 1 1")).to_be_visible()
    expect(page.get_by_role("row", name="warmup_s 0.1 --warmup-s")).to_be_visible()
    expect(page.get_by_role("row", name=re.compile("max_rows .* learned in warm-up"))).to_be_visible()
    open_model(page, server, "color")
    expect(page.get_by_role("row", name=re.compile("outputs .*labels.txt.* model.yaml"))).to_be_visible()


def test_failed_model_shows_its_reason_and_configuration(page: Page, server: ServerProcess) -> None:
    open_model(page, server, "broken")
    expect(page.get_by_role("status").filter(has_text=re.compile("^failed: "))).to_be_visible()
    expect(page.get_by_role("row", name="warmup_s 0.1 --warmup-s")).to_be_visible()
    expect(page.get_by_role("heading", name="Try it")).to_have_count(0)


@pytest.mark.usefixtures("patient")
def test_loading_model_shows_its_step_and_configuration(page: Page, server: ServerProcess) -> None:
    open_model(page, server, "patient")
    state = page.get_by_role("status").filter(has_text=re.compile(r"^loading: waiting for its file, for \d+ s$"))
    expect(state).to_be_visible()
    before = state.inner_text()
    expect(state).not_to_have_text(before)  # the shown time advances
    expect(page.get_by_role("row", name="warmup_s 0.1 --warmup-s")).to_be_visible()
    expect(page.get_by_role("heading", name="Try it")).to_have_count(0)


def test_server_view_shows_versions_keys_and_options(page: Page, server: ServerProcess) -> None:
    page.get_by_role("link", name="Server").click()
    expect(page.get_by_text("infer: open, metadata: open, control: open, metrics: open")).to_be_visible()
    expect(page.get_by_role("row", name="model_control_mode explicit --model-control-mode")).to_be_visible()
    expect(page.get_by_text(server.http.partition(":")[2])).to_be_visible()
    expect(page.get_by_text(re.compile(r"^\d+ HTTP, \d+ gRPC$"))).to_be_visible()


VALUES = {
    DataType.BYTES: ("a\n<i>ü</i>\n\"c'\nd e", "a <i>ü</i> \"c' d e"),
    DataType.BOOL: ("true false 1 0", "true false true false"),
    DataType.INT64: ("-9223372036854775808 9007199254740993 0 1", "-9223372036854775808 9007199254740993 0 1"),
    DataType.UINT64: ("18446744073709551615 2 3 4", "18446744073709551615 2 3 4"),
}


@pytest.mark.timeout(240)
def test_form_takes_all_datatypes_and_its_code_gives_the_same_answer(
    page: Page, server: ServerProcess, tmp_path: Path
) -> None:
    """One page shows all models, because a new one takes a second of processor time."""
    for datatype in DataType:
        typed, expected = VALUES.get(datatype, ("1 2, 3\n4", "1 2 3 4"))
        values = page.get_by_role("region", name="Values of y", exact=True)
        open_model(page, server, f"identity_{datatype.value.lower()}")
        expect(values, f"the answer before that of {datatype}").to_have_count(0)
        page.get_by_label("Values").fill(typed)
        page.get_by_role("button", name="Run").click()
        expect(values, str(datatype)).to_have_text(expected)
        expect(page.get_by_role("row", name="compute"), str(datatype)).to_be_visible()
        page.get_by_text("This request as code").click()
        command = page.get_by_role("region", name="curl").inner_text()
        answer = subprocess.run(["bash", "-c", command], capture_output=True, check=False, timeout=LONG_S)
        assert (answer.returncode, b'"outputs"' in answer.stdout) == (0, True), (datatype, answer)
        if datatype in (DataType.BYTES, DataType.INT64, DataType.BF16, DataType.BOOL):
            program = tmp_path / "program.py"
            program.write_text(page.get_by_role("region", name="Python").inner_text())
            done = subprocess.run([sys.executable, program], capture_output=True, check=False, timeout=LONG_S)
            assert (done.returncode, done.stdout[:4]) == (0, b"y [["), (datatype, done)


def test_answers_that_are_no_numbers_and_names_with_quotes_are_shown(browser: Browser, tmp_path: Path) -> None:
    name = "it's a log (1)"
    folder = tmp_path / name / "1"
    folder.mkdir(parents=True)
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[n, 4] x) => (float[n, 4] y) { y = Log(x) }'
    onnx.save(onnx.parser.parse_model(text), folder / "model.onnx")
    with serving(tmp_path, *SHORT_WARMUP) as server, open_page(browser, f"{server.url}/") as page:
        page.get_by_role("link", name=name, exact=True).click()
        page.get_by_label("Values").fill("1 0 -1 2")
        page.get_by_role("button", name="Run").click()
        values = page.get_by_role("region", name="Values of y", exact=True)
        expect(values).to_have_text(re.compile(r"^0 -Infinity NaN 0\.6931\d*$"))
        largest = page.get_by_role("region", name="Largest values of y").locator("tbody tr")
        expect(largest).to_have_text(["30.693", "00", "1-∞", "2NaN"])
        page.get_by_text("This request as code").click()
        command = page.get_by_role("region", name="curl").inner_text()
        answer = subprocess.run(["bash", "-c", command], capture_output=True, check=True, timeout=LONG_S)
        assert b'"data":[0.0,-Infinity,NaN,0.6931' in answer.stdout


def test_form_names_wrong_values(browser: Browser, server: ServerProcess) -> None:
    cases = {
        ("identity_int8", "1 2 3 400"): "values of x: expected -128 to 127 for INT8, got '400'",
        ("identity_int8", "1 2 3"): "values of x: expected 4 or a single one, got 3",
        ("identity_fp32", "1 2 3 x"): "values of x: expected a finite number for FP32, got 'x'",
        ("identity_fp32", "1 2 3 1e40"): "got a number beyond its range",
    }
    with open_page(browser, f"{server.url}/", expects_errors=True) as page:
        for (model, typed), problem in cases.items():
            open_model(page, server, model)
            page.get_by_label("Values").fill(typed)
            page.get_by_role("button", name="Run").click()
            expect(page.get_by_role("alert").filter(has_text=problem)).to_be_visible()


def test_image_is_scaled_and_labels_are_never_markup(page: Page, server: ServerProcess, tmp_path: Path) -> None:
    open_model(page, server, "color")
    image = np.full((20, 30, 3), 255, np.uint8)
    (tmp_path / "white.png").write_bytes(png(image))
    page.get_by_label("Image for data").set_input_files(tmp_path / "white.png")
    expect(page.get_by_text(re.compile("^8 . 8$"))).to_be_visible()
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("region", name="Values of scores", exact=True)).to_have_text("1 2 3 4 5")
    expect(page.get_by_role("row", name="4: <b>four</b> 5")).to_be_visible()
    page.evaluate("() => { URL.revokeObjectURL = (url) => { window.revoked = url; }; }")
    first = page.get_by_text("request.json").get_attribute("href")
    page.get_by_label("Scaling of data").select_option("0 to 255")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("region", name="Values of scores", exact=True)).to_have_text("255 256 257 258 259")
    assert page.locator("b").count() == 0
    assert page.evaluate("window.revoked") == first  # the browser keeps only the last body


def draw(page: Page, *strokes: list[tuple[float, float]]) -> None:
    """Draw with the mouse; points are fractions of the pad."""
    pad = page.get_by_role("img", name="Drawing for image")
    pad.scroll_into_view_if_needed()
    box = pad.bounding_box()
    assert box is not None
    for stroke in strokes:
        points = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in stroke]
        page.mouse.move(*points[0])
        page.mouse.down()
        for point in points[1:]:
            page.mouse.move(*point, steps=5)
        page.mouse.up()


def test_drawn_digit_is_recognised(page: Page, server: ServerProcess) -> None:
    open_model(page, server, "digits")
    page.get_by_role("button", name="Clear the drawing").wait_for()
    expect(page.get_by_text("Queued rows")).to_be_visible()  # the page is complete and its layout no longer changes
    angles = np.linspace(0, 2 * np.pi, 25)
    draw(page, [(0.5 + 0.25 * np.sin(angle), 0.5 - 0.35 * np.cos(angle)) for angle in angles])
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("region", name="Values of label", exact=True)).to_have_text("0")
    page.get_by_role("button", name="Clear the drawing").click()
    draw(page, [(0.27, 0.3), (0.35, 0.13), (0.55, 0.1), (0.7, 0.25), (0.6, 0.5), (0.25, 0.9), (0.75, 0.9)])
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("region", name="Values of label", exact=True)).to_have_text("2")


def test_actions_ask_once_and_report_their_outcome(page: Page, server: ServerProcess) -> None:
    open_model(page, server, "simple")
    page.get_by_role("button", name="Unload").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("Unload:")).to_have_count(0)
    page.get_by_role("button", name="Unload").click()
    page.get_by_role("dialog").get_by_role("button", name="Unload").click()
    expect(page.get_by_text(re.compile(r"Unload: done in [\d.]+ s"))).to_be_visible()
    expect(page.get_by_role("status").filter(has_text="gone: unloaded")).to_be_visible()
    page.get_by_role("link", name="All models").click()
    page.get_by_label("Load a model").fill("simple")
    page.get_by_role("button", name="Load").click()
    page.get_by_role("dialog").get_by_role("button", name="Load").click()
    expect(page.get_by_text(re.compile(r"Load: done in [\d.]+ s"))).to_be_visible()
    expect(page.get_by_role("row", name=re.compile("^simple 1 ready"))).to_be_visible()


def act(page: Page, action: str, outcome: str, question: str = "") -> None:
    """Press a button, confirm the question, and wait for the outcome."""
    page.get_by_role("button", name=action).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(question)
    dialog.get_by_role("button", name=action).click()
    expect(page.get_by_text(outcome)).to_be_visible()


def test_version_is_tried_promoted_and_rolled_back(browser: Browser, server: ServerProcess) -> None:
    with open_page(browser, f"{server.url}/#/models/pair/2", expects_errors=True) as page:
        versions = rows_of(page, "Versions")
        expect(versions).to_have_text(["1stableready", "2nextready"])
        act(page, "Roll back", "Roll back: model 'pair' has no promotion to roll back")
        act(page, "Promote", "Stable is version 2.", "Make version 2 of pair stable?")
        expect(versions).to_have_text(["1ready", "2next, stableready"])
        act(page, "Promote", "Promote: version 2 of model 'pair' is already labelled 'stable'")
        act(page, "Roll back", "Stable is version 1.", "Make version 1 of pair stable again?")
        page.get_by_label("Rollout of this version").select_option("canary")
        page.get_by_label("Share in %").fill("100")
        act(page, "Start the rollout", "Version 2 is the candidate: canary with 100 %")
        document = {"inputs": [json_input("x", np.ones((1, 4), np.float32))]}
        for _ in range(20):
            answer = httpx.post(rest_url(server, "pair"), json=document, timeout=LONG_S).raise_for_status()
            assert answer.json()["model_version"] == "2"
        expect(page.get_by_text("20, of which 0 failed")).to_be_visible()
        expect(versions).to_have_text(["1stableready", "2next, candidate: canary 100 %ready"])
        page.get_by_role("link", name="All models").click()
        trial = rows_of(page, "Rollouts").filter(has=page.get_by_role("link", name="pair", exact=True))
        expect(trial).to_have_text(re.compile(r"^pair2canary100 %2000.*running$"))
        page.get_by_label("Filter by name, label or state").fill("candidate")
        expect(rows_of(page)).to_have_count(1)
        trial.get_by_role("link").click()
        act(page, "End the rollout", "The rollout of version 2 has ended.")
        expect(page.get_by_text("version 2 stopped: by a call")).to_be_visible()
        act(page, "End the rollout", "End the rollout: model 'pair' has no rollout")
        page.get_by_label("Share in %").fill("200")
        act(page, "Start the rollout", "Start the rollout: rollout: share: expected")


def test_rules_that_end_a_rollout_are_shown_with_their_reason(page: Page, server: ServerProcess) -> None:
    open_model(page, server, "other_pair")
    page.get_by_label("Rollout of this version").wait_for()
    rules = {"candidate": 2, "mode": "shadow", "share": 1, "rules": {"min_requests": 1, "promote_after": 1}}
    rollout = f"{server.url}/v2/models/other_pair/rollout"
    httpx.put(rollout, json=rules, timeout=LONG_S).raise_for_status()
    expect(page.get_by_text("min_requests 1, promote_after 1")).to_be_visible()
    document = {"inputs": [json_input("x", np.ones((1, 4), np.float32))]}
    for _ in range(100):  # a copy is shed while other requests wait
        httpx.post(rest_url(server, "other_pair"), json=document, timeout=LONG_S).raise_for_status()
        if httpx.get(rollout, timeout=LONG_S).json()["ended"]:
            break
    expect(page.get_by_text(re.compile(r"^version 2 promoted: \d+ requests kept the rules: 0 failed"))).to_be_visible()
    expect(rows_of(page, "Versions").last).to_contain_text("stable")


def test_models_that_are_not_in_memory_are_no_failures(browser: Browser) -> None:
    flags = ("--warmup-s", "0.1", "--load-policy", "on_demand", "--memory-budget-bytes", str(2**30))
    with serving("--example", *flags) as server, open_page(browser, f"{server.url}/") as page:
        assert "not in memory: the next request loads it" in row_of(page, "digits")
        expect(page.get_by_text(re.compile("^3 versions, 0 ready, 3 not in memory, 0 failed"))).to_be_visible()
        page.get_by_role("link", name="digits").click()
        expect(page.get_by_text("nothing of its own")).to_be_visible()
        state = page.locator("main").get_by_role("status").first
        expect(state).to_have_class("soft")
        image = json_input("image", np.zeros((1, 1, 8, 8), np.float32))
        httpx.post(rest_url(server, "digits"), json={"inputs": [image]}, timeout=LONG_S).raise_for_status()
        expect(state).to_have_text("ready")
        expect(page.get_by_text("Sessions, with weights and the graph")).to_be_visible()
        page.get_by_role("link", name="Server").click()
        expect(page.get_by_text(re.compile(r"^\d.* of 1 GiB, [\d.]+ % of the budget$"))).to_be_visible()


def test_reload_shows_its_step_and_its_failure_beside_the_version_that_serves(
    browser: Browser, server: ServerProcess, repository: Path
) -> None:
    file = repository / "renewed.onnx"
    with open_page(browser, f"{server.url}/#/models/renewed/1", expects_errors=True) as page:
        state = page.locator("main").get_by_role("status").first
        expect(state).to_have_text("ready")
        file.write_bytes(b"no model")
        with held_file(file):
            act(page, "Reload", "Reload: under way")
            expect(state).to_have_text(re.compile(r"^ready; reloading: .+, for \d+ s$"))
            expect(state).to_have_class("warn")
        expect(page.get_by_text(re.compile("^Reload: load failed for model 'renewed'"))).to_be_visible()
        expect(state).to_have_text(re.compile("^ready; latest problem: "))


def test_log_level_is_changed(page: Page, server: ServerProcess) -> None:
    page.get_by_role("link", name="Server").click()
    for level in ("error", "info"):
        page.get_by_label("Lowest severity that is logged").select_option(level)
        page.get_by_role("button", name="Change").click()
        page.get_by_role("dialog").get_by_role("button", name="Change").click()
        expect(page.get_by_text(f"The log level is {level}.")).to_be_visible()
        assert httpx.get(f"{server.url}/v2/logging", timeout=LONG_S).json()["log_info"] is (level == "info")


@pytest.mark.parametrize(
    ("view", "scheme", "size"),
    [
        ("models", "light", DESKTOP),
        ("models", "dark", PHONE),
        ("models/digits/1", "light", PHONE),
        ("models/digits/1", "dark", DESKTOP),
        ("models/broken/1", "light", DESKTOP),
        ("server", "dark", PHONE),
    ],
)
def test_views_are_accessible_and_fit(
    browser: Browser, server: ServerProcess, view: str, scheme: Literal["light", "dark"], size: tuple[int, int]
) -> None:
    with open_page(browser, f"{server.url}/#/{view}", size=size, scheme=scheme) as page:
        page.locator("td").first.wait_for()
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]


@pytest.mark.parametrize(("scheme", "size"), [("light", DESKTOP), ("dark", PHONE)])
def test_page_of_the_api_is_legible_in_the_scheme_of_the_system(
    browser: Browser, server: ServerProcess, scheme: Literal["light", "dark"], size: tuple[int, int]
) -> None:
    with open_page(browser, f"{server.url}/docs", size=size, scheme=scheme) as page:
        page.get_by_text("/v2/repository/index").first.click()
        page.get_by_text("Try it out").first.wait_for()
        assert [one for one in violations(page) if not one.startswith(("heading-order", "region"))] == []
        background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (background == "rgba(0, 0, 0, 0)") is (scheme == "light")
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]


def test_keyboard_reaches_the_content_and_opens_a_model(page: Page) -> None:
    row_of(page, "broken")
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Skip to the content")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_attribute("id", "filter")
    page.keyboard.type("digits")
    page.get_by_role("link", name="digits").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="digits, version 1")).to_be_visible()


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    """A file with a key for each group."""
    files = {}
    for group in ("metadata", "infer", "control"):
        files[group] = tmp_path / group
        files[group].write_text(f"{group}-key-{'x' * 32}\n")
    return files


def test_keys_are_asked_for_and_kept_in_memory_only(browser: Browser, keys: dict[str, Path]) -> None:
    flags = [part for group, path in keys.items() for part in (f"--{group}-keys-file", path)]
    with (
        serving("--example", "--warmup-s", "0.1", *CONTROL, *flags) as server,
        open_page(browser, f"{server.url}/#/models/text_stats/1", expects_errors=True) as page,
    ):
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Key of the group metadata").fill("wrong")
        dialog.get_by_role("button", name="Use").click()
        expect(dialog.get_by_text("got an unknown key")).to_be_visible()
        dialog.get_by_label("Key of the group metadata").fill(keys["metadata"].read_text().strip())
        dialog.get_by_role("button", name="Use").click()
        expect(page.locator("#connection")).to_have_text("ready")
        page.get_by_role("button", name="Run").click()
        dialog.get_by_label("Key of the group infer").fill(keys["infer"].read_text().strip())
        dialog.get_by_role("button", name="Use").click()
        expect(page.get_by_role("heading", name="Answer")).to_be_visible()
        page.get_by_role("button", name="Reload").click()
        dialog.get_by_role("button", name="Reload").click()
        dialog.get_by_label("Key of the group control").fill(keys["control"].read_text().strip())
        dialog.get_by_role("button", name="Use").click()
        expect(page.get_by_text(re.compile("Reload: done"))).to_be_visible()
        stored = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
        assert stored == [0, 0, ""]
        page.reload()
        expect(dialog.get_by_label("Key of the group metadata")).to_have_value("")


def test_page_connects_again_to_a_server_that_restarts(browser: Browser) -> None:
    port = ""
    with serving("--example", "--warmup-s", "0.1") as first:
        port = first.http.partition(":")[2]
        with open_page(browser, f"{first.url}/#/models/digits/1", expects_errors=True) as page:
            expect(page.locator("#connection")).to_have_text("ready")
            first.stop()
            expect(page.get_by_role("alert")).to_contain_text("No live data: ")
            ports = ("--http-port", port, "--grpc-port", "0", "--metrics-port", "0")
            with serving("--example", "--warmup-s", "0.1", *ports):
                expect(page.locator("#connection")).to_have_text("ready")
                expect(page.get_by_role("alert")).to_be_hidden()


def test_list_of_500_models_stays_smooth(browser: Browser, server: ServerProcess) -> None:
    """All 500 rows change each second; no update may block the page for a noticeable time."""
    with open_page(browser, f"{server.url}/") as page:
        row_of(page, "digits")
        longest_ms = page.evaluate(
            """async () => {
              const { Live } = await import("/console/js/live.js");
              const { ModelsView } = await import("/console/js/models_view.js");
              const live = new Live();
              const view = new ModelsView(live);
              document.getElementById("view").replaceChildren(view.element);
              const row = (number, rate) => ({name: `model_${number}`, version: "1", state: "READY", why: "",
                labels: ["stable"], reload: "", memory: 1, file_bytes: 1,
                platform: "p", provider: "CPU", elsewhere: "", rate, p50: rate, p99: rate, batch: 1, queue: 0,
                refused: 0, failed: 0, saturation: 0});
              let longest = 0;
              for (let update = 0; update < 6; update += 1) {
                for (let number = 0; number < 500; number += 1) {
                  live.models.set(String(number), row(number, update + number));
                }
                live.dispatchEvent(new CustomEvent("models", {detail: {}}));
                const began = performance.now();
                await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
                if (update) longest = Math.max(longest, performance.now() - began);
              }
              return longest;
            }"""
        )
        expect(rows_of(page)).to_have_count(500)
        assert longest_ms < 1000, longest_ms  # 60 ms on an idle machine


@pytest.fixture
def below_a_path(server: ServerProcess, tmp_path: Path) -> Iterator[str]:
    """The address of the server behind a real nginx that adds a path to it, as an Ingress does."""
    if (nginx := shutil.which("nginx")) is None:
        pytest.skip("needs nginx")
    port = free_ports().http
    user = "user root;" if os.geteuid() == 0 else ""
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; pid {tmp_path}/pid; {user} events {{}} http {{ access_log off; server {{ listen 127.0.0.1:{port};"
        f"location /team/models/ {{ proxy_http_version 1.1; proxy_pass {server.url}/; }} }} }}"
    )
    started = [nginx, "-p", str(tmp_path), "-e", str(tmp_path / "log"), "-c", str(tmp_path / "nginx.conf")]
    with subprocess.Popen(started) as process:
        address = f"http://127.0.0.1:{port}/team/models"
        with httpx.Client(transport=httpx.HTTPTransport(retries=8), timeout=LONG_S) as client:
            assert client.get(f"{address}/v2").status_code == 200
        yield address
        process.terminate()


def test_pages_work_below_a_path_of_a_proxy(browser: Browser, below_a_path: str) -> None:
    with open_page(browser, f"{below_a_path}/#/models/identity_fp32/1") as page:
        page.get_by_label("Values").fill("1 2 3 4")
        page.get_by_role("button", name="Run").click()
        expect(page.get_by_role("region", name="Values of y", exact=True)).to_have_text("1 2 3 4")
        page.get_by_text("This request as code").click()
        command = page.get_by_role("region", name="curl").inner_text()
        assert command.startswith(f"curl -s {below_a_path}/v2/models/identity_fp32")
        address = below_a_path.removeprefix("http://")
        expect(page.get_by_role("region", name="Python")).to_contain_text(f'InferenceServerClient("{address}")')
    with open_page(browser, f"{below_a_path}/docs") as page:
        expect(page.get_by_role("button", name="POST /v2/models/{model}/infer", exact=False).first).to_be_visible()


def test_api_documentation_works_without_a_network(browser: Browser, server: ServerProcess) -> None:
    with open_page(browser, f"{server.url}/docs") as page:
        page.get_by_role("button", name="POST /v2/models/{model}/infer", exact=False).first.click()
        expect(page.get_by_text("Run the version of the model that is labelled").first).to_be_visible()


def test_pictures_of_the_documentation_can_be_taken(browser: Browser, tmp_path: Path) -> None:
    console_pictures.take(browser, tmp_path, load_s=0.2)

    taken = {file.name: picture_size(file) for file in tmp_path.iterdir()}
    assert taken == {file.name: picture_size(file) for file in console_pictures.FOLDER.iterdir()}


def picture_size(file: Path) -> tuple[int, int]:
    """Width and height of a PNG file."""
    width, height = struct.unpack(">II", file.read_bytes()[16:24])
    return width, height


def test_malformed_address_shows_a_view_all_the_same(browser: Browser, server: ServerProcess) -> None:
    with open_page(browser, f"{server.url}/#/%E0%") as page:
        expect(page.get_by_role("heading", name="Models", exact=True)).to_be_visible()
        expect(rows_of(page)).not_to_have_count(0)
