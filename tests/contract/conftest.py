"""The server that the wire's contract is held against."""

from collections.abc import Iterator

import pytest

from golden_calls import contract_server
from servers import ServerProcess


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, ways: tuple[str, ...]) -> Iterator[ServerProcess]:
    """See ``contract_server``."""
    with contract_server(tmp_path_factory.mktemp("contract"), *ways) as server:
        yield server
