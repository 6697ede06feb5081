"""Health and metadata as clients of the protocol read them, on both protocols."""

import operator
from functools import reduce

import httpx
import pytest

import ortserve
from servers import LONG_S, ServerProcess, triton_clients


def get(server: ServerProcess, path: str) -> httpx.Response:
    return httpx.get(f"http://{server.http}{path}", timeout=LONG_S)


def test_live_and_ready_server_is_reported_as_such(server: ServerProcess) -> None:
    assert (get(server, "/v2/health/live").status_code, get(server, "/v2/health/live").json()) == (200, {"live": True})
    assert (get(server, "/v2/health/ready").status_code, get(server, "/v2/health/ready").json()) == (
        200,
        {"ready": True},
    )
    with triton_clients(server) as (http, grpc):
        assert http.is_server_live()
        assert grpc.is_server_live()
        assert http.is_server_ready()
        assert grpc.is_server_ready()


@pytest.mark.parametrize(
    ("model", "version", "is_ready"),
    [
        ("simple", "", True),
        ("simple", "1", True),
        ("simple", "2", False),
        ("broken", "", False),
        ("broken", "1", False),
        ("nowhere", "", False),
        ("nowhere", "1", False),
    ],
)
def test_both_clients_read_the_readiness_of_a_model(
    server: ServerProcess, model: str, version: str, is_ready: bool
) -> None:
    with triton_clients(server) as (http, grpc):
        assert http.is_model_ready(model, version) is is_ready
        assert grpc.is_model_ready(model, version) is is_ready


def test_unready_model_is_400_and_unknown_model_404(server: ServerProcess) -> None:
    assert get(server, "/v2/models/broken/ready").status_code == 400
    assert get(server, "/v2/models/nowhere/ready").status_code == 404
    ready = get(server, "/v2/models/simple/versions/1/ready")
    assert (ready.status_code, ready.json()) == (200, {"name": "simple", "ready": True})


@pytest.mark.parametrize("path", ["/v2", "/v2/", "/v2?verbose=1"])
def test_server_metadata_is_answered_with_slash_and_query_too(server: ServerProcess, path: str) -> None:
    answer = get(server, path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "name": "ortserve",
        "version": ortserve.__version__,
        "extensions": [
            "classification",
            "sequence",
            "model_repository",
            "model_repository(unload_dependents)",
            "schedule_policy",
            "model_configuration",
            "binary_tensor_data",
            "parameters",
            "statistics",
            "logging",
        ],
    }


def test_server_metadata_is_the_same_over_grpc(server: ServerProcess) -> None:
    with triton_clients(server) as (http, grpc):
        assert grpc.get_server_metadata(as_json=True) == http.get_server_metadata()


@pytest.mark.parametrize("version", ["", "1"])
def test_model_metadata_has_versions_tensors_and_properties(server: ServerProcess, version: str) -> None:
    path = f"/v2/models/digits{f'/versions/{version}' if version else ''}"
    metadata = get(server, path).json()
    properties = metadata.pop("properties")
    assert metadata == {
        "name": "digits",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "image", "datatype": "FP32", "shape": [-1, 1, 8, 8]}],
        "outputs": [
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, 10]},
            {"name": "label", "datatype": "INT64", "shape": [-1]},
        ],
    }
    assert properties["execution_provider"] == "CPUExecutionProvider"
    assert "run together" in properties["batching"]
    with triton_clients(server) as (_, grpc):
        message = grpc.get_model_metadata("digits", version)
    assert message.name == "digits"
    assert list(message.versions) == ["1"]
    assert message.platform == "onnxruntime_onnx"
    for role, tensors in (("inputs", message.inputs), ("outputs", message.outputs)):
        described = [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in tensors]
        assert described == metadata[role]


def test_openapi_document_and_its_page_describe_inference(server: ServerProcess) -> None:
    paths = get(server, "/openapi.json").json()["paths"]
    assert "post" in paths["/v2/models/{model}/infer"]
    assert "post" in paths["/v2/models/{model}/versions/{version}/infer"]
    assert get(server, "/docs").status_code == 200


def test_openapi_document_has_no_reference_that_generators_cannot_resolve(server: ServerProcess) -> None:
    document = get(server, "/openapi.json").json()
    places = [document]
    for place in places:
        if isinstance(place, dict) and "$ref" in place:
            prefix, *names = place["$ref"].split("/")
            assert prefix == "#"
            assert reduce(operator.getitem, names, document)
        places += place.values() if isinstance(place, dict) else place if isinstance(place, list) else ()
    assert len(places) > 1000


def test_openapi_document_tells_the_bodies_of_calls(server: ServerProcess) -> None:
    paths = get(server, "/openapi.json").json()["paths"]

    def requests(path: str) -> tuple[bool, list[str]]:
        body = paths[path]["post"]["requestBody"]
        return body["required"], list(body["content"]["application/json"]["schema"]["properties"])

    def answers(path: str) -> list[str]:
        return list(paths[path]["post"]["responses"]["200"].get("content", ()))

    load, profile = "/v2/repository/models/{model}/load", "/v2/models/{model}/profile"
    assert requests(load) == (False, ["parameters"])
    assert answers(load) == answers("/v2/repository/models/{model}/unload") == []
    assert requests("/v2/systemsharedmemory/region/{region}/register") == (True, ["key", "offset", "byte_size"])
    assert answers(profile) == answers("/v2/models/{model}/generate") == ["application/json"]
    assert answers("/v2/models/{model}/generate_stream") == ["text/event-stream"]


def test_openapi_document_types_every_body(server: ServerProcess) -> None:
    """Generators of clients turn an object without keys into one that takes none, and no schema into no type."""
    untyped = []
    for path, calls in get(server, "/openapi.json").json()["paths"].items():
        for method, call in calls.items():
            for role, part in (("request", call.get("requestBody", {})), ("answer", call["responses"]["200"])):
                for content in part.get("content", {}).values():
                    is_open_object = content["schema"].keys() == {"type"} and content["schema"]["type"] == "object"
                    if is_open_object or not content["schema"]:
                        untyped.append(f"{method} {path}: {role}")
    assert not untyped


def test_openapi_document_names_the_calls_of_labels_and_rollouts(server: ServerProcess) -> None:
    paths = get(server, "/openapi.json").json()["paths"]
    names = {
        f"{method} {part}": call["summary"]
        for part in ("labels", "rollout")
        for method, call in paths[f"/v2/models/{{model}}/{part}"].items()
    }
    assert names == {
        "get labels": "Read Labels",
        "put labels": "Change Labels",
        "get rollout": "Read Rollout",
        "put rollout": "Start Rollout",
        "delete rollout": "End Rollout",
    }
