"""Writes ``contract/golden.json``: requests as clients write them and the server's answers, frozen.

The file contains the codecs' encoding of tensors. ``golden_calls`` and a server write ``contract/golden_calls.json``
with all other calls in the same run. A change of these files is a change of the wire format. Run it from the
repository's root, and read the difference:

    PYTHONPATH=server:tests/support python tests/support/golden_bytes.py
"""

import json
import tempfile
from pathlib import Path
from typing import Any, Final

import golden_calls
import wire
from ortserve.codecs.grpc_answer import GrpcEncoder
from ortserve.codecs.rest import RestEncoder
from ortserve.core.request import InferRequest, InferResponse, RequestedOutput
from ortserve.core.tensor import Tensor

PAGE: Final = Path(__file__).parents[1] / "contract" / "golden.json"


def answers(response: InferResponse) -> dict[str, wire.Body]:
    """The server's answers in every encoding."""
    made = {}
    for form in ("json", "binary"):
        request = InferRequest("m", "3", "7", [], [RequestedOutput("y", binary=form == "binary")], {})
        encoded = RestEncoder().encode(request, response)
        made[f"rest_{form}"] = wire.Body(bytes(encoded.body), encoded.json_size)
    return made | {"grpc": wire.Body(bytes(GrpcEncoder().encode(request, response)))}


def spell(body: wire.Body) -> dict[str, Any]:
    """A body for JSON: readable bytes as text, other bytes as hexadecimal digits."""
    size = body.json_size
    try:
        spelled: dict[str, Any] = {"text": body.data.decode()} if body.data[:1] == b"{" and size is None else {}
    except UnicodeDecodeError:
        spelled = {}
    if not spelled:
        spelled = {"hex": body.data.hex()}
    return spelled if size is None else spelled | {"json_size": size}


def read(spelled: dict[str, Any]) -> wire.Body:
    """The body from the result of ``spell``."""
    data = spelled["text"].encode() if "text" in spelled else bytes.fromhex(spelled["hex"])
    return wire.Body(data, spelled.get("json_size"))


def main() -> None:
    page = {}
    for name, (datatype, array) in wire.samples().items():
        made = {
            "rest_json": wire.rest_json_request(datatype, array),
            "rest_binary": wire.rest_binary_request(datatype, array),
            "grpc_raw": wire.grpc_raw_request(datatype, array),
            "grpc_typed": wire.grpc_typed_request(datatype, array),
        }
        response = InferResponse("m", "3", "7", [Tensor("y", datatype, array)])
        page[name] = {
            "requests": {codec: spell(body) for codec, body in made.items() if body is not None},
            "answers": {codec: spell(body) for codec, body in answers(response).items()},
        }
    PAGE.write_text(json.dumps(page, indent=1, ensure_ascii=True) + "\n")
    with tempfile.TemporaryDirectory() as folder, golden_calls.contract_server(Path(folder)) as server:
        golden_calls.PAGE.write_text(golden_calls.render(server))


if __name__ == "__main__":
    main()
