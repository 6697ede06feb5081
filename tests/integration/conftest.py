"""Servers shared by tests. Tests that count requests, overload or stop a server start their own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from models import builders
from ortserve.core.dtypes import DataType
from servers import SHORT_WARMUP, ServerProcess, add_model, serving


@pytest.fixture(scope="session")
def example_server() -> Iterator[ServerProcess]:
    """The bundled example repository, as ``ortserve serve --example`` serves it."""
    with serving("--example", *SHORT_WARMUP) as server:
        yield server


@pytest.fixture(scope="session")
def zoo_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ServerProcess]]:
    """Starts a ``zoo_server`` with each gRPC transport once, although the files of tests alternate between them."""
    repository = tmp_path_factory.mktemp("zoo")
    for datatype in DataType:
        add_model(repository, f"identity_{datatype.value.lower()}", builders.identity, datatype=datatype)
    for build in (
        builders.fixed_batch,
        builders.mlp,
        builders.refuses_synthetic,
        builders.row_mixer,
        builders.scalar_sum,
        builders.two_batch_names,
        builders.unnamed_dims,
        builders.variable_length,
    ):
        add_model(repository, build.__name__, build)
    with ExitStack() as stack:

        @cache
        def start(grpc_transport: str) -> ServerProcess:
            flags = (*SHORT_WARMUP, f"--grpc-transport={grpc_transport}")
            return stack.enter_context(serving(repository, *flags))

        yield start


@pytest.fixture(scope="session")
def zoo_server(zoo_servers: Callable[[str], ServerProcess], grpc_transport: str) -> ServerProcess:
    """Tiny models of every kind, all of them valid; ``identity_<datatype>`` for each datatype."""
    return zoo_servers(grpc_transport)
