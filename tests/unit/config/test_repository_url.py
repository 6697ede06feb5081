"""Addresses of repositories: folders and URLs of stores."""

from pathlib import Path

import pytest

from ortserve.config.options import OptionsError, read_options
from ortserve.config.repository_url import RepositoryUrl, parse_repository

DIGEST = "0" * 64


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("s3://bucket", ("s3", "bucket", "", "")),
        ("s3://bucket/some/models/", ("s3", "bucket", "some/models", "")),
        ("gs://bucket/models", ("gs", "bucket", "models", "")),
        ("az://container/models", ("az", "container", "models", "")),
        ("https://example.com:8443/a/models.tar", ("https", "example.com:8443", "a/models.tar", "")),
        (f"http://example.com/models.tgz#sha256={DIGEST}", ("http", "example.com", "models.tgz", DIGEST)),
    ],
)
def test_urls_are_split(text: str, parts: tuple[str, ...]) -> None:
    found = parse_repository(text)
    assert isinstance(found, RepositoryUrl)
    assert (found.scheme, found.host, found.path, found.sha256) == parts
    assert str(found) == text


def test_folders_stay_folders() -> None:
    assert parse_repository("models") == Path("models")
    assert parse_repository("s3:/models") == Path("s3:/models")


@pytest.mark.parametrize(
    "text",
    [
        "ftp://host/models.tar",
        "s3://",
        "s3://bucket/../other",
        "https://host/models.zip",
        "https://host/models.tar.zst",
        "https:///models.tar",
        "https://host/models.tar#sha256=1",
        "http://host/models.tar",
    ],
)
def test_other_urls_are_refused_with_the_expected_forms(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_repository(text)


@pytest.mark.parametrize("text", ["s3://key:secret@bucket/models", "https://host/models.tar?signature=secret"])
def test_credentials_in_a_url_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(OptionsError) as caught:
        read_options({"repositories": [text]})
    assert "expected a URL without user, password or query" in str(caught.value)
    assert "secret" not in str(caught.value)
