"""config.pbtxt and model.yaml can set the same options with the same result."""

from pathlib import Path

import pytest

from ortserve.config.model import ModelOptions
from ortserve.config.options import ServerOptions
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.repository.configuration import Configuration, read_configuration

DEFAULTS = ServerOptions(warmup_s=1.5)


def read(folder: Path, text: str, file: str = "config.pbtxt") -> Configuration:
    (folder / file).write_text(text)
    return read_configuration("m", folder / file, DEFAULTS)


def refusal(folder: Path, text: str) -> ServeError:
    with pytest.raises(ServeError) as caught:
        read(folder, text)
    return caught.value


@pytest.mark.parametrize(
    ("pbtxt", "yaml"),
    [
        ("", ""),
        ('name: "m" platform: "onnxruntime_onnx" backend: "onnxruntime"', ""),
        ("max_batch_size: 16", "max_rows: 16\nbatched: true"),
        ("version_policy { latest { num_versions: 3 } }", "version_policy: {latest: 3}"),
        ("version_policy { latest { } }", "version_policy: {latest: 1}"),
        ("version_policy { all { } }", "version_policy: {all: true}"),
        ("version_policy { specific { versions: [1, 7] } }", "version_policy: {specific: [1, 7]}"),
        (
            (
                "max_batch_size: 4 "
                'input [{ name: "x" data_type: TYPE_FP32 dims: [8, -1] reshape { shape: [8, 1, -1] } }]'
                'output [{ name: "y" data_type: TYPE_STRING dims: 10 label_filename: "labels.txt" }]'
            ),
            (
                "max_rows: 4\nbatched: true\nserved_outputs: [y]\n"
                "inputs: {x: {datatype: FP32, dims: [8, -1], reshape: [8, 1, -1]}}\n"
                "outputs: {y: {datatype: BYTES, dims: [10], labels: labels.txt}}"
            ),
        ),
        (
            'input [{ name: "x" dims: [1, 4] optional: true }]',
            "batched: false\ninputs: {x: {dims: [1, 4], optional: true}}",
        ),
        (
            'max_batch_size: 1 output [{ name: "y" dims: 1 reshape { shape: [] } }]',
            "max_rows: 1\nbatched: true\nserved_outputs: [y]\noutputs: {y: {dims: [1], reshape: []}}",
        ),
        ('default_model_filename: "net.onnx"', "model_file: net.onnx"),
        ('cc_model_filenames { key: "7.5" value: "model75.onnx" }', ""),
        # Copied from the JSON of a configuration, in which empty maps are braces.
        (
            (
                "runtime: '' dynamic_batching: { priority_levels: 0, priority_queue_policy: {} }, batch_input: [] "
                "instance_group: [{ kind: KIND_GPU, gpus: [], profile: [], passive: false, host_policy: '' }] "
                "cc_model_filenames: {}, metric_tags: {}, parameters: {}, model_warmup: []"
            ),
            "instances: 1\nexecution_providers: [cuda]",
        ),
        (
            (
                "dynamic_batching { preferred_batch_size: [4, 8] max_queue_delay_microseconds: 1500 priority_levels: 3 "
                "default_priority_level: 2 "
                "default_queue_policy { default_timeout_microseconds: 5000 max_queue_size: 9 } "
                "priority_queue_policy { key: 1 value { timeout_action: DELAY allow_timeout_override: true } } }"
            ),
            (
                "preferred_rows: [4, 8]\nqueue_delay_s: 0.0015\npriority_levels: 3\ndefault_priority_level: 2\n"
                "queue_policy: {timeout_s: 0.005, timeout_override: false, max_requests: 9}\n"
                "priority_queue_policies: {1: {timeout_action: delay}}"
            ),
        ),
        ("instance_group [{ count: 3 kind: KIND_CPU }]", "instances: 3\nexecution_providers: [cpu]"),
        ("instance_group [{ count: 1 }, { count: 2 }]", "instances: 3"),
        ("instance_group [{ }]", "instances: 1"),
        (
            "instance_group [{ count: 2 gpus: [0, 1] }]",
            "instances: 4\ngpus: [0, 1, 0, 1]\nexecution_providers: [{cuda: {device_id: '0'}}]",
        ),
        (
            "instance_group { kind: KIND_GPU } optimization { cuda { graphs: true } }",
            "instances: 1\nexecution_providers: [cuda]\ngraph_replay: true",
        ),
        (
            "instance_group { kind: KIND_GPU } optimization { cuda { graphs: false } }",
            "instances: 1\nexecution_providers: [cuda]",
        ),
        ("optimization { priority: PRIORITY_MIN }", "thread_nice: 19"),
        ("optimization { priority: PRIORITY_MAX }", "thread_nice: 0"),
        ("optimization { priority: PRIORITY_DEFAULT }", ""),
        ("optimization { graph { level: 1 } }", "session: {graph_optimization: extended}"),
        ("optimization { graph { level: -1 } }", "session: {graph_optimization: basic}"),
        ("optimization { graph { level: 2 } }", "session: {graph_optimization: none}"),
        (
            (
                'parameters { key: "intra_op_thread_count" value { string_value: "2" } } '
                'parameters { key: "inter_op_thread_count" value { string_value: "3" } } '
                'parameters { key: "execution_mode" value { string_value: "1" } } '
                'parameters { key: "enable_mem_arena" value { string_value: "0" } } '
                'parameters { key: "enable_mem_pattern" value { string_value: "False" } } '
                'parameters { key: "memory.enable_memory_arena_shrinkage" value { string_value: "cpu:0;gpu:1" } } '
                'parameters { key: "session.set_denormal_as_zero" value { string_value: "1" } }'
            ),
            (
                "intra_op_threads: 2\nsession: {inter_op_threads: 3, execution_mode: parallel, memory_arena: false, "
                "memory_pattern: false, shrink_arenas: ['cpu:0', 'gpu:1'], "
                "entries: {session.set_denormal_as_zero: '1'}}"
            ),
        ),
        ('parameters { key: "intra_op_thread_count" value { string_value: "0" } }', ""),
        ('model_operations { op_library_filename: "ops.so" }', "session: {operator_libraries: [ops.so]}"),
        (
            (
                'model_warmup [{ name: "w" batch_size: 2 count: 3 '
                'inputs { key: "a" value { data_type: TYPE_INT64 dims: [4] zero_data: true } } '
                'inputs { key: "b" value { data_type: TYPE_FP32 dims: [4] random_data: true } } '
                'inputs { key: "c" value { data_type: TYPE_STRING dims: [1] input_data_file: "c.bin" } } }, { }]'
            ),
            (
                "warmup_samples:\n- {name: w, rows: 2, count: 3, "
                "inputs: {a: {datatype: INT64, dims: [4], data: zeros}, "
                "b: {datatype: FP32, dims: [4]}, c: {datatype: BYTES, dims: [1], file: c.bin}}}\n- {}"
            ),
        ),
    ],
)
def test_both_file_formats_yield_the_same_options(tmp_path: Path, pbtxt: str, yaml: str) -> None:
    ours = read(tmp_path, yaml, "model.yaml").options
    assert isinstance(ours, ModelOptions)
    assert read(tmp_path, pbtxt).options == ours
    assert ours.warmup_s == 1.5


@pytest.mark.parametrize(
    ("text", "kind", "problem"),
    [
        ('name: "other"', ErrorKind.INVALID_INPUT, "name: expected 'm', the name of the model's folder, got 'other'"),
        ('platform: "tensorrt_plan"', ErrorKind.UNSUPPORTED, "platform: expected 'onnxruntime_onnx', got"),
        ('platform: "ensemble"', ErrorKind.INVALID_INPUT, "ensemble scheduling must be set for ensemble m whose"),
        (
            "ensemble_scheduling { step {} }",
            ErrorKind.INVALID_INPUT,
            "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble",
        ),
        (
            'platform: "ensemble" backend: "onnxruntime" ensemble_scheduling { step {} }',
            ErrorKind.INVALID_INPUT,
            "Ensemble model 'm' must have platform type 'ensemble' and empty backend type",
        ),
        (
            'platform: "ensemble" ensemble_scheduling {}',
            ErrorKind.INVALID_INPUT,
            "must specify 'step' for ensemble 'm'",
        ),
        (
            'platform: "ensemble" ensemble_scheduling { step { model_name: "a" } }',
            ErrorKind.INVALID_INPUT,
            "must specify 'input_map' in step 0 of ensemble 'm'",
        ),
        (
            'platform: "ensemble" ensemble_scheduling { step {} } instance_group {}',
            ErrorKind.INVALID_INPUT,
            "instance group should not be specified for ensemble 'm'",
        ),
        (
            'platform: "ensemble" ensemble_scheduling { step {} } optimization {}',
            ErrorKind.INVALID_INPUT,
            "optimization should not be specified for ensemble 'm'",
        ),
        (
            'platform: "ensemble" ensemble_scheduling { step {} } model_warmup {}',
            ErrorKind.INVALID_INPUT,
            "model_warmup can not be specified for ensemble 'm'",
        ),
        ('backend: "python"', ErrorKind.UNSUPPORTED, "backend: expected 'onnxruntime', got 'python'"),
        ("max_batch_size: -1", ErrorKind.INVALID_INPUT, "max_batch_size: expected 0 or more, got -1"),
        (
            "max_batch_size: 100000",
            ErrorKind.INVALID_INPUT,
            "max_rows: expected integer, 1 to 65536, in rows, got 100000",
        ),
        (
            'input [{ name: "x" dims: [ 4 ] format: FORMAT_NHWC }]',
            ErrorKind.INVALID_INPUT,
            "model input NHWC/NCHW require 3 dims: 'x' has [4]",
        ),
        ('input [{ name: "x" dims: 0 }]', ErrorKind.INVALID_INPUT, "dims of 'x': expected sizes of at least 1, or -1"),
        ('input [{ name: "x" }, { name: "x" }]', ErrorKind.INVALID_INPUT, "input: expected a distinct name for each"),
        (
            'input [{ name: "x" data_type: 99 }]',
            ErrorKind.INVALID_INPUT,
            "data_type of 'x': expected one of TYPE_INVALID, TYPE_BOOL, TYPE_UINT8",
        ),
        (
            'model_warmup { name: "w" inputs { key: "x" value { data_type: 77 zero_data: true } } }',
            ErrorKind.INVALID_INPUT,
            "model_warmup 'w': data_type of 'x': expected one of TYPE_INVALID, ",
        ),
        (
            "dynamic_batching { default_queue_policy { timeout_action: 5 } }",
            ErrorKind.INVALID_INPUT,
            "dynamic_batching.default_queue_policy.timeout_action: expected one of REJECT, DELAY, got 5",
        ),
        (
            "dynamic_batching { priority_queue_policy { key: 1 value { timeout_action: 5 } } }",
            ErrorKind.INVALID_INPUT,
            "dynamic_batching.priority_queue_policy[1].timeout_action: expected one of REJECT, DELAY, got 5",
        ),
        (
            "instance_group { kind: 7 }",
            ErrorKind.INVALID_INPUT,
            "instance_group.kind: expected one of KIND_AUTO, KIND_GPU, KIND_CPU, KIND_MODEL, got 7",
        ),
        (
            'parameters { key: "gpu_mem_limit" value { string_value: "' + "9" * 5000 + '" } }',
            ErrorKind.INVALID_INPUT,
            "parameters['gpu_mem_limit']: expected an unsigned integer, got '999",
        ),
        ("output [{ dims: 1 }]", ErrorKind.INVALID_INPUT, "output: expected a distinct name for each"),
        (
            "sequence_batching { iterative_sequence: true }",
            ErrorKind.UNSUPPORTED,
            "sequence_batching.iterative_sequence is not supported",
        ),
        (
            "optimization { graph { level: 3 } }",
            ErrorKind.INVALID_INPUT,
            "optimization.graph.level: expected one of -1, 0, 1, 2, got 3",
        ),
        (
            "dynamic_batching { priority_levels: 2 default_priority_level: 3 }",
            ErrorKind.INVALID_INPUT,
            "dynamic_batching.default_priority_level: expected 1 to 2, got 3",
        ),
        (
            "dynamic_batching { default_priority_level: 2 }",
            ErrorKind.INVALID_INPUT,
            "dynamic_batching.default_priority_level: expected 1 to 1, got 2",
        ),
        *(
            (
                (
                    f"dynamic_batching {{ priority_levels: 2 "
                    f"priority_queue_policy {{ key: {key} value {{ max_queue_size: 1 }} }} }}"
                ),
                ErrorKind.INVALID_INPUT,
                f"dynamic_batching.priority_queue_policy: expected keys 1 to 2, got {key}",
            )
            for key in (0, 3)
        ),
        (
            "max_batch_size: 8 dynamic_batching { preferred_batch_size: [4, 64] }",
            ErrorKind.INVALID_INPUT,
            "dynamic_batching.preferred_batch_size: expected sizes up to max_batch_size, 8, got 64",
        ),
        (
            'parameters { key: "execution_mode" value { string_value: "2" } }',
            ErrorKind.INVALID_INPUT,
            "parameters['execution_mode']: expected one of 0, 1, got '2'",
        ),
        (
            'parameters { key: "intra_op_thread_count" value { string_value: "-1" } }',
            ErrorKind.INVALID_INPUT,
            "parameters['intra_op_thread_count']: expected an unsigned integer, got '-1'",
        ),
        (
            'parameters { key: "enable_mem_arena" value { string_value: "yes" } }',
            ErrorKind.INVALID_INPUT,
            "parameters['enable_mem_arena']: expected one of 1, true, 0, false, got 'yes'",
        ),
        (
            'parameters { key: "session.intra_op.allow_spining" value { string_value: "1" } }',
            ErrorKind.INVALID_INPUT,
            "unknown entry: 'session.intra_op.allow_spining'; did you mean 'session.intra_op.allow_spinning'?",
        ),
        (
            'model_warmup { name: "w" inputs { key: "x" value { dims: 1 } } }',
            ErrorKind.INVALID_INPUT,
            "model_warmup 'w': input 'x' needs zero_data, random_data or input_data_file",
        ),
        ('default_model_filename: "../net.onnx"', ErrorKind.INVALID_INPUT, "model_file: expected name of a file"),
        (
            "max_batch: 1",
            ErrorKind.INVALID_INPUT,
            '1:1 : Message type "ModelConfig" has no field named "max_batch"; did you mean',
        ),
        (
            'instance_group { kind: KIND_GPU } cc_model_filenames { key: "9.0" value: "m90.onnx" }',
            ErrorKind.UNSUPPORTED,
            "cc_model_filenames is not supported on a GPU",
        ),
    ],
)
def test_invalid_fields_are_rejected_with_the_name_of_the_file(
    tmp_path: Path, text: str, kind: ErrorKind, problem: str
) -> None:
    error = refusal(tmp_path, text)
    assert error.kind is kind
    assert error.message.startswith("config.pbtxt: ")
    assert problem in error.message
    assert str(tmp_path) not in error.message


def test_unreadable_file_is_named_without_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").mkdir()
    with pytest.raises(ServeError) as caught:
        read_configuration("m", tmp_path / "config.pbtxt", DEFAULTS)
    assert caught.value.message == "config.pbtxt: cannot be read: Is a directory"


def test_graphs_are_reported_where_there_is_no_gpu_to_replay_them(tmp_path: Path) -> None:
    read_here = read(tmp_path, "optimization { cuda { graphs: true } }")
    assert read_here.without_effect == ("optimization.cuda.graphs: the model is not on a GPU",)
    assert not read_here.options.graph_replay


def test_options_of_an_ensemble_without_effect_are_reported(tmp_path: Path) -> None:
    steps = "steps: [{model: a, inputs: {x: x}, outputs: {y: y}}]"
    used = "labels: {stable: 1}\nload_policy: on_demand\nversion_policy: {all: true}\nslo_s: 1"
    text = f"inputs: {{x: {{}}}}\noutputs: {{y: {{}}}}\nensemble: {{{steps}}}\n{used}\ninstances: 2"
    (problem,) = read(tmp_path, text, "model.yaml").without_effect
    assert problem == "instances: expected no such option for an ensemble; set it for its members"


def test_parameters_without_effect_are_reported(tmp_path: Path) -> None:
    read_here = read(
        tmp_path,
        'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "yes" } } '
        'parameters { key: "intra_op_num_threads" value { string_value: "2" } } '
        'parameters { key: "gpu_mem_limit" value { string_value: "1" } } instance_group { kind: KIND_CPU }',
    )
    assert sorted(read_here.without_effect) == [
        "parameters['FORCE_CPU_ONLY_INPUT_TENSORS']: unknown parameter",
        "parameters['gpu_mem_limit']: the model is not on a GPU",
        "parameters['intra_op_num_threads']: unknown parameter; did you mean 'intra_op_thread_count'?",
    ]


@pytest.mark.parametrize(
    "tags",
    [
        "{_team: v}",
        '{"te am": v}',
        '{"": v}',
        f"{{{'a' * 64}: v}}",
        f"{{team: {'v' * 129}}}",
        "{team: 1}",
        f"{{{', '.join(f'k{number}: v' for number in range(17))}}}",
    ],
)
def test_metric_tags_are_bounded_label_names_and_values(tmp_path: Path, tags: str) -> None:
    with pytest.raises(ServeError, match=r"metric_tags: expected {name: text, ...}, at most 16, with names of .*, got"):
        read(tmp_path, f"metric_tags: {tags}", "model.yaml")
