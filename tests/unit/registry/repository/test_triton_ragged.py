"""``allow_ragged_batch``, ``batch_input`` and ``batch_output`` become the options of ``model.yaml``."""

from pathlib import Path

import pytest

from ortserve.config.options import ServerOptions
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.repository.configuration import Configuration, read_configuration

X = 'input { name: "X" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true } '
Y = 'output { name: "Y" data_type: TYPE_FP32 dims: -1 } '
COUNT = 'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "N" data_type: TYPE_INT32 source_input: "X" } '
SCATTER = 'batch_output { target_name: "Y" source_input: "X" } '


def read(folder: Path, text: str, file: str = "config.pbtxt") -> Configuration:
    (folder / file).write_text(text)
    return read_configuration("m", folder / file, ServerOptions())


def test_both_files_set_the_same_options(tmp_path: Path) -> None:
    pbtxt = read(tmp_path, "max_batch_size: 4 " + X + Y + COUNT + SCATTER).options
    yaml = read(
        tmp_path,
        "{batched: true, max_rows: 4, batch_inputs: {N: {kind: element_count, source: X, datatype: INT32}}, "
        "batch_outputs: {Y: X}, inputs: {X: {ragged: true, datatype: FP32, dims: [-1]}}}",
        "model.yaml",
    ).options
    keys = ("batch_inputs", "batch_outputs", "inputs", "max_rows", "batched")
    assert [getattr(pbtxt, key) for key in keys] == [getattr(yaml, key) for key in keys]
    assert pbtxt.is_ragged


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (X + Y, "allow_ragged_batch of input 'X': expected a max_batch_size of at least 1"),
        (
            f"max_batch_size: 4 {X.replace('dims: -1', 'dims: -1 optional: true')}",
            "expected ragged or optional, not both",
        ),
        (f"max_batch_size: 4 {X.replace('dims: -1', 'dims: 4 reshape { shape: [ 2, 2 ] }')}", "and no reshape with"),
        (f"max_batch_size: 4 {X} {COUNT.replace('TYPE_INT32', 'TYPE_INT64')}", "must be TYPE_INT32 or TYPE_FP32"),
        (f"max_batch_size: 4 {X} {COUNT} {COUNT}", "target input name 'N' can only be specified once"),
        ("max_batch_size: 4 " + X + COUNT.replace('"X"', '[ "X", "X" ]'), "expects 1 source input, got 2"),
        ("max_batch_size: 4 " + X + COUNT.replace('"X"', '"NOPE"'), "unknown source input name 'NOPE'"),
        ("max_batch_size: 4 batch_input { kind: BATCH_ITEM_SHAPE data_type: TYPE_INT32 }", "one 'target_name'"),
        ("max_batch_size: 4 " + X + Y + SCATTER.replace('"Y"', '"NOPE"'), "unknown target output name 'NOPE'"),
        (f"max_batch_size: 4 {X} {Y} {SCATTER} {SCATTER}", "target output name 'Y' can only be specified once"),
        ("max_batch_size: 4 " + X + Y + SCATTER.replace('"X"', '"NOPE"'), "unknown source input name 'NOPE'"),
        (f"max_batch_size: 4 {X} sequence_batching {{ }}", "sequences: expected none with inputs.X.ragged"),
        (
            (
                'platform: "ensemble" max_batch_size: 4 ensemble_scheduling { step { model_name: "a" '
                f'input_map {{ key: "i" value: "X" }} output_map {{ key: "o" value: "Y" }} }} }} {X} {Y}'
            ),
            "can not be specified for ensemble 'm': its members form the batches",
        ),
    ],
)
def test_faults_are_named(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ServeError) as caught:
        read(tmp_path, text)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert error in caught.value.message


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ("max_rows: 4", "inputs.X.ragged: expected batched: true and max_rows to be set, too"),
        ("batched: true", "inputs.X.ragged: expected batched: true and max_rows to be set, too"),
        ("batched: true\nmax_rows: 4\nbuckets: [4]", "padding rows would count as requests"),
        ("batched: true\nmax_rows: 4\noutputs: {Y: {batch_axis: 1}}", "Y: expected no batch_axis"),
        (
            "batched: true\nmax_rows: 4\nbatch_inputs: {X: {kind: item_shape, source: X}}",
            "expected 'X' in batch_inputs or in inputs",
        ),
        ("batched: true\nmax_rows: 4\nbatch_inputs: {N: {kind: counts, source: X}}", "batch_inputs.N.kind"),
    ],
)
def test_faults_of_model_yaml_are_named(tmp_path: Path, more: str, error: str) -> None:
    with pytest.raises(ServeError) as caught:
        read(tmp_path, f"inputs: {{X: {{ragged: true}}}}\n{more}", "model.yaml")
    assert error in caught.value.message
