"""Large binary tensors are not copied on their way in, and once on their way out: what ``loadtests/codec_cost.py``
counts before it measures.
"""

from dataclasses import replace

import pytest

import codec_cost

ARMS = {f"{arm.name} {arm.size}": arm for arm in codec_cost.arms_of("600 KB", codec_cost.SIZES["600 KB"])}


@pytest.mark.parametrize("name", ARMS)
def test_tensor_comes_right_and_is_copied_no_more_than_it_must(name: str) -> None:
    read, written = codec_cost.check(ARMS[name])
    if ARMS[name].decode_copies is not None:
        assert (read, round(written, 1)) == (0, 1)


def test_copy_too_many_is_found_out() -> None:
    arm = next(arm for arm in ARMS.values() if arm.encode_copies == 1)
    with pytest.raises(SystemExit, match="were allocated for 0 copies"):
        codec_cost.check(replace(arm, encode_copies=0))


def test_figures_are_printed_for_every_encoding(capsys: pytest.CaptureFixture[str]) -> None:
    codec_cost.main(["--rounds", "1", "--seconds", "0.0001", "--sizes", "1 KB"])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:12].strip() for line in lines[2:]] == ["REST JSON", "REST binary", "gRPC raw"]
