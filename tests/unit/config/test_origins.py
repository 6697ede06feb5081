"""The origin of each of the server's options."""

import os
from pathlib import Path

import pytest

from ortserve.config.options import read_options_and_origins


def test_origin_is_the_source_whose_value_is_in_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("warmup_s: 1\nslo_s: 2\nhttp_port: 8100\n")
    monkeypatch.setenv("ORTSERVE_SLO_S", "3")
    monkeypatch.setenv("ORTSERVE_HTTP_PORT", "8200")
    monkeypatch.setenv("ORTSERVE_GRPC_PORT", "")
    flags = {"http_port": "8300", "repositories": ("models",)}
    options, origins = read_options_and_origins(flags, file)
    assert (options.warmup_s, options.slo_s, options.http_port) == (1, 3, 8300)
    assert origins == {
        "repositories": "command line",
        "http_port": "--http-port",
        "slo_s": "ORTSERVE_SLO_S",
        "warmup_s": "options.yaml",
    }


def test_file_that_a_variable_names_is_an_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "options.yaml").write_text("warmup_s: 1\n")
    monkeypatch.setenv("ORTSERVE_CONFIG", str(tmp_path / "options.yaml"))
    assert read_options_and_origins({})[1] == {"warmup_s": "options.yaml"}


def test_file_may_be_a_pipe_which_can_be_read_only_once() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"warmup_s: 1\n")
    os.close(write_end)
    options, origins = read_options_and_origins({}, Path(f"/dev/fd/{read_end}"))
    os.close(read_end)
    assert (options.warmup_s, origins) == (1, {"warmup_s": str(read_end)})
