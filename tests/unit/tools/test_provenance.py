import hashlib
import json
from pathlib import Path

import pytest

from models import builders
from ortserve.core.agreement import Agreement, OutputError
from ortserve.tools.provenance import (
    command_line,
    describe_model,
    make_provenance,
    read_provenance,
    write_provenance,
)
from ortserve.tools.speed import Speed
from ortserve.tools.statistics import Estimate
from ortserve.tools.subject import find_model

AGREEMENT = Agreement(301, (OutputError("y", 0.0123, 0.02, 0.001, 0.01),), 0.97, 0.98)


def test_the_digest_of_a_file_is_its_sha256_and_external_data_counts(tmp_path: Path) -> None:
    mlp = builders.mlp(tmp_path / "mlp.onnx")
    found = describe_model(mlp, "mlp", None)
    assert found.digest == hashlib.sha256(mlp.read_bytes()).hexdigest()
    assert found.nbytes == mlp.stat().st_size
    external = builders.external_weights(tmp_path / "external.onnx", "weights.bin")
    digests = set()
    for weights in (bytes(16), bytes(15) + b"x"):
        (tmp_path / "weights.bin").write_bytes(weights)
        digests.add(describe_model(external, "external", None).digest)
    assert len(digests) == 2


def test_a_provenance_is_written_and_read_and_continued(tmp_path: Path) -> None:
    first, second = builders.mlp(tmp_path / "first.onnx"), builders.mlp(tmp_path / "second.onnx", seed=1)
    speed = Speed(1.0, 1.0, 10, Estimate(1.42, 1.38, 1.47), 1000, 0.1)
    made = make_provenance(
        find_model(str(first)),
        second,
        arguments=("quantize", str(first), "-o", str(second)),
        notes=("only for this machine's processor",),
        agreement=AGREEMENT,
        inputs="data.npz: 301 samples",
        speed=speed,
        figures={"excluded nodes": 3},
    )
    write_provenance(made, tmp_path / "second.provenance.json")
    assert read_provenance(second) == made
    assert made.summary == (
        f"from first.onnx (sha256 {hashlib.sha256(first.read_bytes()).hexdigest()[:12]}), by ortserve quantize "
        f"first.onnx -o second.onnx, on {made.created}, largest error 0.0123, top-1 0.0100, 301 samples (data.npz: 301 "
        "samples), accuracy 97.00%, source 98.00%, 1.42 times as fast (1.38 to 1.47), only for this machine's processor"
    )
    third = builders.mlp(tmp_path / "third.onnx", seed=2)
    later = make_provenance(find_model(str(second)), third, arguments=("optimize", "second.onnx"))
    assert later.commands == (*made.commands, "ortserve optimize second.onnx")
    assert str(tmp_path) not in json.dumps([made.commands, later.commands, made.source.name])


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": "ortserve.provenance/1"}'])
def test_a_malformed_provenance_is_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / "m.provenance.json").write_text(content)
    assert read_provenance(tmp_path / "m.onnx") is None


def test_command_lines_have_no_folders(tmp_path: Path) -> None:
    repository = tmp_path / "models" / "digits" / "2"
    repository.mkdir(parents=True)
    words = (
        "tune",
        str(repository),
        f"--inputs={tmp_path}/data.npz",
        "--keep",
        "/encoder/MatMul",
        "--max-error",
        "0.1",
    )
    assert command_line(words) == "ortserve tune digits/2 --inputs=data.npz --keep /encoder/MatMul --max-error 0.1"
