"""model.yaml: inherited options, accepted keys, and error messages."""

import math
from pathlib import Path
from typing import Final

import pytest

from ortserve.config.model import load_model_options
from ortserve.config.options import ServerOptions
from ortserve.config.session import provider_parts
from ortserve.config.versions import AllVersions, LatestVersions, SpecificVersions
from ortserve.errors import ErrorKind, ServeError

DEFAULTS = ServerOptions(execution_providers=("cuda", "cpu"), max_rows=16, warmup_s=1.5)
POLICIES: Final = "{latest: n}, {all: true} or {specific: [n, ...]}, at most 1024 versions"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.yaml"


def test_model_without_a_file_has_the_server_options() -> None:
    options = load_model_options(None, DEFAULTS)

    assert (options.execution_providers, options.max_rows, options.warmup_s) == (("cuda", "cpu"), 16, 1.5)
    assert (options.required, options.version_policy) == (False, LatestVersions(latest=1))


def test_empty_file_holds_nothing(file: Path) -> None:
    file.write_text("# nothing yet\n")

    assert load_model_options(file, DEFAULTS) == load_model_options(None, DEFAULTS)


def test_file_keys_override_server_options(file: Path) -> None:
    file.write_text("execution_providers: [cpu]\nmax_rows: null\nqueue_delay_s: 1\nrequired: true\n")

    options = load_model_options(file, DEFAULTS)

    assert (options.execution_providers, options.max_rows, options.queue_delay_s) == (("cpu",), None, 1.0)
    assert options.required
    assert options.warmup_s == 1.5


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("{latest: 3}", LatestVersions(latest=3)),
        ("{all: true}", AllVersions(all=True)),
        ("{specific: [1, 7]}", SpecificVersions(specific=(1, 7))),
    ],
)
def test_version_policy_takes_one_of_three_forms(file: Path, text: str, policy: object) -> None:
    file.write_text(f"version_policy: {text}")

    assert load_model_options(file, DEFAULTS).version_policy == policy


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("max_row: 4", "max_row: unknown key; did you mean 'max_rows'?"),
        (
            "dynamic_batching: {}",
            "dynamic_batching: unknown key; requests share batches without this field of a config.pbtxt",
        ),
        ("max_batch_size: 8", "max_batch_size: unknown key; this field of a config.pbtxt is 'max_rows' here"),
        (
            "labels: {1st: 1}",
            (
                "labels: expected names of at most 63 letters, digits, '_', '.' and '-' "
                "that begin with a letter or '_', got '1st'"
            ),
        ),
        (f"labels: {{a: {2**63}}}", f"labels: expected {{name: version, ...}}, at most 64, got {{'a': {2**63}}}"),
        (
            f"rollout: {{candidate: {10**20}}}",
            f"rollout.candidate: expected integer, 1 to {2**63 - 1}, got {10**20}",
        ),
        ("max_rows: 0", "max_rows: expected integer, 1 to 65536, in rows, got 0"),
        ("preferred_rows: [65537]", "preferred_rows: expected list of integers, 1 to 65536, in rows, got [65537]"),
        (f"buckets: [4, {2**31}]", f"buckets: expected list of integers, 1 to 65536, got [4, {2**31}]"),
        ("max_rows: true", "max_rows: expected integer, 1 to 65536, in rows, got True"),
        ("warmup_s: '3'", "warmup_s: expected number, 0 to 3600, in seconds, got '3'"),
        ("required: 1", "required: expected true or false, got 1"),
        ("execution_providers: cpu", "execution_providers: expected list of names, at least one, got 'cpu'"),
        *(
            (
                f"version_policy: {policy}",
                f"version_policy: expected {POLICIES}, got {got}",
            )
            for policy, got in [
                ("{latest: 1, all: true}", "{'latest': 1, 'all': True}"),
                ("{all: false}", "{'all': False}"),
                ("{specific: []}", "{'specific': []}"),
                ("{latest: 0}", "{'latest': 0}"),
                ("latest", "'latest'"),
                (f"{{latest: {2**32}}}", f"{{'latest': {2**32}}}"),
                (f"{{specific: [1, {2**63}]}}", f"{{'specific': [1, {2**63}]}}"),
            ]
        ),
    ],
)
def test_bad_key_is_reported_with_the_files_name_but_not_its_folder(file: Path, text: str, problem: str) -> None:
    file.write_text(text)

    with pytest.raises(ServeError) as raised:
        load_model_options(file, DEFAULTS)

    assert raised.value.kind is ErrorKind.INVALID_INPUT
    assert raised.value.message == f"model.yaml: {problem}"


def test_policy_names_at_most_1024_versions(file: Path) -> None:
    file.write_text(f"version_policy: {{specific: {list(range(1, 1025))}}}")
    assert load_model_options(file, DEFAULTS).version_policy == SpecificVersions(specific=tuple(range(1, 1025)))
    file.write_text(f"version_policy: {{specific: {list(range(1, 1026))}}}")
    with pytest.raises(ServeError, match="at most 1024 versions"):
        load_model_options(file, DEFAULTS)


@pytest.mark.parametrize("content", [b"a: [", b"- a", b"\x00", b"\xff\xfe\xff"])
def test_file_without_a_yaml_mapping_is_named_without_its_folder(file: Path, content: bytes) -> None:
    file.write_bytes(content)

    with pytest.raises(ServeError, match=r"^model\.yaml: ") as raised:
        load_model_options(file, DEFAULTS)

    assert str(file.parent) not in raised.value.message


def test_long_value_is_truncated_in_errors(file: Path) -> None:
    file.write_text(f"max_rows: [{'1, ' * 5000}]")

    with pytest.raises(ServeError, match=r"max_rows: expected integer, 1 to 65536, in rows, got \[1, 1, ") as raised:
        load_model_options(file, DEFAULTS)

    assert len(raised.value.message) < 300


def test_own_keys_of_a_model_are_distinguished_from_inherited_ones(file: Path) -> None:
    file.write_text("max_rows: 3\nbuckets: [3]")

    assert load_model_options(file, DEFAULTS).model_fields_set == {"max_rows", "buckets"}
    assert load_model_options(None, DEFAULTS).model_fields_set == set()


def test_padding_is_declared_by_input(file: Path) -> None:
    file.write_text(
        "pad:\n  ids: {axis: 1, multiple: 16, value: 0}\n  mask: {axis: 2, multiple: 8, value: -.inf}\n"
        "  text: {axis: 1, multiple: 4, value: '[PAD]'}\n  flag: {axis: 1, multiple: 4, value: false}\n"
    )

    pad = load_model_options(file, DEFAULTS).pad

    assert {name: (one.axis, one.multiple, one.value) for name, one in pad.items()} == {
        "ids": (1, 16, 0),
        "mask": (2, 8, -math.inf),
        "text": (1, 4, "[PAD]"),
        "flag": (1, 4, False),
    }
    assert [type(one.value) for one in pad.values()] == [int, float, str, bool]


@pytest.mark.parametrize(
    "entry",
    [
        "{axis: 1, multiple: 0, value: 0}",
        "{axis: 1, multiple: 8}",
        "{axis: '1', multiple: 8, value: 0}",
        "{axis: 1, multiple: 8, value: null}",
        "{axis: 1, multiple: 8, value: 0, side: left}",
        "16",
    ],
)
def test_bad_padding_is_rejected_with_the_expected_form(file: Path, entry: str) -> None:
    file.write_text(f"pad: {{ids: {entry}}}")

    with pytest.raises(ServeError) as raised:
        load_model_options(file, DEFAULTS)

    expected = r"model.yaml: pad: expected {input: {axis: n, multiple: n, value: v}, ...}, got {'ids': "
    assert raised.value.message.startswith(expected)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "session: {graph_optimisation: all}",
            "session.graph_optimisation: unknown key; did you mean 'graph_optimization'?",
        ),
        (
            "session: {graph_optimization: most}",
            "session.graph_optimization: expected one of none, basic, extended, layout, all, got 'most'",
        ),
        (
            "session: {shrink_arenas: [foo]}",
            "session.shrink_arenas: expected list of arenas such as cpu:0, got ['foo']",
        ),
        ("inputs: {x: {dims: [a]}}", "inputs.x.dims: expected list of integers, got ['a']"),
        ("warmup_samples: [{x: [1]}]", "warmup_samples[0].x: unknown key; expected one of name, rows, count, inputs"),
        ("warmup_samples: [{}, {rows: 0}]", "warmup_samples[1].rows: expected integer, 1 to 65536, got 0"),
        (
            "priority_queue_policies: {1: {timeout_s: 0}}",
            "priority_queue_policies.1.timeout_s: expected number, above 0 and up to 86400, in seconds, got 0",
        ),
        (
            "session: {entries: {session.disable_prepack: 1}}",
            "session.entries: unknown entry: 'session.disable_prepack'; did you mean 'session.disable_prepacking'?",
        ),
        (
            "priority_levels: 2\ndefault_priority_level: 7",
            "default_priority_level: expected 1 to 2, as priority_levels is 2, got 7",
        ),
        (
            "default_priority_level: 2",
            "default_priority_level: expected 1 to 1, as priority_levels is 0, got 2",
        ),
        *(
            (
                f"priority_levels: 2\npriority_queue_policies: {{{level}: {{max_requests: 1}}}}",
                f"priority_queue_policies: expected levels from 1 to 2, as priority_levels is 2, got {level}",
            )
            for level in (-1, 0, 3)
        ),
        ("model_file: a/b.onnx", "model_file: expected name of a file, without a folder, got 'a/b.onnx'"),
    ],
)
def test_bad_key_inside_a_value_is_reported_by_its_path(file: Path, text: str, problem: str) -> None:
    file.write_text(text)

    with pytest.raises(ServeError) as raised:
        load_model_options(file, DEFAULTS)

    assert raised.value.message == f"model.yaml: {problem}"


def test_padding_value_must_not_be_nan(file: Path) -> None:
    file.write_text("pad: {x: {axis: 1, multiple: 4, value: .nan}}")

    with pytest.raises(ServeError) as raised:
        load_model_options(file, DEFAULTS)

    assert (
        raised.value.message
        == "model.yaml: pad: value: expected a number other than NaN, true, false or a text, got nan"
    )


def test_execution_providers_may_have_options(file: Path) -> None:
    file.write_text("execution_providers: [{cuda: {device_id: 1, use_tf32: false}}, cpu]")

    wishes = load_model_options(file, DEFAULTS).execution_providers

    assert [provider_parts(wish) for wish in wishes] == [("cuda", {"device_id": "1", "use_tf32": "0"}), ("cpu", {})]
