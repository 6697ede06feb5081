"""``ortserve profile`` on real models, in a process and in this one; ONNX Runtime's own placement is the reference."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import gpu_models
from models import builders
from ortserve.cli.main import run_tool
from ortserve.tools.profile import measure
from ortserve.tools.profile.arguments import build_parser
from ortserve.tools.subject import find_model
from pages import DOCS, commands
from scarcity import with_files_of_at_most
from servers import LOOK_S

pytestmark = pytest.mark.usefixtures("preloaded_commands")

ROOT: Final = Path(__file__).parents[2]
EXAMPLE: Final = ROOT / "server" / "ortserve" / "example" / "repository"
CORPUS: Final = ROOT / "tests" / "rows" / "corpus"
TARGETS: Final = {
    "digits": EXAMPLE / "digits",
    "texts": EXAMPLE / "text_stats",
    "words": CORPUS / "sklearn_words.onnx",
    "LSTM": CORPUS / "torch_lstm_time_first.onnx",
    "GRU": CORPUS / "torch_gru_with_lengths.onnx",
    "int8": CORPUS / "quantized_cnn_qdq.onnx",
    "half": CORPUS / "half_cnn.onnx",
    "control flow": CORPUS / "torch_greedy_decoder.onnx",
    "BERT": CORPUS / "transformers_bert_dynamo.onnx",
}


def nested(path: Path, steps: int = 12, width: int = 1000) -> Path:
    """A loop whose steps alternate between the branches of an If: x [16, width] → y; over 5 ms on one core."""
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.standard_normal((width, width)).astype(np.float32) / width**0.5, name)
        for name in ("even", "odd")
    ]

    def branch(name: str) -> onnx.GraphProto:
        # 16 rows make a product long enough to measure.
        nodes = [
            helper.make_node("MatMul", ["h", name], [f"{name}_product"], name=f"{name}_multiply"),
            helper.make_node("Tanh", [f"{name}_product"], [f"{name}_out"], name=f"{name}_bend"),
        ]
        return helper.make_graph(
            nodes, name, [], [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None)]
        )

    body = helper.make_graph(
        [
            helper.make_node("Mod", ["i", "two"], ["rest"], name="rest"),
            helper.make_node("Equal", ["rest", "zero"], ["is_even"], name="is_even"),
            helper.make_node(
                "If", ["is_even"], ["next"], name="choose", then_branch=branch("even"), else_branch=branch("odd")
            ),
            helper.make_node("Identity", ["go_on"], ["goes_on"], name="goes_on"),
        ],
        "step",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("h", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, None),
        ],
    )
    numbers = {"steps": np.array(steps), "two": np.array(2), "zero": np.array(0)}
    constants = [numpy_helper.from_array(value.astype(np.int64), name) for name, value in numbers.items()]
    graph = helper.make_graph(
        [helper.make_node("Loop", ["steps", "", "x"], ["y"], name="repeat", body=body)],
        "nested",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [16, width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [16, width])],
        [*weights, *constants],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ortserve", "profile", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def profiled(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """Run the command in this process. Returns the result from its JSON."""
    assert run_tool("profile", [*map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_profile_of_any_model_is_complete(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = profiled(capsys, target, "--runs", "6")["profile"]

    balance = profile["balance"]
    parts = [balance[f"{part}_ms"] for part in ("operators", "profiler", "rest", "interrupted")]
    assert sum(parts) == pytest.approx(balance["profiled_ms"])
    assert sum(node["self_ms"] for node in profile["nodes"]) == pytest.approx(balance["operators_ms"])
    assert sum(operator["nodes"] for operator in profile["operators"]) == len(profile["nodes"])
    assert sum(node["share"] for node in profile["nodes"]) == pytest.approx(1)
    outer = [node for node in profile["nodes"] if not node["inside"]]
    assert profile["fusion"]["after"] == len(outer), "each node of the optimized graph ran"
    assert balance["is_closed"] is None or balance["plain_ms"] > 3, "small models get no verdict"


@pytest.mark.parametrize("kind", ["encoder", "convolutions", "nested"])
def test_operators_and_profiler_make_up_the_time(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    if kind == "encoder":
        gpu_models.encoder(path, layers=6, hidden=384, heads=12, length=32)
    elif kind == "convolutions":
        gpu_models.residual(path, blocks=(2, 2, 2, 2), width=40, size=112, classes=1000)
    else:
        nested(path)
    for _ in range(8):  # other work on the machine may disturb some profiles, but not all of them
        profile = profiled(capsys, path, "--runs", "40", "--threads", "1")["profile"]
        balance = profile["balance"]
        if abs(balance["rest_share"]) - balance["rest_error"] < 0.05:
            break

    assert balance["operators_ms"] > 3, "not a small model, also on a fast machine"
    assert abs(balance["rest_share"]) - balance["rest_error"] < 0.05
    if kind == "nested":
        (loop,) = (node for node in profile["nodes"] if node["op"] == "Loop")
        assert loop["total_ms"] > 0.8 * balance["operators_ms"]
        assert loop["self_ms"] < 0.2 * loop["total_ms"], "the time of inner nodes counts once"
        products = [node for node in profile["nodes"] if node["op"] == "MatMul"]
        assert [node["inside"] for node in products] == [["repeat", "choose"]] * 2
        assert [node["calls"] for node in products] == [6, 6]
        assert all(node["gflops"] > 0 for node in products)


def test_optimized_graph_is_saved_without_its_weights(tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "m.onnx", inputs=512, hidden=1024)
    given = build_parser().read([str(path), "--runs", "5"])

    (runs,) = measure.measure([measure.Variant(find_model(str(path)), label="m")], tmp_path, given, lambda *_: None)

    assert runs.optimized is not None
    assert {tensor.dims for tensor in runs.optimized.constants.values()} >= {(512, 1024)}
    assert (tmp_path / "0.onnx").stat().st_size < 100_000 < path.stat().st_size


def test_operators_and_profiler_make_up_the_time_of_many_cheap_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The nodes take 0.3 µs, the profiler 5 µs for each. Its clock counts whole µs."""
    nodes = [
        helper.make_node(
            op, [f"t{number}", f"t{max(0, number - 1)}"][: 2 if op in ("Add", "Mul") else 1], [f"t{number + 1}"]
        )
        for number, op in enumerate(["Relu", "Add", "Tanh", "Mul", "Sigmoid", "Abs"] * 334)
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [16]) for name in ("t0", f"t{len(nodes)}")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")

    for _ in range(4):  # other work on the machine may disturb some profiles, but not all of them
        balance = profiled(capsys, tmp_path / "m.onnx", "--threads", "1")["profile"]["balance"]
        if abs(balance["rest_share"]) < 0.05 + balance["clock_error"]:
            break

    assert abs(balance["rest_share"]) < 0.05 + balance["clock_error"] < 0.2
    assert 0.5 < balance["profiler_share"] < 1


@pytest.mark.parametrize("threads", ["1", "2"])
def test_times_of_short_operators_exclude_the_profiler(
    threads: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Tanh of one number takes 0.3 µs, but the profiler records 1 to 3."""
    nodes = [helper.make_node("Tanh", [f"t{number}"], [f"t{number + 1}"]) for number in range(200)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("t0", "t200")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")

    balance = profiled(capsys, tmp_path / "m.onnx", "--runs", "40", "--threads", threads)["profile"]["balance"]

    assert 0.2 < balance["call_overhead_us"] < 20
    profiler_part_ms = 200 * balance["call_overhead_us"] / 1000
    assert balance["operators_ms"] < profiler_part_ms, "with the profiler's part they would be longer than it"


def test_achieved_rate_is_that_of_the_whole_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = gpu_models.mlp(tmp_path / "model.onnx", layers=4, width=512)
    profile = profiled(capsys, path, "--runs", "10", "--rows", "8", "--threads", "1")["profile"]

    operations = 0.0
    for operator in profile["operators"]:
        if operator["gflops"] is not None:
            operations += operator["gflops"] * 1e9 * operator["self_ms"] / 1e3
    assert operations == pytest.approx(4 * 2 * 8 * 512 * 512, rel=0.001)


def test_nodes_are_told_apart_from_those_that_have_their_number_as_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ONNX Runtime names the last node MatMul_2, as the first one. The weight of the branch is a constant node."""
    weights = [numpy_helper.from_array(np.ones(shape, np.float32)) for shape in ((8, 32), (32, 16), (16, 4))]
    wide, narrow, inner = (helper.make_node("Constant", [], [f"w{n}"], value=one) for n, one in enumerate(weights))
    value = helper.make_tensor_value_info
    multiply = helper.make_node("MatMul", ["c", "w2"], ["z"])
    branch = helper.make_graph([inner, multiply], "branch", [], [value("z", TensorProto.FLOAT, None)])
    nodes = [
        *(wide, narrow, helper.make_node("MatMul", ["x", "w0"], ["a"], name="MatMul_2")),
        helper.make_node("Tanh", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w1"], ["c"]),
        helper.make_node("If", ["chosen"], ["y"], name="if", then_branch=branch, else_branch=branch),
    ]
    inputs = [value("x", TensorProto.FLOAT, ["n", 8]), value("chosen", TensorProto.BOOL, [])]
    graph = helper.make_graph(nodes, "g", inputs, [value("y", TensorProto.FLOAT, ["n", 4])])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)

    found = profiled(capsys, path, "--runs", "5")["profile"]["nodes"]
    products = [node for node in found if node["op"] == "MatMul"]
    assert {(*node["inside"], node["output_shapes"][0]): (node["calls"], node["call_bytes"]) for node in products} == {
        ("float[1,32]",): (1, 4 * (8 + 8 * 32 + 32)),
        ("float[1,16]",): (1, 4 * (32 + 32 * 16 + 16)),
        ("if", "float[1,4]"): (1, 4 * (16 + 16 * 4 + 4)),
    }


def test_inputs_are_read_and_trace_and_page_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = tmp_path / "inputs.npz"
    (tensor,) = ort.InferenceSession(EXAMPLE / "digits" / "1" / "model.onnx").get_inputs()
    samples: dict[str, Any] = {tensor.name: np.random.default_rng(0).random((4, *tensor.shape[1:]), np.float32)}
    np.savez(given, **samples)
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    result = profiled(
        capsys, EXAMPLE / "digits", "--inputs", given, "--rows", "2", "--runs", "5", "--trace", trace, "-o", page
    )

    assert result["schema"] == "ortserve.profile/1"
    assert (result["profile"]["inputs"], result["profile"]["rows"]) == ("inputs.npz: 4 samples", 2)
    assert result["profile"]["nodes"][0]["output_shapes"][0].startswith("float[2,")
    events = json.loads(trace.read_text())
    assert {"cat", "ts", "dur", "name"} <= set(events[0])
    text = page.read_text()
    assert text.count("<svg") == 2
    assert not re.search(r"<script|<link|https?://(?!www\.w3\.org)", text)


def test_result_is_printed_if_the_trace_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(EXAMPLE / "digits"), "--runs", "2", "--trace", "/dev/full", "--json"]
    assert run_tool("profile", arguments) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["profile"]["nodes"]
    assert printed.err == "ortserve profile: /dev/full: No space left on device\n"


def test_settings_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    model = CORPUS / "transformers_bert_dynamo.onnx"
    result = profiled(capsys, model, "--runs", "5", "--compare", "default", "graph_optimization=basic,threads=1")

    assert result["other"]["settings"] == {"graph_optimization": "basic"}
    assert result["other"]["threads"] == 1
    rows = {row["op"]: row for row in result["comparison"]["operators"]}
    assert rows["BiasGelu"]["nodes"] is not None
    assert rows["BiasGelu"]["other_nodes"] is None, "fused by higher levels only"
    assert rows["Gelu"]["nodes"] is None


def test_operators_that_overlap_are_not_added_up(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "execution_mode=parallel", "--set", "inter_op_threads=2"]
    profile = profiled(capsys, CORPUS / "torch_unet.onnx", "--runs", "5", "--threads", "1", *settings)["profile"]

    assert profile["balance"]["gaps_ms"] is None
    assert {node["gap_us"] for node in profile["nodes"]} == {None}
    balance = profile["balance"]
    assert balance["operators_ms"] <= balance["profiled_ms"]


def test_two_models_are_compared_for_people() -> None:
    done = run("--compare", CORPUS / "torch_mlp.onnx", CORPUS / "quantized_mlp_qoperator.onnx", "--runs", "5")

    assert done.returncode == 0, done.stderr
    assert "Operators whose times differ" in done.stdout
    assert "QLinearMatMul" in done.stdout or "QGemm" in done.stdout
    assert done.stderr == "", "no bars in pipes"


def test_configured_files_are_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    (folder / "1").mkdir(parents=True)
    builders.mlp(folder / "1" / "model.onnx")
    (folder / "model.yaml").write_text(f"session:\n  optimized_model_file: {tmp_path}/served.onnx\n")

    profiled(capsys, folder, "--runs", "2")
    assert not (tmp_path / "served.onnx").exists()


def test_runs_are_bounded_by_what_the_profiler_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "MAX_EVENTS", 10_000)
    many, endless = (builders.repeats(tmp_path / f"{steps}.onnx", steps=steps) for steps in (500, 5_000))
    profile = profiled(capsys, many, "--runs", "1000")["profile"]

    assert 1 <= profile["balance"]["runs"] < 10
    assert any("events of the profiler" in note for note in profile["notes"])
    assert run_tool("profile", [str(endless)]) == 2
    assert "expected at most 10,000 events" in capsys.readouterr().err


def test_time_is_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = builders.mlp(tmp_path / "mlp.onnx")
    profile = profiled(capsys, path, "--runs", "100000", "--seconds", "0.2")["profile"]

    assert any("runs fit into 0.2 s" in note for note in profile["notes"])


def broken(folder: Path) -> dict[str, tuple[list[str], int, str]]:
    """Invalid arguments, with the exit status and the end of the line."""
    model = CORPUS / "torch_mlp.onnx"
    (folder / "text.onnx").write_text("hello")
    (folder / "cut.onnx").write_bytes(model.read_bytes()[:-200])
    builders.external_weights(folder / "external.onnx", "weights.bin")
    (folder / "empty.onnx").touch()
    np.savez(folder / "wrong.npz", nothing=np.zeros((2, 3), np.float32))
    known = str(model)
    return {
        "no such model": ([str(folder / "none.onnx")], 2, "found neither"),
        "not ONNX": ([str(folder / "text.onnx")], 2, "expected an ONNX model"),
        "truncated": ([str(folder / "cut.onnx")], 2, "cut.onnx"),
        "missing weights": ([str(folder / "external.onnx")], 2, "weights.bin: there is no such file"),
        "empty": ([str(folder / "empty.onnx")], 2, "the file is empty"),
        "folder": ([str(folder)], 2, "no version folder"),
        "wrong inputs": ([known, "--inputs", str(folder / "wrong.npz")], 2, "'nothing' is not an input of the model"),
        "unknown setting": ([known, "--set", "speed=9"], 2, "unknown key"),
        "bad value": ([known, "--set", "graph_optimization=most"], 2, "graph_optimization: expected"),
        "no setting": ([known, "--set", "speed"], 2, "expected KEY=VALUE"),
        "bad provider": ([known, "--provider", "abacus"], 2, "abacus"),
        "bad threads": ([known, "--compare", "default", "threads=none"], 2, "threads"),
        "no folder": ([known, "--trace", "/nowhere/t.json"], 2, "expected a file in an existing folder"),
        "no server": (["http://127.0.0.1:9", "digits"], 1, "cannot reach the server"),
        "other protocol": (["grpc://127.0.0.1:9", "digits"], 2, "HTTP port"),
    }


def test_bad_input_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for case, (arguments, status, end) in broken(tmp_path).items():
        assert run_tool("profile", arguments) == status, case
        shown = capsys.readouterr()
        assert shown.out == "", case
        assert shown.err.startswith("ortserve profile: "), case
        assert end in shown.err, case
        assert shown.err.count("\n") == 1, shown.err


@pytest.mark.parametrize(("place", "command"), [("full", "profile"), ("full", "inspect"), ("missing", "profile")])
def test_unusable_folder_for_temporary_files_is_one_line_that_names_it(place: str, command: str) -> None:
    """ONNX Runtime reports neither that its trace nor that its optimized graph is cut off."""
    lost = "import sys, tempfile; tempfile._candidate_tempdir_list = lambda: ['/nowhere']"
    program = {
        "full": with_files_of_at_most(4096),
        "missing": f"from ortserve.cli.main import main; {lost}; sys.exit(main(sys.argv[1:]))",
    }
    started: list[str | Path] = [sys.executable, "-c", program[place], command, EXAMPLE / "digits"]
    ended = subprocess.run(started, capture_output=True, text=True, check=False, timeout=100)
    assert (ended.returncode, ended.stdout) == (1, ""), ended
    assert ended.stderr.startswith(f"ortserve {command}: ")
    assert "set TMPDIR to a folder with more space" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "expected a TARGET, or --compare with two models"),
        (["http://127.0.0.1:9"], "MODEL: expected the name of a model after the URL, got none"),
        (["127.0.0.1:9", "b"], "MODEL: expected the URL of a server before it, which begins with http://, got '127"),
        (["x", "--runs", "0"], "argument --runs: expected an integer from 1"),
        (["x", "--trace", "y", "-o", "y"], "--trace: expected another file than that of -o, got 'y'"),
    ],
)
def test_wrong_arguments_show_the_usage(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        run_tool("profile", arguments)
    assert raised.value.code == 2
    usage, _, line = capsys.readouterr().err.partition("ortserve profile: error: ")
    assert usage.startswith("usage: ")
    assert line.startswith(problem)


def test_interruption_is_one_line(tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "mlp.onnx")
    arguments = [str(path), "--runs", "999999", "--trace", str(tmp_path / "t.json")]
    command = [sys.executable, "-m", "ortserve", "profile", *arguments]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("ortserve-*/*.json")) and process.poll() is None:
        time.sleep(LOOK_S)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err
    assert err == "ortserve profile: interrupted\n"


def test_commands_of_the_page_show_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run each command of the tool's page; titles, columns and operators must equal those of its output."""
    monkeypatch.chdir(tmp_path)
    gpu_models.encoder(tmp_path / "encoder.onnx", layers=1, hidden=64, heads=4, length=16)
    gpu_models.residual(tmp_path / "images.onnx", blocks=(1, 1), width=16, size=64, classes=10)
    names = {"LSTM": "lstm", "control flow": "decoder", "words": "words", "int8": "int8"}
    for target, name in names.items():
        (tmp_path / f"{name}.onnx").symlink_to(TARGETS[target])
    (tmp_path / "models").symlink_to(EXAMPLE)
    shown = [command for command in commands(DOCS / "tools" / "profile.md") if command.words[1] == "profile"]
    local = [command for command in shown if command.output]
    assert len(local) == 8
    for command in local:
        assert run_tool("profile", [*command.words[2:], "--runs", "20"]) == 0
        output = capsys.readouterr().out
        for line in command.output.splitlines():
            if re.match(r"(Where the time goes|Operator types|Fused nodes|Operators gained| (part|operator) )", line):
                assert line.split() in [other.split() for other in output.splitlines()], (command.text, line)
