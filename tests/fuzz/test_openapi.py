"""The server conforms to its OpenAPI document, as checked by Schemathesis."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from servers import SHORT_WARMUP, serving

EXAMPLES = os.environ.get("ORTSERVE_TEST_OPENAPI_EXAMPLES", "3")


@pytest.mark.timeout(400)  # the cases of `make fuzz` take a minute on an idle machine
def test_every_operation_conforms_to_the_openapi_document(tmp_path: Path) -> None:
    # The document does not state whether an operator has enabled an operation: 501 and 503 say that it is disabled.
    settings = '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "501", "503"]\n'
    (tmp_path / "schemathesis.toml").write_text(settings)  # Schemathesis reads it from the working folder
    with serving("--example", *SHORT_WARMUP) as server:
        command = [str(Path(sys.executable).with_name("st")), "run", f"http://{server.http}/openapi.json"]
        # The document does not describe the inputs of a model, so a conforming request may be rejected.
        flags = ["--exclude-checks", "positive_data_acceptance", "--max-examples", EXAMPLES, "--seed", "1"]
        run = subprocess.run([*command, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stdout + run.stderr
        assert "Traceback" not in server.output
