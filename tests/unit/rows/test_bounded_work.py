"""The analysis ends soon for any file: numbers stay small, work is counted, and invalid models are unknown."""

from pathlib import Path

import onnx
import onnx.parser
import pytest

from ortserve.model_file import reading
from ortserve.model_file.graph import Tensor
from ortserve.model_file.reading import parse_model, read_model
from ortserve.rows import Outcome, TooMuchWorkError, Value, constant_value, prove_axes, prove_model, walk
from ortserve.rows.number import MAX_TERMS, Number, Product
from ortserve.rows.symbols import Symbols
from ortserve.rows.work_budget import WorkBudget


def test_sums_of_products_stay_small() -> None:
    symbols = Symbols()
    numbers: list[Number] = [symbols.fresh(1) for _ in range(20)]
    for shift in range(1, 40):
        turned = numbers[shift % 20 :] + numbers[: shift % 20]
        combine = symbols.add if shift % 2 else symbols.multiply
        numbers = [combine(one, other) for one, other in zip(numbers, turned, strict=True)]
    for number in numbers:
        assert isinstance(number, Product)
        assert all(len(atom.terms) <= MAX_TERMS for atom, _ in number.atoms)


def test_squares_of_squares_stay_small() -> None:
    symbols = Symbols()
    number = symbols.add(symbols.fresh(1), 3)
    for _ in range(300):
        number = symbols.add(symbols.multiply(number, number), number)
    assert isinstance(number, Product)
    assert sum(power for _, power in number.atoms) < 20
    assert -(1 << 64) < number.factor < 1 << 64


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"\x3a\xff\xff\xff\xff\x0f", bytes(range(256)) * 20])
def test_a_file_that_is_no_model_is_unknown(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(content)
    assert prove_model(read_model(file)).outcome is Outcome.UNKNOWN


def test_a_missing_file_and_a_folder_are_unknown(tmp_path: Path) -> None:
    assert prove_model(read_model(tmp_path / "absent.onnx")).outcome is Outcome.UNKNOWN
    assert prove_model(read_model(tmp_path)).outcome is Outcome.UNKNOWN


def test_a_model_with_too_many_nodes_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(chain(20).SerializeToString())
    assert prove_model(read_model(file)).outcome is Outcome.PROVEN
    monkeypatch.setattr(reading, "MAX_NODES", 10)
    verdict = prove_model(read_model(file))
    assert verdict.outcome is Outcome.UNKNOWN
    assert "more than 10 nodes" in verdict.reason


def test_rounds_of_loops_in_loops_are_counted() -> None:
    model = parse_model(memoryview(loops(6).SerializeToString()))
    assert prove_axes(model, {"x": 0}).outcome is Outcome.PROVEN
    with pytest.raises(TooMuchWorkError, match="it needs more than 100 visits of nodes"):
        prove_axes(model, {"x": 0}, budget=WorkBudget(100))


def test_a_name_with_a_number_that_is_too_long_is_no_sum(tmp_path: Path) -> None:
    model = chain(1)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[1].dim_param = f"past + {'9' * 5000}"
    file = tmp_path / "model.onnx"
    file.write_bytes(model.SerializeToString())
    assert prove_model(read_model(file)).outcome is Outcome.PROVEN


def test_operands_and_long_lists_are_counted() -> None:
    wide = model_of(f"t = Concat<axis=1>({', '.join(['x'] * 3000)}) y = Relu(t)")
    long = model_of(f"t = Pad<pads={[0] * 60_000}>(x) y = Relu(x)")
    for model in (wide, long):
        with pytest.raises(TooMuchWorkError, match="it needs more than 200 visits of nodes"):
            prove_axes(parse_model(memoryview(model.SerializeToString())), {"x": 0}, budget=WorkBudget(200))


def test_a_size_that_is_computed_from_shared_sizes_takes_linear_time() -> None:
    steps = "".join(f" e{i} = Add(d{i}, one) f{i} = Div(e{i}, d{i}) d{i + 1} = Max(f{i}, e{i})" for i in range(60))
    model = model_of(
        f"d0 = Shape<start=1>(x) one = Constant<value_ints=[1]>() {steps} k = ConstantOfShape(d60) s = Shape(k)"
        " g = Cast<to=1>(s) y = Add(x, g)"
    )
    assert prove_model(parse_model(memoryview(model.SerializeToString()))).outcome is Outcome.PROVEN


def test_constants_that_no_node_reads_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop may otherwise look at them in each round, and a branch of each If may copy them."""
    seen: list[Tensor] = []

    def look(tensor: Tensor) -> Value:
        seen.append(tensor)
        return constant_value(tensor)

    monkeypatch.setattr(walk, "constant_value", look)
    model = loops(4)
    inner = model.graph.node[0].attribute[0].g
    for graph in (model.graph, inner):
        for index in range(50):
            graph.initializer.append(onnx.helper.make_tensor(f"{graph.name}_{index}", 1, [], [1.0]))
    assert prove_axes(parse_model(memoryview(model.SerializeToString())), {"x": 0}).outcome is Outcome.PROVEN
    assert len(seen) == 1, "the number of rounds is the only constant that a node reads"


def test_a_split_into_more_parts_than_outputs_is_unknown() -> None:
    model = model_of("a, y = Split<axis=1, num_outputs=1000000000>(x)")
    assert prove_model(parse_model(memoryview(model.SerializeToString()))).outcome is Outcome.UNKNOWN


def test_a_name_of_very_many_terms_is_no_sum() -> None:
    model = chain(1)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[1].dim_param = "+".join("a" * 100_000)
    assert prove_model(parse_model(memoryview(model.SerializeToString()))).outcome is Outcome.PROVEN


def chain(length: int) -> onnx.ModelProto:
    nodes = " ".join(f"t{i + 1} = Relu (t{i})" for i in range(length)).replace("t0", "x", 1)
    return model_of(f"{nodes} y = Identity (t{length})")


def loops(depth: int) -> onnx.ModelProto:
    """Nested loops, each of which lengthens its state in every iteration."""
    graph = onnx.helper.make_graph
    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node
    inner, source = [node("Relu", [f"s{depth}"], ["o"])], "o"
    for level in range(depth, 0, -1):
        body = graph(
            [
                *inner,
                node("Identity", [f"c{level}"], [f"d{level}"]),
                node("Concat", [source, f"s{level}"], [f"t{level}"], axis=1),
            ],
            f"body{level}",
            [value(f"i{level}", 7, []), value(f"c{level}", 9, []), value(f"s{level}", 1, None)],
            [value(f"d{level}", 9, []), value(f"t{level}", 1, None)],
        )
        state = f"s{level - 1}" if level > 1 else "x"
        inner, source = [node("Loop", ["trip", "", state], [f"l{level}"], body=body)], f"l{level}"
    trip = onnx.helper.make_tensor("trip", 7, [], [3])
    main = graph(
        [*inner, node("Identity", [source], ["y"])],
        "main",
        [value("x", 1, ["N", "L"])],
        [value("y", 1, None)],
        [trip],
    )
    return onnx.helper.make_model(main, opset_imports=[onnx.helper.make_opsetid("", 17)])


def model_of(nodes: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> main (float[N,L] x) => (float[N,L] y) {{ {nodes} }}'
    )
