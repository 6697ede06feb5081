"""The server that the wire's contract is held against."""

from collections.abc import Iterator

import pytest

from models import builders
from ortserve.core.dtypes import DataType
from servers import SHORT_WARMUP, ServerProcess, add_model, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, ways: tuple[str, ...]) -> Iterator[ServerProcess]:
    """The example models, one whose runs can be made to fail (``poison``) and one that cannot load (``broken``).

    ``echo`` and ``echo_text`` answer rows of any number of FP32 or BYTES elements as they came.
    """
    repository = tmp_path_factory.mktemp("contract")
    add_model(repository, "poison", builders.poison)
    add_model(repository, "broken", builders.not_onnx)
    add_model(repository, "echo", builders.identity, shape=("batch", "n"))
    add_model(repository, "echo_text", builders.identity, datatype=DataType.BYTES, shape=("batch", 1))
    with serving(repository, "--example", *SHORT_WARMUP, *ways) as server:
        yield server
