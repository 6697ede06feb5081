"""Samples of files and folders: joined by shape, used once each and in proportion, and errors that name the file."""

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest

from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import is_absent
from ortserve.errors import ErrorKind, ServeError
from ortserve.tools import inputs as module
from ortserve.tools.inputs import FileInputs, make_inputs, read_inputs

TOKENS = ModelSignature(
    (
        TensorSpec("ids", DataType.INT64, (-1, -1)),
        TensorSpec("mask", DataType.BOOL, (-1, -1), is_optional=True),
        TensorSpec("scale", DataType.FP32, (2,), batch_axis=None, is_optional=True),
    ),
    (),
)


def save(folder: Path, name: str, **arrays: Any) -> None:
    np.savez(folder / name, **arrays)


def ids(rows: int, width: int, begin: int = 0) -> np.ndarray:
    return np.arange(begin, begin + rows)[:, np.newaxis].repeat(width, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Samples 0 to 6 with 3 tokens, 7 and 8 with 5, and 9 with 3 and a mask."""
    save(tmp_path, "1.npz", ids=ids(2, 3))
    save(tmp_path, "2.npz", ids=ids(2, 5, 7))
    save(tmp_path, "3.npz", ids=ids(5, 3, 2))
    save(tmp_path, "4.npz", ids=ids(1, 3, 9), mask=np.ones((1, 3), bool))
    (tmp_path / ".5.npz.unfinished").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("x")
    return tmp_path


def first_tokens(inputs: FileInputs, rows: int, number: int) -> list[int]:
    return [int(row[0]) for row in inputs.take(rows, number)[0]]


def test_samples_of_equal_shapes_are_joined(folder: Path) -> None:
    inputs = read_inputs(folder, TOKENS)
    assert inputs.samples == 10
    assert inputs.origin == f"{folder.name} (4 files): 10 samples of 3 shapes"
    assert [len(group.positions) for group in inputs.groups] == [7, 2, 1]
    batches = list(inputs.each(4))
    assert [(positions.tolist(), arrays[0][:, 0].tolist()) for positions, arrays in batches] == [
        ([0, 1, 4, 5], [0, 1, 2, 3]),
        ([6, 7, 8], [4, 5, 6]),
        ([2, 3], [7, 8]),
        ([9], [9]),
    ]
    assert [is_absent(arrays[1]) for _, arrays in batches] == [True, True, True, False]
    assert [arrays[1].shape for _, arrays in batches] == [(4,), (3,), (2,), (1, 3)]


def test_batches_have_one_shape_and_visit_all_samples_in_proportion(folder: Path) -> None:
    inputs = read_inputs(folder, TOKENS)
    one_by_one = [first_tokens(inputs, 1, number) for number in range(20)]
    assert sorted(chain(*one_by_one[:10])) == list(range(10))
    assert one_by_one[10:] == one_by_one[:10]
    by_two = [first_tokens(inputs, 2, number) for number in range(6 * 7)]  # 4 + 1 + 1 batches, repeated 7 times
    assert Counter(chain(*by_two)) == {**dict.fromkeys(range(7), 8), 7: 7, 8: 7, 9: 14}
    assert {len(tokens) for tokens in by_two} == {2}
    assert {len({token in (7, 8) for token in tokens}) for tokens in by_two} == {1}
    assert {7, 9} <= set(chain(*by_two[:6]))


def test_model_that_is_not_batched_gets_whole_samples(tmp_path: Path) -> None:
    signature = ModelSignature(TOKENS.inputs, (), unbatched_because="rows may depend on each other")
    save(tmp_path, "1.npz", ids=ids(4, 3).reshape(2, 2, 3))
    save(tmp_path, "2.npz", ids=ids(3, 2).reshape(1, 3, 2), scale=np.ones((1, 2), np.float32))
    inputs = read_inputs(tmp_path, signature)
    assert inputs.samples == 3
    taken = [inputs.take(5, number) for number in range(3)]
    assert sorted(arrays[0].shape for arrays in taken) == [(2, 3), (2, 3), (3, 2)]
    assert [is_absent(arrays[2]) for _, arrays in inputs.each()] == [True, True, False]


def test_request_that_ran_whole_is_divided_into_its_rows(tmp_path: Path) -> None:
    signature = ModelSignature(
        (TensorSpec("x", DataType.FP32, (3, -1), batch_axis=1), TensorSpec("k", DataType.INT64, (2,), batch_axis=None)),
        (),
    )
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    save(tmp_path, "1.npz", x=x[np.newaxis], k=np.array([[5, 6]]))
    found, k = read_inputs(tmp_path / "1.npz", signature).take(4, 0)
    assert np.array_equal(found, x.T)
    assert k.tolist() == [[5, 6]] * 4


@pytest.mark.parametrize(
    ("name", "arrays", "message"),
    [
        ("9.npz", {"ids": ids(1, 3).astype(np.float32)}, r"--calibration .*9\.npz: array 'ids': expected int64"),
        ("9.npz", {"mask": np.ones((1, 3), bool)}, r"9\.npz: expected an array 'ids', got mask"),
        ("9.npz", {"ids": ids(2, 3), "mask": np.ones((1, 3), bool)}, r"9\.npz: expected arrays with one first length"),
        (
            "9.npz",
            None,
            r"expected a \.npz file, which numpy\.savez\('9\.npz', NAME=ARRAY\) writes, got another format",
        ),
    ],
)
def test_file_of_a_folder_that_does_not_fit_is_named(
    folder: Path, name: str, arrays: dict[str, np.ndarray] | None, message: str
) -> None:
    if arrays is None:
        (folder / name).write_bytes(b"")
    else:
        save(folder, name, **arrays)
    with pytest.raises(ServeError, match=message):
        read_inputs(folder, TOKENS, option="--calibration")


def test_file_that_cannot_be_read_says_what_to_do(tmp_path: Path) -> None:
    save(tmp_path, "texts.npz", ids=np.array([["a"], ["b"]], object))
    for name, problem in (
        ("texts", r"got: Object arrays .*; save texts as numpy\.array\(TEXTS, dtype=str\)$"),
        ("none", "got: No such file or directory$"),
    ):
        with pytest.raises(ServeError, match=rf"{name}\.npz: expected a \.npz file, which .*{problem}"):
            read_inputs(tmp_path / f"{name}.npz", TOKENS)


def test_archive_that_numpy_did_not_write_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    for header in (b"{'descr': '<f4'", b" 1\n 2\n1", b"{1: 2, 'shape': 3}"):
        with ZipFile(file, "w") as archive:
            archive.writestr("ids.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
        with pytest.raises(ServeError, match=r"a\.npz: expected a \.npz file, which .*, got: ") as raised:
            read_inputs(file, TOKENS)
        assert raised.value.kind is ErrorKind.INVALID_INPUT
    huge = b"{'descr': '<i8', 'fortran_order': False, 'shape': (4, 1000000000000)}\n"
    with ZipFile(file, "w") as archive:
        archive.writestr("ids.npy", b"\x93NUMPY\x01\x00" + len(huge).to_bytes(2, "little") + huge)
    with pytest.raises(ServeError, match="got: an array of 32000000000000 bytes with 0 bytes of data"):
        read_inputs(file, TOKENS)
    save(tmp_path, "a.npz", ids=ids(2, 3))
    content = file.read_bytes()
    central = content.index(b"PK\x01\x02")
    for offset, value, problem in ((8, 1, "is encrypted"), (10, 97, "compression method is not supported")):
        file.write_bytes(content[: central + offset] + bytes([value]) + content[central + offset + 1 :])
        with pytest.raises(ServeError, match=rf"a\.npz: expected a \.npz file, which .*{problem}"):
            read_inputs(file, TOKENS)


def test_description_of_synthetic_inputs_names_what_the_model_gets() -> None:
    text = ModelSignature((TensorSpec("text", DataType.BYTES, (-1, 1)),), ())
    assert make_inputs(text, None, None).origin == "synthetic (floats from N(0, 1), integers 0 or 1, short texts)"
    assert make_inputs(TOKENS, None, None).origin.startswith("synthetic (floats from N(0, 1), integers 0 or 1, free ")


def test_folder_without_samples_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    with pytest.raises(ServeError, match=r"expected a folder with \.npz files, got none; it has the folders 1"):
        read_inputs(tmp_path, TOKENS)


def test_folder_that_would_fill_the_memory_is_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FOLDER_BYTES", 1000)
    with pytest.raises(ServeError, match=r"expected files of at most 1000 bytes in total, got more up to 3\.npz"):
        read_inputs(folder, TOKENS)
