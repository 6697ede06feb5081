"""Large binary tensors are not copied when read, and copied once when written.

``loadtests/codec_cost.py`` counts the copies before it measures.
"""

from dataclasses import replace
from pathlib import Path

import pytest

import codec_cost


@pytest.fixture(scope="module")
def arms() -> list[codec_cost.Arm]:
    return codec_cost.arms_of("600 KB", codec_cost.SIZES["600 KB"])


def test_tensors_are_correct_and_copied_as_often_as_stated(arms: list[codec_cost.Arm]) -> None:
    for arm in arms:
        read, written = codec_cost.check(arm)
        if arm.decode_copies is not None:
            assert (read, round(written, 1)) == (0, 1), arm.name


def test_excess_copy_is_detected(arms: list[codec_cost.Arm]) -> None:
    arm = next(arm for arm in arms if arm.encode_copies == 1)
    with pytest.raises(SystemExit, match="were allocated for 0 copies"):
        codec_cost.check(replace(arm, encode_copies=0))


def test_report_has_figures_of_every_encoding(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    sizes = ("1 KB", "600 KB")
    codec_cost.main(["--rounds", "1", "--seconds", "0.0001", "--report", str(report), "--sizes", *sizes])
    text = report.read_text()
    assert capsys.readouterr().out == text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    encodings = ["REST JSON", "REST binary", "gRPC raw", "gRPC typed"]
    assert [row[0].strip("| ") for row in rows if row[1] in sizes and len(row) == 6] == [
        *(encodings * 2),
        *(name for name in encodings for _ in ("read", "written")),
    ]


def test_wait_shows_how_long_a_call_keeps_the_interpreter() -> None:
    numbers = list(range(3_000_000))
    with codec_cost.server_switch_interval():
        kept = codec_cost.wait(lambda: numbers.index(-1) if -1 in numbers else None)
    assert kept.longest > kept.took / 2
