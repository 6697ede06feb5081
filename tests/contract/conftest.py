"""The server that the wire's contract is held against."""

from collections.abc import Iterator

import pytest

from models import builders
from servers import SHORT_WARMUP, ServerProcess, add_model, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, ways: tuple[str, ...]) -> Iterator[ServerProcess]:
    """The example models, one whose runs can be made to fail (``poison``) and one that cannot load (``broken``)."""
    repository = tmp_path_factory.mktemp("contract")
    add_model(repository, "poison", builders.poison)
    add_model(repository, "broken", builders.not_onnx)
    with serving(repository, "--example", *SHORT_WARMUP, *ways) as server:
        yield server
