"""The server for contract tests of the wire formats."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from golden_calls import contract_server
from servers import ServerProcess


@pytest.fixture(scope="session")
def contract_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[tuple[str, ...]], ServerProcess]]:
    """Starts a ``contract_server`` with each set of flags once, although the files of tests alternate between them."""
    with ExitStack() as stack:

        @cache
        def start(ways: tuple[str, ...]) -> ServerProcess:
            return stack.enter_context(contract_server(tmp_path_factory.mktemp("contract"), *ways))

        yield start


@pytest.fixture(scope="session")
def server(contract_servers: Callable[[tuple[str, ...]], ServerProcess], ways: tuple[str, ...]) -> ServerProcess:
    """See ``contract_server``."""
    return contract_servers(ways)
