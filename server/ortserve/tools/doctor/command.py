"""The command ``ortserve doctor``."""

import argparse
import os
import ssl
from dataclasses import replace
from pathlib import Path

from ortserve.errors import invalid_input
from ortserve.paths import is_model_file
from ortserve.tools.address import address_of, is_url
from ortserve.tools.client import Client, untrusted
from ortserve.tools.command import Outcome, status_of
from ortserve.tools.doctor import findings as find
from ortserve.tools.doctor.loading import check_models
from ortserve.tools.doctor.machine import Files, read_memory, read_processors, read_system
from ortserve.tools.doctor.options import check_options
from ortserve.tools.doctor.presentation import present
from ortserve.tools.doctor.request_path import follow_requests
from ortserve.tools.doctor.result import DoctorResult, ModelCheck
from ortserve.tools.doctor.runtime import read_runtime
from ortserve.tools.doctor.server import look_at
from ortserve.tools.doctor.steadiness import measure_steadiness
from ortserve.tools.report import worst_first
from ortserve.tools.speed import Timed
from ortserve.tools.subject import find_version


def run(given: argparse.Namespace) -> Outcome:
    """Examine the machine or the server. Raises ServeError."""
    subject: str | None = given.subject
    if subject is not None and is_url(subject):
        result = _look_at_server(subject, given)
    elif given.model:
        raise invalid_input("--model: also expected the URL of a server, got none")
    else:
        result = _look_at_machine(subject, given)
    result = replace(result, findings=tuple(worst_first(result.findings)))
    return Outcome(result, present(result), status_of(result.findings, given.fail_on))


def _look_at_machine(repository: str | None, given: argparse.Namespace) -> DoctorResult:
    if repository is not None and not Path(repository).is_dir() and not is_model_file(Path(repository)):
        expected = "a folder of models, an .onnx file, or a URL such as http://127.0.0.1:8000"
        raise invalid_input(f"'{repository}': expected {expected}")
    files = Files()
    processors, memory, system = read_processors(files), read_memory(files), read_system(os.environ)
    options, found = check_options(given.config)
    runtime = read_runtime()
    steadiness = measure_steadiness(processors.allowed, memory.free_bytes, given.seconds)
    found += find.find_in_runtime(runtime)
    found += find.find_in_processors(processors)
    found += find.find_in_memory(memory)
    found += find.find_in_system(system, options.http_max_connections + options.grpc_max_connections)
    found += find.find_in_steadiness(steadiness) if steadiness else ()
    models: list[ModelCheck] = []
    if repository is not None:
        models = check_models(Path(repository), options, memory.free_bytes, given.seconds_per_model)
        # With global_threads, models share their threads, so instances do not add threads.
        budget = None if options.global_threads else processors.budget
        found += find.find_in_models(models, budget, memory.free_bytes)
    return DoctorResult(
        subject=repository or "this machine",
        findings=tuple(found),
        processors=processors,
        memory=memory,
        system=system,
        steadiness=steadiness,
        runtime=runtime,
        models=tuple(models),
    )


def _look_at_server(url: str, given: argparse.Namespace) -> DoctorResult:
    name: str = given.model or ""
    bare = Timed(find_version(name)).open_with_members() if "/" in name or name.endswith(".onnx") else None
    problem, request = "", None
    client = Client(address_of(url, given, needs_http=True))
    try:
        try:
            client.connect()
        except ssl.SSLCertVerificationError as error:
            if client.address.headers:  # they may hold a key, which no other server may get
                raise untrusted(client.address, error) from None
            problem = error.verify_message
            client = Client(replace(client.address, is_verified=False))
        facts = look_at(client, given.metrics, problem)
        if name:
            name = bare.subject.name if bare else name
            request = follow_requests(client, name, bare, given.requests)
    finally:
        client.close()
    found = tuple(find.find_in_server(facts))
    return DoctorResult(subject=url, findings=found, server=facts, request=request)
