"""``ortserve models``: show and change the models of a running server."""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from ortserve.core.version_names import version_of
from ortserve.errors import invalid_input
from ortserve.tools.address import address_of
from ortserve.tools.client import path_of
from ortserve.tools.command import Outcome, json_or_text
from ortserve.tools.console import print_report, progress
from ortserve.tools.models.result import ModelsResult
from ortserve.tools.models.server import ModelLabels, ModelServer, Rollout, repository_path
from ortserve.tools.report import Block, Cell, Facts, Report, Table, Text

_WATCH_S: Final = 1.0
"""Interval between two readings."""


def run(given: argparse.Namespace) -> Outcome:
    """Carry out the action, and show the versions that it concerns.

    Raises:
        ServeError: invalid_input, for wrong arguments; otherwise as the server answers.
    """
    _check_arguments(given)
    server = ModelServer(address_of(given.url, given, needs_http=True), given.timeout_s)
    try:
        outcome = _shown(server, given, _change(server, given))
        while given.watch:
            print_report(outcome.report)
            outcome = _next(server, given, outcome)
        return outcome
    finally:
        server.close()


def _check_arguments(given: argparse.Namespace) -> None:
    """Raise ServeError: invalid_input, for arguments that do not fit the action."""
    action, model = given.action, given.model
    if model and "://" in model:
        raise invalid_input(f"{action}: expected the URL of the server as --url {model}")
    if bool(model) == (action == "list"):
        raise invalid_input(f"{action}: expected {'no model' if model else 'the name of a MODEL'}")
    if given.changes and action not in ("labels", "rollout", "promote"):
        raise invalid_input(f"{action}: expected nothing after the model, got '{given.changes[0]}'")
    if given.watch and (action not in ("list", "status", "rollout") or given.changes):
        raise invalid_input(f"--watch: expected list, status or rollout without a change, got {action}")
    if given.watch and given.json:
        raise invalid_input("--watch: expected tables, got --json")


def _change(server: ModelServer, given: argparse.Namespace) -> str:
    """Carry out the action. Returns why it changed nothing; empty if it did, or only shows the models."""
    action, model, changes = given.action, given.model, given.changes
    path = path_of(model)
    match action:
        case "load":
            with progress(f"load {model}") as step:
                server.change_watched(repository_path(model, action), model, step)
        case "unload":
            before = server.versions(model)
            with progress(f"unload {model}") as step:
                server.change_watched(repository_path(model, action), model, step)
            if before == server.versions(model):
                return f"Model '{model}' was not loaded: nothing was unloaded."
        case "labels" if changes:
            server.change("PUT", f"{path}/labels", {"labels": _labels(changes)})
        case "rollout" if changes:
            options = _options(changes)
            server.change("PUT" if options else "DELETE", f"{path}/rollout", options)
        case "promote":
            server.change("POST", f"{path}/promote", _version(changes))
        case "rollback":
            server.change("POST", f"{path}/rollback", {})
    return ""


def _next(server: ModelServer, given: argparse.Namespace, before: Outcome) -> Outcome:
    """Wait until the result changes, and return the new one."""
    while True:
        time.sleep(_WATCH_S)
        outcome = _shown(server, given)
        if outcome.result != before.result:
            return outcome


def _shown(server: ModelServer, given: argparse.Namespace, note: str = "") -> Outcome:
    model, action = given.model, given.action
    versions = server.versions(model, with_counts=action == "status")
    labels = server.labels(model) if model else ModelLabels()
    rollout = server.rollout(model) if action in ("status", "rollout") else None
    result = ModelsResult(
        action=action,
        url=given.url,
        versions=versions,
        labels=labels.versions,
        previous=labels.previous,
        rollout=None if rollout is None else {"model": model, **asdict(rollout)},
        note=note,
    )
    return Outcome(result, Report(f"Models of {result.url}", tuple(_blocks(result, rollout))))


def _blocks(result: ModelsResult, rollout: Rollout | None) -> Iterator[Block]:
    if result.note:
        yield Text(result.note)
    has_counts = any(one.requests is not None for one in result.versions)
    rows: list[dict[str, Cell]] = [
        {
            "model": one.model,
            "version": one.version or None,
            "state": one.state or None,
            "labels": ", ".join((*one.labels, *(("(default)",) if one.is_default else ()))) or None,
            **({"requests": one.requests, "failed": one.failed, "mean ms": one.mean_ms} if has_counts else {}),
            "reason": one.reason or None,
        }
        for one in result.versions
    ]
    yield Table.of("Versions", rows)
    known = {one.version for one in result.versions}
    if lost := {label: f"version {version}" for label, version in result.labels.items() if version not in known}:
        yield Facts("Lost labels", lost)
    if result.action == "rollout" and (rollout is None or rollout.rollout is None):
        yield Text("The model has no rollout." if rollout else "The server has no rollouts.")
    if rollout is not None:
        yield from _rollout_facts(rollout)


def _rollout_facts(shown: Rollout) -> Iterator[Facts]:
    if shown.rollout is not None:
        problem = {"problem": shown.problem} if shown.problem else {}
        worst = {
            f"worst {name} error": "infinite" if error is None else error for name, error in shown.worst_errors.items()
        }
        figures = {name.replace("_", " "): value for name, value in shown.figures.items()}
        yield Facts("Rollout", {**dict(_set_options(shown.rollout)), **problem})
        yield Facts("Candidate", {**figures, **worst})
    if shown.ended is not None:
        yield Facts("Last rollout", shown.ended)


def _set_options(options: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, Any]]:
    """The set options of a rollout, named as in ``KEY=VALUE``."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _set_options(value, f"{name}.")
        elif value not in (None, ""):
            yield group + name, value


def _options(changes: Sequence[str]) -> dict[str, Any]:
    """The options of a rollout; empty to show or stop it. Raises ServeError: invalid_input."""
    options: dict[str, Any] = {}
    for change in changes if list(changes) != ["stop"] else ():
        path, equals, text = change.partition("=")
        group, dot, key = path.rpartition(".")
        if not equals or not key:
            raise invalid_input(f"rollout: expected KEY=VALUE or stop, got '{change}'")
        place = options.setdefault(group, {}) if dot else options
        if not isinstance(place, dict):
            raise invalid_input(f"rollout: expected a value of {group} or of keys within it, got both")
        if key in place:
            raise invalid_input(f"rollout: expected each KEY once, got '{change}' for one that already has a value")
        place[key] = json_or_text(text)
    return options


def _labels(changes: Sequence[str]) -> dict[str, int | None]:
    """The versions to give labels to, None to remove a label. Raises ServeError: invalid_input."""
    labels: dict[str, int | None] = {}
    for change in changes:
        name, equals, version = change.partition("=")
        if not equals or not name or (version and not version_of(version)):
            raise invalid_input(f"labels: expected NAME=VERSION or NAME=, got '{change}'")
        if name in labels:
            raise invalid_input(f"labels: expected each NAME once, got '{change}' for one that is already changed")
        labels[name] = version_of(version)
    return labels


def _version(changes: Sequence[str]) -> dict[str, int]:
    """The version to promote; empty for the candidate. Raises ServeError: invalid_input."""
    if not changes:
        return {}
    version = version_of(changes[0]) if len(changes) == 1 else None
    if version is None:
        raise invalid_input(f"promote: expected the number of one version, got '{' '.join(changes)}'")
    return {"version": version}
