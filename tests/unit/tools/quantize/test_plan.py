from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from models import patterns
from ortserve.errors import ServeError
from ortserve.model_file.graph import FLOAT, Model
from ortserve.model_file.reading import read_model
from ortserve.tools.quantize.arguments import build_parser
from ortserve.tools.quantize.plan import (
    check_source,
    choose_settings,
    consequences,
    find_candidates,
    left_out,
    needed_opset,
)

CORPUS = Path(__file__).parents[3] / "rows" / "corpus"
VNNI = {"avx2": True, "avx512_vnni": True}
AVX2 = {"avx2": True, "avx512_vnni": False, "avx_vnni": False}
ARM = {"asimd": True, "i8mm": True}


def asked(words: str) -> Namespace:
    """The arguments that begin with a mode."""
    return build_parser().read(["m.onnx", "--mode", *words.split()])


@pytest.fixture
def network(tmp_path: Path) -> Model:
    """A multiplication by a constant, one of two values, and a lookup."""
    make = helper.make_node
    nodes = [
        make("MatMul", ["x", "w"], ["a"], name="first"),
        make("MatMul", ["a", "a"], ["b"], name="inner"),
        make("Gather", ["table", "i"], ["c"], name="lookup"),
        make("Relu", ["b"], ["y"], name="relu"),
    ]
    ends = [patterns.value("x", 2, 2), patterns.value("i", 1, element=7)]
    outputs = [patterns.value("y", 2, 2), patterns.value("c", 1, 2)]
    weights = {name: np.ones((2, 2), np.float32) for name in ("w", "table")}
    return read_model(patterns.write(tmp_path / "network.onnx", nodes, ends, outputs, weights))


@pytest.mark.parametrize(
    ("sets", "mode", "activations", "reduced"),
    [
        (VNNI, "static", "uint8", False),
        (AVX2, "static", "uint8", True),
        (ARM, "static", "int8", False),
        (ARM, "dynamic", "uint8", False),
        ({}, "static", "uint8", False),
    ],
)
def test_types_are_those_with_fast_kernels(
    sets: dict[str, bool], mode: str, activations: str, reduced: bool, network: Model
) -> None:
    settings = choose_settings(asked(mode), network, sets)
    assert (settings.activations, settings.weights, settings.per_channel) == (activations, "int8", True)
    assert settings.reduce_range is reduced


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("dynamic --bits 4", "--bits: expected --mode weights, got dynamic"),
        ("weights --calibrator entropy", "--calibrator: expected --mode static"),
        ("dynamic --activations int8", "--activations: expected --mode static"),
        ("weights --reduce-range on", "--reduce-range: expected --mode dynamic or static"),
        ("weights --per-tensor", "--per-channel and --per-tensor"),
        ("weights --block 24", "--block: expected a power of two from 16, got 24"),
        ("weights --ops Conv", "--ops: expected MatMul or Gather with --mode weights, got Conv"),
    ],
)
def test_options_of_other_modes_are_refused(words: str, problem: str, network: Model) -> None:
    with pytest.raises(ServeError, match=problem):
        choose_settings(asked(words), network, VNNI)


def test_additions_of_transformers_stay_in_floating_point() -> None:
    assert "Add" in choose_settings(asked("static"), read_model(CORPUS / "torch_cnn.onnx"), VNNI).operators
    assert "Add" not in choose_settings(asked("static"), read_model(CORPUS / "dynamo_encoder.onnx"), VNNI).operators


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("quantized_cnn_qdq", "quantized already: DequantizeLinear, QuantizeLinear"),
        ("quantized_cnn_qoperator", "quantized already: .*QLinearConv"),
        ("quantized_encoder_dynamic", "quantized already: .*DynamicQuantizeLinear"),
        ("four_bit_encoder", "quantized already: MatMulNBits"),
        ("half_cnn", "expected weights in float32, got float16"),
    ],
)
def test_sources_that_would_only_lose_are_refused(name: str, problem: str) -> None:
    model = read_model(CORPUS / f"{name}.onnx")
    with pytest.raises(ServeError, match=problem):
        check_source(model, "m.onnx")


def test_the_opset_holds_the_types(network: Model) -> None:
    wanted = {
        "dynamic": 13,
        "dynamic --per-tensor": 11,
        "static --activations uint16": 21,
        "weights": 21,
        "weights --ops MatMul": 13,
    }
    assert {words: needed_opset(choose_settings(asked(words), network, VNNI)) for words in wanted} == wanted


@pytest.mark.parametrize(
    ("mode", "nodes", "passing"),
    [
        ("dynamic", {"first": "MatMul", "lookup": "Gather"}, ()),
        ("weights", {"first": "MatMul", "lookup": "Gather"}, ()),
        ("static", {"first": "MatMul", "inner": "MatMul"}, ("relu",)),
    ],
)
def test_each_mode_has_its_candidates(
    mode: str, nodes: dict[str, str], passing: tuple[str, ...], network: Model
) -> None:
    settings = choose_settings(asked(mode), network, VNNI)
    found = find_candidates(network, settings, {"a": FLOAT, "b": FLOAT, "y": FLOAT}, (), "m.onnx")
    assert (found.nodes, found.passing) == (nodes, passing)


def test_excluded_nodes_are_no_candidates(network: Model) -> None:
    settings = choose_settings(asked("dynamic"), network, VNNI)
    found = find_candidates(network, settings, {}, ["lookup"], "m.onnx")
    assert (list(found.nodes), found.excluded) == (["first"], ("lookup",))
    with pytest.raises(ServeError, match="--exclude: expected nodes of the model, got 'lokup'; it has lookup"):
        find_candidates(network, settings, {}, ["lokup"], "m.onnx")
    with pytest.raises(ServeError, match=r"nothing to quantize: expected MatMul, .* has Gather, MatMul, Relu"):
        find_candidates(network, settings, {}, ["lookup", "first"], "m.onnx")


def test_notes_name_what_stays_in_floating_point() -> None:
    fused = read_model(CORPUS / "optimized_bert.onnx")
    (note,) = left_out(fused, choose_settings(asked("static"), fused, VNNI))
    assert "fused nodes stay in floating point" in note
    nested = read_model(CORPUS / "torch_greedy_decoder.onnx")
    notes = left_out(nested, choose_settings(asked("dynamic"), nested, VNNI))
    assert any("nodes inside of If, Loop and Scan" in note for note in notes)


def test_notes_say_what_the_user_gets(network: Model) -> None:
    settings = choose_settings(asked("dynamic"), network, AVX2)
    assert consequences(settings, 1.1, None, "rows meet") == [
        "weights have 7 bits, for processors without VNNI",
        "the model is not smaller than its source, which has too few weights for a gain",
        "the server batches requests for the source, but not for this model: rows meet",
    ]
