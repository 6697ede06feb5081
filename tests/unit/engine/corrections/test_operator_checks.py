"""Checks of operators: ONNX Runtime's results for valid inputs, and errors in place of crashes.

Sessions run in another process, which a missing check would crash.
"""

from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

from empty_operands import outcome
from models.empty_inside import COMPUTED_SINCE_1_32, EMPTY_INSIDE, REJECTED_SINCE_1_32, cut
from ortserve.engine.corrections.operator_checks import check_edits
from ortserve.engine.ort_errors import ORT_ERRORS
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.model_file.reading import read_model

Arrays = dict[str, np.ndarray]

SINCE_1_32 = tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 32)

TWICE = "m (float[n,r,c] x) => (float[n,r,c] y) { z = com.microsoft.Inverse (x) y = com.microsoft.Inverse (z) }"
INVERSE = "m (float[n,r,c] x) => (float[n,r,c] y) { y = com.microsoft.Inverse (x) }"
SPECTRUM = "m (float[1,n,1] x, int64 step, int64 length) => (float[a,b,c,2] y) { y = STFT (x, step, , length) }"
WINDOWED = """m (float[1,n,1] x, int64 step, int64 size) => (float[a,b,c,2] y)
    { window = HannWindow (size) y = STFT <onesided = 0> (x, step, window) }"""
AVERAGE = """m (uint8[n,h,w,c] x) => (uint8[n,a,b,c] y) <float s = {0.5}, uint8 z = {0}> {
    y = com.microsoft.
    QLinearAveragePool <channels_last = 1, kernel_shape = [3, 3], pads = [0, 1, 0, 0]> (x, s, z, s, z) }"""
SCALED = """m (uint8[n,k] x, uint8[k,m] z, float one, float[scales] s) => (float[n,m] y)
    { y = com.microsoft.MatMulIntegerToFloat (x, z, one, s) }"""
HEADS = """m (float[b,h,s,d] x, int64[b,s] at, float[p,q] cos) => (float[b,h,s,d] y)
    { y = com.microsoft.RotaryEmbedding (x, at, cos, cos) }"""
PAST = """m (float[b,s,8] q, float[b,s,d] v, float[b,2,p,4] past)
    => (float[b,s,d] y, float[b,2,t,4] k, float[b,2,t,e] z)
    { y, k, z = com.microsoft.MultiHeadAttention <num_heads = 2, scale = 0.5> (q, q, v, , , , past, past) }"""
ONLY_PAST = {
    "MultiHeadAttention": """m (float[b,s,8] x, float[b,2,p,4] past) => (float[b,s,8] y)
        { y = com.microsoft.MultiHeadAttention <num_heads = 2> (x, x, x, , , , past, past) }""",
    "GroupQueryAttention": """m (float[b,s,32] x, float[b,1,p,8] past) => (float[b,s,16] y)
        <int32[2] last = {4, 4}, int32 all = {5}> { y = com.microsoft.
        GroupQueryAttention <num_heads = 2, kv_num_heads = 1> (x, , , past, past, last, all) }""",
}
IDLE = """m ({0}[b,1,32] x, {0}[b,1,p,8] past, int32[b] new) => ({0}[b,1,16] y, {0}[b,1,p,8] k, {0}[b,1,p,8] v)
    <int32[3] last = {{4, 3, 4}}, int32 all = {{5}}> {{ y, k, v = com.microsoft.GroupQueryAttention
    <num_heads = 2, kv_num_heads = 1> (x, , , past, past, last, all, , , , , , , , , , new) }}"""
WORDS = """m (int32[n,5] x, float[6,1,3,4] w, float[6] b, float[30,4] c) => (float[n,6] y) { y = com.microsoft.
    WordConvEmbedding <embedding_size = 6, conv_window_size = 3, char_embedding_size = 4> (x, w, b, c) }"""


def boxes_of(dtype: str = "float", ratio: int = 0) -> str:
    attributes = f'sampling_ratio = {ratio}, spatial_scale = 0.5, mode = "max", output_width = 3, output_height = 2'
    return f"""m ({dtype}[1,2,h,w] x, {dtype}[n,4] boxes, int64[n] at) => ({dtype}[n,2,2,3] y)
        {{ y = RoiAlign <{attributes}> (x, boxes, at) }}"""


def write(folder: Path, text: str, opset: int = 17) -> Path:
    imports = f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1, "ai.onnx.ml": 3]>'
    onnx.save(parser.parse_model(f"{imports} {text}"), str(folder / "model.onnx"))
    return folder / "model.onnx"


@pytest.fixture(scope="module")
def process() -> Iterator[Executor]:
    """A process whose allocator fills memory. It ends with the first crash."""
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, get_context("spawn")) as processes:
        patch.setenv("MALLOC_PERTURB_", "85")
        patch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")  # glibc does not fill memory from this cache
        yield processes


def run(path: Path, inputs: Arrays, *, checked: bool = True, threads: int = 1) -> np.ndarray | str:
    """The output of a session, or its error."""
    options = SessionOptions(ProviderChoice(CPU), threads)
    session = open_session(path, "m/1", options) if checked else ort.InferenceSession(str(path), providers=[CPU])
    try:
        found = session.run(None, inputs)[0]
    except ORT_ERRORS as error:
        return str(error)
    return np.asarray(found)


def boxes(*rows: list[float], dtype: type = np.float32) -> Arrays:
    image: np.ndarray = np.arange(128).reshape(1, 2, 8, 8).astype(dtype)
    return {"x": image, "boxes": np.array(rows, dtype).reshape(-1, 4), "at": np.zeros(len(rows), np.int64)}


def signal(**numbers: int) -> Arrays:
    waves = np.random.default_rng(0).standard_normal((1, 16, 1)).astype(np.float32)
    return {"x": waves} | {name: np.array(number) for name, number in numbers.items()}


def scaled(columns: int, scales: int) -> Arrays:
    matrices = {"x": np.ones((1, 4), np.uint8), "z": np.ones((4, columns), np.uint8)}
    return matrices | {"s": np.full(scales, 0.5, np.float32), "one": np.array(1, np.float32)}


def heads(size: int) -> Arrays:
    queries = np.random.default_rng(0).standard_normal((1, 2, 3, size)).astype(np.float32)
    return {"x": queries, "at": np.zeros((1, 3), np.int64), "cos": np.full((5, 4), 0.5, np.float32)}


def past(size: int) -> Arrays:
    shapes = {"q": (1, 3, 8), "v": (1, 3, size), "past": (1, 2, 5, 4)}
    return {name: np.full(shape, 0.5, np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("text", "inputs", "opset"),
    [
        (INVERSE, {"x": np.random.default_rng(0).standard_normal((3, 4, 4)).astype(np.float32)}, 17),
        (TWICE, {"x": np.random.default_rng(0).standard_normal((3, 4, 4)).astype(np.float32)}, 17),
        (SPECTRUM, signal(step=2, length=4), 17),
        (WINDOWED, signal(step=2, size=4), 17),
        (boxes_of(), boxes([0, 0, 14, 9], [-3, 2, 900, 1000], [9, 9, 3, 3]), 11),
        (boxes_of("double"), boxes([0, 0, 14, 9], dtype=np.float64), 16),
        (boxes_of(), boxes(), 16),
        (SCALED, scaled(3, 3), 17),
        (SCALED, scaled(4, 1), 17),
        (HEADS, heads(8), 17),
        (PAST, past(8), 17),
        (AVERAGE, {"x": np.ones((1, 3, 2, 2), np.uint8)}, 17),
    ],
    ids=[
        "matrices",
        "two operators",
        "frames",
        "a window",
        "boxes",
        "boxes of FP64",
        "no boxes",
        "scales",
        "a scale",
        "heads",
        "a past",
        "an image",
    ],
)
def test_results_are_those_of_onnx_runtime(
    process: Executor, tmp_path: Path, text: str, inputs: Arrays, opset: int
) -> None:
    path = write(tmp_path, text, opset)
    found = process.submit(run, path, inputs).result()
    np.testing.assert_array_equal(found, process.submit(run, path, inputs, checked=False).result())


@pytest.mark.parametrize(
    ("text", "inputs", "expected"),
    [
        (INVERSE, {"x": np.ones((3, 64, 3), np.float32)}, "Inverse expects square matrices"),
        (INVERSE, {"x": np.ones((2, 0, 3), np.float32)}, "Inverse expects square matrices"),
        (SPECTRUM, signal(step=2, length=0), "STFT expects a frame_length other than 0"),
        (WINDOWED, signal(step=2, size=0), "STFT expects a window that is not empty"),
        (boxes_of(), boxes([0, 0, 14, 9], [0, 0, 1e19, 1e19]), "RoiAlign expects boxes of at most 16777216 cells"),
        (SCALED, scaled(1, 90000), "MatMulIntegerToFloat expects scales of one number, or one for each column"),
        (HEADS, heads(9), "RotaryEmbedding expects heads of an even size"),
        (PAST, past(64), "MultiHeadAttention expects keys and values of one size"),
        (AVERAGE, {"x": np.ones((1, 2, 2, 2), np.uint8)}, "QLinearAveragePool expects images of at least 3x2"),
    ],
    ids=[
        "rows",
        "no rows",
        "a frame of 0",
        "an empty window",
        "a large box",
        "wide scales",
        "odd heads",
        "other values than of the past",
        "a small image",
    ],
)
def test_inputs_that_an_operator_does_not_survive_get_an_error(
    process: Executor, tmp_path: Path, text: str, inputs: Arrays, expected: str
) -> None:
    found = process.submit(run, write(tmp_path, text), inputs).result()
    assert isinstance(found, str)
    assert expected in found


_JOINED: Final = "t = Slice (x, from, long, at) q = Concat <axis = 1> (t, z)"
_IN_GRAPHS: Final = {
    "If": f"""y = If (c) <then_branch = g () => (float[n,e] q) {{ {_JOINED} }},
        else_branch = h () => (float[n,e] q) {{ t = Neg (x) q = Concat <axis = 1> (t, z) }}>""",
    "Loop": f"""y = Loop (once, c, x) <body = b (int64 i, bool d, float[n,c] v) => (bool f, float[n,e] q)
        {{ f = Identity (d) {_JOINED.replace("(x,", "(v,")} }}>""",
    "Scan": f"""k = Unsqueeze (x, at) s = Scan <num_scan_inputs = 1, body = b (float[n,c] v) => (float[n,e] q)
        {{ {_JOINED.replace("(x,", "(v,")} }}> (k) y = Squeeze (s, at)""",
}


@pytest.mark.parametrize("kind", _IN_GRAPHS)
def test_operators_in_graphs_of_nodes_are_checked(process: Executor, tmp_path: Path, kind: str) -> None:
    text = f"""m (float[n,c] x, float[n,c] z, bool c, int64[1] from) => (float[n,e] y)
        <int64[1] long = {{9}}, int64[1] at = {{0}}, int64 once = {{1}}> {{ {_IN_GRAPHS[kind]} }}"""
    path = write(tmp_path, text, 21)
    inputs = {"x": np.zeros((3, 2), np.float32), "z": np.ones((3, 2), np.float32), "c": np.array(True)}
    whole = process.submit(run, path, inputs | {"from": np.array([0])}).result()
    np.testing.assert_array_equal(whole, np.concatenate([inputs["x"], inputs["z"]], 1))
    found = process.submit(run, path, inputs | {"from": np.array([9])}).result()
    assert isinstance(found, str), found
    assert "Concat expects tensors that differ only along its axis" in found


@pytest.mark.parametrize("opset", [9, 10])
def test_models_of_old_operator_sets_are_checked(process: Executor, tmp_path: Path, opset: int) -> None:
    found = process.submit(run, write(tmp_path, INVERSE, opset), {"x": np.ones((3, 64, 3), np.float32)}).result()
    assert "Inverse expects square matrices" in found


@pytest.mark.parametrize(
    ("nodes", "few", "is_declared"),
    [
        ("t = Reshape (x, shape)", [4], False),
        ("t = Reshape (x, shape)", [4], True),
        ("u = Reshape (x, two) t = Squeeze (u)", [1, 4], True),
    ],
    ids=["an input without a declared shape", "a list of any length", "axes of size 1"],
)
def test_tensor_that_a_model_reshapes_to_too_few_axes_gets_an_error(
    process: Executor, tmp_path: Path, nodes: str, few: list[int], is_declared: bool
) -> None:
    text = f"""m (float[a] x, int64[n] shape, int64[k] lengths) => (float y) <int64[1] at = {{0}}, int64[1] end = {{2}}>
        {{ two = Slice (shape, at, end) {nodes} y = ReverseSequence (t, lengths) }}"""
    path = write(tmp_path, text)
    model = onnx.load(path)
    for declared in (*model.graph.input[:1][is_declared:], *model.graph.output):
        declared.type.tensor_type.ClearField("shape")
    onnx.save(model, path)
    inputs: Arrays = {"x": np.arange(4, dtype=np.float32), "lengths": np.array([2, 2])}
    whole = process.submit(run, path, inputs | {"shape": np.array([2, 2])}).result()
    np.testing.assert_array_equal(whole, [[2, 3], [0, 1]])
    found = process.submit(run, path, inputs | {"shape": np.array(few)}).result()
    assert isinstance(found, str), found
    assert "ReverseSequence expects input 0 with at least 2 axes" in found


@pytest.mark.parametrize(("first", "place"), [("w, s", 1), ("s, w", 0)], ids=["slice", "state"])
def test_tensor_with_other_axes_than_the_body_of_a_scan_declares_gets_an_error(
    process: Executor, tmp_path: Path, first: str, place: int
) -> None:
    """The squeezed tensor has an axis for the rows if there are several."""
    shapes = ("[a]", "[a]") if place else ("[a,b]", "")
    body = f"b (float{shapes[0]} u, float{shapes[1]} v) => (float{shapes[0]} o, float q)"
    text = f"""m (float[n,3,6] x) => (float[k,j,i] y, float[c,d,e] z) <float[6] w = {{1, 2, 3, 4, 5, 6}}> {{
        s = Squeeze (x)
        y, z = Scan <num_scan_inputs = 1, body = {body}
            {{ h = Abs (v) g = Sigmoid (h) q = Add (g, g) e = Abs (u) f = Sigmoid (e) o = Add (f, f) }}> ({first}) }}"""
    path = write(tmp_path, text)
    model = onnx.load(path)
    steps = onnx.helper.get_node_attr_value(model.graph.node[1], "body")
    for declared in (*steps.output, *model.graph.output):
        declared.type.tensor_type.ClearField("shape")
    onnx.save(model, path)
    assert isinstance(process.submit(run, path, {"x": np.ones((1, 3, 6), np.float32)}).result(), np.ndarray)
    found = process.submit(run, path, {"x": np.ones((3, 3, 6), np.float32)}).result()
    assert isinstance(found, str), found
    assert f"Scan expects input {place} with 2 axes" in found


@pytest.mark.parametrize("operator", ONLY_PAST)
def test_attention_to_a_past_without_outputs_for_the_present(process: Executor, tmp_path: Path, operator: str) -> None:
    """ONNX Runtime would read beyond the tensors: the next row, or earlier memory, such as that of other requests."""
    path = write(tmp_path, ONLY_PAST[operator])
    model = onnx.load(path)
    inputs = {
        declared.name: np.random.default_rng(0)
        .standard_normal(
            [{"b": 2, "s": 1, "p": 4}.get(d.dim_param, d.dim_value) for d in declared.type.tensor_type.shape.dim]
        )
        .astype(np.float32)
        for declared in model.graph.input
    }
    found = process.submit(run, path, inputs).result()
    model.graph.node[0].output.extend(["k", "v"])
    onnx.save(model, str(path))
    np.testing.assert_array_equal(found, process.submit(run, path, inputs, checked=False).result())


@pytest.mark.parametrize(("dtype", "kind"), [(np.float32, "float"), (np.float16, "float16")])
def test_rows_without_new_tokens_become_zeros(process: Executor, tmp_path: Path, dtype: type, kind: str) -> None:
    """ONNX Runtime does not write them: they would contain earlier memory, such as that of other requests."""
    rng = np.random.default_rng(0)
    inputs: Arrays = {
        name: rng.standard_normal((3, 1, *shape)).astype(dtype) for name, shape in (("x", (32,)), ("past", (4, 8)))
    }
    path = write(tmp_path, IDLE.format(kind))
    whole = process.submit(run, path, inputs | {"new": np.array([1, 0, 1], np.int32)}).result()
    assert isinstance(whole, np.ndarray), whole
    assert not whole[1].any()
    assert whole[0].all()
    np.testing.assert_array_equal(
        whole[::2], process.submit(run, path, inputs | {"new": np.ones(3, np.int32)}, checked=False).result()[::2]
    )


@pytest.mark.parametrize("operator", ["QLinearLeakyRelu", "QLinearSigmoid"])
def test_activation_without_its_last_zero_point_is_loaded(process: Executor, tmp_path: Path, operator: str) -> None:
    """ONNX Runtime would end the process at the load."""
    text = f"""m (uint8[n,4] x) => (uint8[n,4] y) <float half = {{0.5}}, float small = {{0.01}}, uint8 zero = {{0}}>
        {{ y = com.microsoft.{operator} (x, half, zero, small%s) }}"""
    inputs = {"x": np.arange(8, dtype=np.uint8).reshape(2, 4)}
    found = process.submit(run, write(tmp_path, text % ""), inputs).result()
    assert isinstance(found, np.ndarray), found
    whole = process.submit(run, write(tmp_path, text % ", zero"), inputs, checked=False).result()
    np.testing.assert_array_equal(found, whole)


def test_words_without_characters_become_zeros(process: Executor, tmp_path: Path) -> None:
    """ONNX Runtime does not write them: they would contain earlier memory, such as that of other requests."""
    rng = np.random.default_rng(0)
    shapes = {"w": (6, 1, 3, 4), "b": (6,), "c": (30, 4)}
    inputs = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    inputs["x"] = rng.integers(1, 29, (64, 5), np.int32)
    path = write(tmp_path, WORDS)
    whole = process.submit(run, path, inputs).result()
    np.testing.assert_array_equal(whole, process.submit(run, path, inputs, checked=False).result())
    assert isinstance(whole, np.ndarray)
    inputs["x"][::2, 0] = np.resize([0, -1], 32)

    found = process.submit(run, path, inputs).result()

    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found[1::2], whole[1::2])
    np.testing.assert_array_equal(found[::2], np.zeros((32, 6), np.float32))


@pytest.mark.parametrize("name", EMPTY_INSIDE)
def test_tensor_that_becomes_empty_inside_the_model_gets_an_error(process: Executor, tmp_path: Path, name: str) -> None:
    """Without the check, ONNX Runtime ends the process, does not return, or leaves earlier memory in the output.

    Some operators survive since 1.32. The server leaves it the empty tensors that it computes.
    """
    text, shape = EMPTY_INSIDE[name]
    path = write(tmp_path, text, 25 if name.startswith("Attention") else 21)
    model = onnx.load(path)
    inputs = {
        declared.name: np.ones(
            [size.dim_value or shape[axis] for axis, size in enumerate(declared.type.tensor_type.shape.dim)],
            onnx.helper.tensor_dtype_to_np_dtype(declared.type.tensor_type.elem_type),
        )
        for declared in model.graph.input
    }
    whole = process.submit(run, path, inputs | {"from": np.array([0])}).result()
    np.testing.assert_array_equal(
        whole, process.submit(run, path, inputs | {"from": np.array([0])}, checked=False).result()
    )
    assert isinstance(whole, np.ndarray), whole
    empty = inputs | {"from": np.array([9])}
    found = process.submit(run, path, empty, threads=4).result()
    is_computed, is_rejected = (SINCE_1_32 and name in names for names in (COMPUTED_SINCE_1_32, REJECTED_SINCE_1_32))
    survives = not process.submit(outcome, path.read_bytes(), empty).result()
    assert survives == (is_computed or is_rejected)
    if is_computed:
        np.testing.assert_array_equal(found, process.submit(run, path, empty, checked=False).result())
        return
    assert isinstance(found, str), found
    assert f"{name.split()[0]} expects" in found


@pytest.mark.parametrize(
    "text",
    [
        boxes_of(ratio=2),
        "m (float[n] z) => (float[n] y) <float[2,2] x = {1, 2, 3, 4}> { v = com.microsoft.Inverse (x) y = Add (z, z) }",
        "m (float[n] x) => (float[n] y) { y = Relu (x) }",
        cut("float[n,2,w] x", "float[n,2,w] y", "third) y = InstanceNormalization (t, a, a)", ", float[2] a = {1, 1}"),
    ],
    ids=["a number of samples", "a constant", "another operator", "a normalization of FP32"],
)
def test_other_operators_stay_as_they_are(tmp_path: Path, text: str) -> None:
    assert check_edits(read_model(write(tmp_path, text))) == {}


def test_model_in_two_parts_is_opened_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """ONNX Runtime merges the two main graphs, which are one then."""
    content = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> {INVERSE}')
    name = onnx.ModelProto(graph=onnx.GraphProto(name="m")).SerializeToString()
    for part in (b"", name):
        (tmp_path / "model.onnx").write_bytes(content.SerializeToString() + part)
        open_session(tmp_path / "model.onnx", "m", SessionOptions(ProviderChoice(CPU), 1))
        assert ("corrections and checks of operators are left out" in caplog.text) == bool(part)


def test_model_that_does_not_load_with_checks_is_opened_without_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> {INVERSE}')
    model.graph.node[0].input[0] = "y/check_0"  # a name that the checks use, too
    model.graph.node.insert(0, onnx.helper.make_node("Identity", ["x"], ["y/check_0"]))
    onnx.save(model, str(tmp_path / "model.onnx"))
    session = open_session(tmp_path / "model.onnx", "m", SessionOptions(ProviderChoice(CPU), 1))
    (found,) = session.run(None, {"x": np.full((1, 1, 1), 4, np.float32)})
    assert found.tolist() == [[[0.25]]]
    assert "checks of operators are left out, because ONNX Runtime does not load the model with them" in caplog.text
