"""Values of options as text, without folders and credentials."""

from pathlib import Path

import pytest

from ortserve.config.model import QueuePolicy
from ortserve.config.repository_url import parse_repository
from ortserve.config.shown_values import show_value


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "unset"),
        (True, "on"),
        (0.5, "0.5"),
        ((), "none"),
        (QueuePolicy(), "default"),
        (QueuePolicy(max_requests=3), '{"max_requests": 3}'),
        (Path("/etc/secret-folder/keys"), "keys"),
        ("/srv/secret-folder/model.onnx", "model.onnx"),
        ((Path("/srv/secret-folder/a"), Path("b")), '["a", "b"]'),
        ({"cuda": {"user_compute_stream": "/secret-folder/x"}}, '{"cuda": {"user_compute_stream": "x"}}'),
        ("https://user:secret@collector:4318/v1?token=secret", "collector:4318"),
        ("http://collector?token=secret", "collector"),
        ("http://collector?token=@secret", "collector"),
        ("s3://bucket/a@b/model", "bucket"),
        ((parse_repository("s3://bucket/secret-folder"), Path("/srv/models")), '["bucket", "models"]'),
        ((parse_repository("hf://owner/model@revision"),), '["owner/model"]'),
    ],
    ids=str,
)
def test_value_is_shown_without_folders_and_credentials(value: object, shown: str) -> None:
    assert show_value(value) == shown
