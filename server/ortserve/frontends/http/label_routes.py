"""REST calls about the versions of a model: labels, rollouts, promotion and rollback."""

from typing import Any, Final

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ortserve.config.rollout import RolloutOptions
from ortserve.core.version_names import MAX_VERSION
from ortserve.errors import invalid_input
from ortserve.frontends.http.documents import (
    LabelsDocument,
    LabelsRequestDocument,
    ModelName,
    PromoteRequestDocument,
    RolloutDocument,
    request_body,
)
from ortserve.frontends.http.request_body import read_json_object
from ortserve.service.labels import LabelService, ModelLabels
from ortserve.service.rollout.control import RolloutService, RolloutStatus

_LABELS_BODY: Final = request_body(LabelsRequestDocument)
_PROMOTE_BODY: Final = request_body(PromoteRequestDocument)
_ROLLOUT_BODY: Final = request_body(RolloutOptions)


def label_routes(labels: LabelService, rollouts: RolloutService) -> APIRouter:
    """Create the routes that read and change labels and rollouts."""
    router = APIRouter(prefix="/v2/models/{model}", tags=["versions"])

    @router.get("/labels", response_model=LabelsDocument)
    async def read_labels(model: ModelName) -> JSONResponse:
        """The labels of the model, and the version that a rollback would make `stable` again."""
        return _answer(model, labels.read(model))

    @router.put("/labels", response_model=LabelsDocument, openapi_extra=_LABELS_BODY)
    async def change_labels(model: ModelName, request: Request) -> JSONResponse:
        """Change the given labels in one step; other labels stay. null removes a label that a call set, and a label
        with this name in the model's configuration holds again. The change survives a restart.
        """
        return _answer(model, await labels.change(model, _changes(await read_json_object(request))))

    @router.post("/promote", response_model=LabelsDocument, openapi_extra=_PROMOTE_BODY)
    async def promote(model: ModelName, request: Request) -> JSONResponse:
        """Make a version `stable`, so that it answers requests without a version. The previous one continues to serve.

        A call without a version promotes the candidate of the model's rollout, which ends the rollout.
        """
        document = await read_json_object(request)
        if not document.keys() <= {"version"}:  # a misspelt key must not promote the candidate instead of the version
            raise invalid_input("expected an object with at most one key, 'version'")
        version = document.get("version")
        given = None if version is None else _number("version", version)
        return _answer(model, await rollouts.promote(model, given))

    @router.post("/rollback", response_model=LabelsDocument)
    async def rollback(model: ModelName) -> JSONResponse:
        """End the rollout of the model. Without a rollout, make the previous version `stable` again."""
        return _answer(model, await rollouts.rollback(model))

    @router.get("/rollout", response_model=RolloutDocument)
    async def read_rollout(model: ModelName) -> Response:
        """The rollout of the model, the figures of its candidate, and the end of the last rollout."""
        return _describe(model, rollouts.read(model))

    @router.put("/rollout", response_model=RolloutDocument, openapi_extra=_ROLLOUT_BODY)
    async def start_rollout(model: ModelName, request: Request) -> Response:
        """Start a rollout, or replace the options of the current one, which resets its figures. A rollout survives a
        restart.
        """
        return _describe(model, await rollouts.start(model, await read_json_object(request)))

    @router.delete("/rollout", response_model=RolloutDocument)
    async def end_rollout(model: ModelName) -> Response:
        """End the rollout and leave the labels as they are."""
        return _describe(model, await rollouts.stop(model))

    return router


def _describe(model: str, status: RolloutStatus) -> Response:
    document = {"model": model, **status.describe()}
    return Response(orjson.dumps(document), media_type="application/json")  # orjson writes infinite errors as null


def _changes(document: dict[str, Any]) -> dict[str, int | None]:
    """Return versions by label. Raises ServeError: invalid_input."""
    given = document.get("labels")
    if not isinstance(given, dict) or document.keys() != {"labels"}:
        raise invalid_input("expected an object with one key, 'labels': an object of versions by label")
    return {
        label: None if version is None else _number(f"label '{label:.100}'", version)
        for label, version in given.items()
    }


def _number(what: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_VERSION:
        raise invalid_input(f"{what}: expected the number of a version, got {value!r:.100}")
    return value


def _answer(model: str, given: ModelLabels) -> JSONResponse:
    labels = [
        {
            "name": label.name,
            "version": str(label.version),
            "state": label.state,
            "set_by": "call" if label.is_set_by_call else "configuration",
        }
        for label in given.labels
    ]
    document = {"model": model, "labels": labels}
    return JSONResponse(document if given.previous is None else {**document, "previous": str(given.previous)})
