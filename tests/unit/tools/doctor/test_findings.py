"""Each kind of finding: a simulated machine, repository or server that has it, and one that does not."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from certificates import Secret
from machines import ARM_FEATURES, limits, write_machine
from ortserve.config.options import ServerOptions
from ortserve.tools.doctor import findings, options
from ortserve.tools.doctor.catalog import CATALOG
from ortserve.tools.doctor.machine import Files, read_memory, read_processors, read_system
from ortserve.tools.doctor.result import (
    GpuFacts,
    ModelCheck,
    ProviderTrial,
    RuntimeFacts,
    ServerFacts,
    Steadiness,
    System,
)
from ortserve.tools.report import LEVELS, Finding

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
PAGES = "sys/kernel/mm/transparent_hugepage"
NODES = "sys/devices/system/node"

STEADY = Steadiness(4, 1.0, 1.1, 1.05, 0.0, 0, 10.0, 30.0)
GPU = GpuFacts("H100", "9.0", 2**36, 2**30, "580.1", "13.0")
SYSTEM = System("6.12.0", 65536, 524288, {})
TRIALS = (ProviderTrial(CUDA, True, True), ProviderTrial(CPU, True, True))
RUNTIME = RuntimeFacts({}, {"onnxruntime-gpu": "1.31.1"}, "", TRIALS, (GPU,))
MODEL = ModelCheck("m", 1, "", "", (), CPU, 2, 2, 1000, 2**20, 0.1, 1.0)
METRICS = {
    "open_files": 30.0,
    "most_open_files": 1024.0,
    "saturation": 0.2,
    "requests": 1000.0,
    "rejected_requests": 1.0,
}
SERVER = ServerFacts("s", "1", True, True, "public", True, 9e6, "", False, {"m/1": "READY"}, METRICS)


def in_machine(root: Path, files: Mapping[str, str], environment: Mapping[str, str] = {}) -> list[Finding]:
    tree = Files(write_machine(root, files))
    return [
        *findings.find_in_processors(read_processors(tree)),
        *findings.find_in_memory(replace(read_memory(tree), shared_bytes=2**33)),
        *findings.find_in_system(replace(read_system(environment), open_files_hard=65536), 8192),
    ]


def in_models(*models: ModelCheck, budget: int | None = 4, free_bytes: int = 2**30) -> list[Finding]:
    return list(findings.find_in_models(models, budget, free_bytes))


def in_server(**changes: Any) -> list[Finding]:
    return list(findings.find_in_server(replace(SERVER, **changes)))


def in_metrics(**values: float) -> list[Finding]:
    return in_server(metrics=METRICS | values)


def group(**changes: Any) -> dict[str, str]:
    usual: dict[str, Any] = {"quota": "max", "memory": "max", "used": "1", "throttled": 0}
    files = limits("v2", group="/", **usual | changes)
    name = "sys/fs/cgroup/memory.events"
    return files | {name: files[name].replace("oom_kill 2", f"oom_kill {0 if not changes.get('kills') else 2}")}


MACHINES: dict[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "no_avx2": ({"proc/cpuinfo": "flags : sse2 avx avx_vnni\n"}, {}),
    "no_int8_dot_product": ({"proc/cpuinfo": f"Features : {ARM_FEATURES.replace('asimddp', '')}\n"}, {}),
    "cpu_quota": (group(quota="150000"), {}),
    "small_cpu_quota": (group(quota="50000"), {}),
    "cpu_throttled": (group(quota="400000", throttled=9), {}),
    "shared_cores": ({f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": "0-1" for n in range(2)}, {}),
    "numa": ({f"{NODES}/online": "0-1", f"{NODES}/node0/cpulist": "0-1", f"{NODES}/node1/cpulist": "2-3"}, {}),
    "frequency_governor": ({"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave"}, {}),
    "memory_near_limit": (group(memory="1000000", used="900000"), {}),
    "processes_killed": (limits("v2", group="/", quota="max", memory="max", used="1", throttled=0), {}),
    "huge_pages_defrag": ({f"{PAGES}/enabled": "[always] madvise", f"{PAGES}/defrag": "[always] never"}, {}),
    "no_huge_pages": ({f"{PAGES}/enabled": "always madvise [never]"}, {}),
    "variables_without_effect": ({}, {"OMP_NUM_THREADS": "4"}),
    "runtime_variables": ({}, {"ORT_INTRA_OP_NUM_THREADS": "4"}),
}

STEADINESS: dict[str, dict[str, Any]] = {
    "unsteady_processors": {"spread": 2.0},
    "unequal_processors": {"slowest": 1.5},
    "stolen_time": {"stolen": 0.1},
}

RUNTIMES: dict[str, RuntimeFacts] = {
    "runtime_distributions": replace(RUNTIME, distributions={"onnxruntime": "1", "onnxruntime-gpu": "1"}),
    "provider_unusable": replace(RUNTIME, providers=(replace(TRIALS[0], is_usable=False, problem="no libcudnn"),)),
    "provider_without_gpu": replace(RUNTIME, providers=(replace(TRIALS[0], is_usable=False),), gpus=()),
    "missing_library": replace(
        RUNTIME, providers=(replace(TRIALS[0], libraries={"libcudnn.so.9": "libcudnn.so.9: cannot open shared ..."}),)
    ),
    "gpu_unused": replace(RUNTIME, providers=TRIALS[1:]),
    "gpus_hidden": replace(RUNTIME, gpus=(), gpu_problem="CUDA_VISIBLE_DEVICES hides all 2"),
    "old_driver": replace(RUNTIME, gpus=(replace(GPU, cuda="12.8"),)),
    "unsupported_gpu": replace(RUNTIME, gpus=(replace(GPU, capability="10.0"),)),
    "gpu_memory_in_use": replace(RUNTIME, gpus=(replace(GPU, used_bytes=2**35 + 1),)),
}

MODELS: dict[str, tuple[ModelCheck, ...]] = {
    "empty_repository": (),
    "model_fails": (replace(MODEL, problem="not ONNX"),),
    "model_not_checked": (replace(MODEL, skipped="no time"),),
    "too_many_threads": (replace(MODEL, instances=3),),
    "little_memory": (replace(MODEL, memory_bytes=900 * 2**20),),
    "load_warning": (replace(MODEL, events=("something new: because",)),),
    **{
        kind: (replace(MODEL, events=(f"{event}: because",)),)
        for event, kind in (
            ("execution provider passed over", "provider_passed_over"),
            ("option has no effect", "option_without_effect"),
            ("nodes are left to the CPU", "nodes_on_cpu"),
            ("requests run one at a time", "not_batched"),
            ("rows run together because the configuration says so", "batched_against_evidence"),
        )
    },
}

SERVERS: dict[str, dict[str, Any]] = {
    "not_live": {"live": False},
    "not_ready": {"ready": False},
    "model_not_ready": {"models": {"m/1": "UNAVAILABLE: not ONNX"}},
    "untrusted_certificate": {"certificate_problem": "self-signed"},
    "certificate_expires": {"certificate_expires_s": 86_400.0},
    "plain_text": {"tls": False},
    "open_control": {"control_is_open": True},
}

OF_METRICS: dict[str, dict[str, float]] = {
    "open_files_near_limit": {"open_files": 1000.0},
    "saturated": {"saturation": 0.9},
    "rejected_requests": {"rejected_requests": 100.0},
    **{
        kind: {kind: 1.0}
        for kind in ("event_loop_stalls", "run_timeouts", "abandoned_runs", "out_of_memory", "rows_depend")
    },
}

OF_LIMITS = {"few_open_files", "small_shared_memory"}
OF_OPTIONS = {"invalid_option", "unknown_variable", "readable_secret", "open_shared_memory"}
"""Findings that are tested below, with real files."""


def kinds(found: Iterator[Finding] | list[Finding]) -> set[str]:
    return {each.kind for each in found}


def test_healthy_subjects_have_no_finding(tmp_path: Path) -> None:
    assert in_machine(tmp_path / "a", {}) == []
    assert in_machine(tmp_path / "b", group()) == []
    assert list(findings.find_in_steadiness(STEADY)) == []
    assert list(findings.find_in_runtime(RUNTIME)) == []
    assert in_models(MODEL, replace(MODEL, name="n")) == []
    assert in_models(replace(MODEL, instances=3), budget=None) == [], "models that share threads have enough of them"
    assert in_server() == []


def test_unknown_values_have_no_finding(tmp_path: Path) -> None:
    tree = Files(tmp_path)
    assert list(findings.find_in_processors(read_processors(tree))) == []
    assert list(findings.find_in_memory(replace(read_memory(tree), shared_bytes=None))) == []
    assert list(findings.find_in_system(replace(SYSTEM, open_files=None, open_files_hard=None), 8192)) == []
    unknown = GpuFacts("GPU", None, None, None, None, None)
    assert list(findings.find_in_runtime(replace(RUNTIME, gpus=(unknown,)))) == []
    assert in_server(models=None, metrics=None, control_is_open=None, certificate_expires_s=None) == []


@pytest.mark.parametrize("kind", MACHINES)
def test_problem_of_the_machine_is_found(kind: str, tmp_path: Path) -> None:
    files, environment = MACHINES[kind]
    assert kinds(in_machine(tmp_path, files, environment)) == {kind}


def test_small_limits_are_found(tmp_path: Path) -> None:
    memory = replace(read_memory(Files(tmp_path)), shared_bytes=64 * 2**20)
    assert kinds(findings.find_in_memory(memory)) == {"small_shared_memory"}
    assert list(findings.find_in_system(SYSTEM, 8192)) == []
    (few,) = findings.find_in_system(replace(SYSTEM, open_files_hard=1024), 8192)
    assert few.seen == "the server may open 1,024 files (hard limit), and the options allow 8,192 connections"


@pytest.mark.parametrize("kind", STEADINESS)
def test_problem_of_steadiness_is_found(kind: str) -> None:
    assert kinds(findings.find_in_steadiness(replace(STEADY, **STEADINESS[kind]))) == {kind}


def test_quota_that_is_used_up_in_the_test_is_found() -> None:
    assert kinds(findings.find_in_steadiness(replace(STEADY, throttled_periods=3))) == {"cpu_throttled"}


@pytest.mark.parametrize("kind", RUNTIMES)
def test_problem_of_the_runtime_is_found(kind: str) -> None:
    assert kinds(findings.find_in_runtime(RUNTIMES[kind])) == {kind}


@pytest.mark.parametrize("kind", MODELS)
def test_problem_of_models_is_found(kind: str) -> None:
    assert kinds(in_models(*MODELS[kind])) == {kind}


@pytest.mark.parametrize("kind", SERVERS)
def test_problem_of_a_server_is_found(kind: str) -> None:
    assert kinds(in_server(**SERVERS[kind])) == {kind}


@pytest.mark.parametrize(
    "state", ["not loaded", "UNAVAILABLE: unloaded", "UNAVAILABLE: not in memory: the next request loads it"]
)
def test_models_that_are_not_loaded_on_purpose_are_no_finding(state: str) -> None:
    assert not in_server(models={"m/1": state})
    assert "plain_text" not in kinds(in_server(reach="loopback", tls=False))


@pytest.mark.parametrize("kind", OF_METRICS)
def test_problem_in_metrics_is_found(kind: str) -> None:
    assert kinds(in_metrics(**OF_METRICS[kind])) == {kind}


def test_every_kind_of_the_catalog_is_tested() -> None:
    tested = (MACHINES, STEADINESS, RUNTIMES, MODELS, SERVERS, OF_METRICS, OF_LIMITS, OF_OPTIONS)
    assert set().union(*tested) == CATALOG.kinds.keys()


def test_every_kind_says_why_it_matters_and_what_to_do() -> None:
    for kind, (level, matters, remedy) in CATALOG.kinds.items():
        assert level in LEVELS, kind
        assert matters, kind
        assert remedy, kind


def test_absent_tensorrt_is_no_problem() -> None:
    absent = ProviderTrial(
        "TensorrtExecutionProvider", True, False, "x", libraries={"libnvinfer.so.10": "cannot open shared object file"}
    )
    broken = replace(absent, libraries={"libnvinfer.so.10": "10.9.0"})

    levels = [
        [each.level for each in findings.find_in_runtime(replace(RUNTIME, providers=(*TRIALS, trial)))]
        for trial in (absent, broken)
    ]

    assert levels == [["advice"], ["problem"]]


def test_levels_grow_with_the_facts() -> None:
    (expired,) = in_server(certificate_expires_s=-1.0)
    (over,) = in_metrics(saturation=1.5)
    (public,) = in_server(tls=False)
    (private,) = in_server(tls=False, reach="private")
    assert [each.level for each in (expired, over, public, private)] == ["problem", "problem", "problem", "warning"]


def config(folder: Path, text: str) -> tuple[ServerOptions, list[Finding]]:
    (folder / "options.yaml").write_text(text)
    return options.check_options(folder / "options.yaml")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("http_prot: 1", "http_prot"),
        ("http_port: 8001", "grpc_port: expected a different port"),
        ("load_model: [a]", "load_model: expected model_control_mode"),
        ("tls_key_file: x", "tls_key_file: expected tls_cert_file"),
        ("control_keys_file: /nowhere", "control_keys_file: expected a file of keys"),
        ("tls_cert_file: /nowhere\ntls_key_file: /nowhere", "TLS files: No such file"),
        ("- nothing", "options.yaml"),
    ],
)
def test_options_that_the_server_refuses(text: str, seen: str, tmp_path: Path) -> None:
    _, (found,) = config(tmp_path, text)

    assert (found.kind, found.level) == ("invalid_option", "problem")
    assert seen in found.seen


def test_valid_options_have_no_finding(tmp_path: Path) -> None:
    keys, secret = tmp_path / "keys", Secret(tmp_path / "secret")
    keys.write_text("0123456789abcdef0\n")
    keys.chmod(0o600)
    secret.key.chmod(0o600)
    text = f"host: 0.0.0.0\ncontrol_keys_file: {keys}\ntls_cert_file: {secret.cert}\ntls_key_file: {secret.key}\n"

    checked, found = config(tmp_path, text)

    assert found == []
    assert checked.host == "0.0.0.0"


def test_misspelt_variable_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTSERVE_HTTP_PROT", "s3cret")

    for text in ("http_port: 8000", "http_port: none"):
        found = config(tmp_path, text)[1][0]
        assert (found.kind, found.level) == ("unknown_variable", "warning")
        assert found.seen == "ORTSERVE_HTTP_PROT: unknown variable; did you mean 'ORTSERVE_HTTP_PORT'?"


def test_secrets_that_everybody_can_read_are_found(tmp_path: Path) -> None:
    keys, secret = tmp_path / "keys", Secret(tmp_path / "secret")
    keys.write_text("0123456789abcdef0\n")
    for file in (keys, secret.key):
        file.chmod(0o644)

    _, found = config(tmp_path, f"infer_keys_file: {keys}\ntls_cert_file: {secret.cert}\ntls_key_file: {secret.key}\n")

    assert [(each.kind, each.where) for each in found] == [
        ("readable_secret", ("infer_keys_file",)),
        ("readable_secret", ("tls_key_file",)),
    ]
    assert "0123456789abcdef0" not in str(found)


def test_exposure_by_options_is_found(tmp_path: Path) -> None:
    _, found = config(tmp_path, "host: 0.0.0.0\nallow_client_shm: true\n")

    assert kinds(found) == {"plain_text", "open_control", "open_shared_memory"}


@pytest.mark.parametrize(
    ("host", "reach"),
    [
        ("127.0.0.1", "loopback"),
        ("::1", "loopback"),
        ("[::1]", "loopback"),
        ("localhost", "loopback"),
        ("10.1.2.3", "private"),
        ("fe80::1%eth0", "private"),
        ("0.0.0.0", "private"),
        ("server.example", "private"),
        ("8.8.8.8", "public"),
        ("2001:4860:4860::8888", "public"),
    ],
)
def test_reach_of_an_address_is_classified(host: str, reach: str) -> None:
    assert options.reach_of(host) == reach
