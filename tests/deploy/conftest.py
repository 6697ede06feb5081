"""Fixtures for the tests of manifests."""

from collections.abc import Iterator
from functools import cache

import kubernetes_validate.utils
import pytest


@pytest.fixture(scope="session", autouse=True)
def schemas_read_once() -> Iterator[None]:
    """Cache the schemas: ``kubernetes_validate`` parses two files per document, in 40 of a validation's 60 ms."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("schema_contents", "all_versions"):
            patch.setattr(kubernetes_validate.utils, name, cache(getattr(kubernetes_validate.utils, name)))
        yield
