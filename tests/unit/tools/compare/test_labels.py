"""Labels of samples: a file of another form is rejected, and the error names it."""

from pathlib import Path

import numpy as np
import pytest

from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.errors import ErrorKind, ServeError
from ortserve.tools.compare.measure import read_labels
from ortserve.tools.inputs import read_inputs

MAGIC = b"\x93NUMPY\x01\x00"
SIGNATURE = ModelSignature((TensorSpec("x", DataType.FP32, (-1, 2)),), ())


def test_labels_are_integers_or_texts_of_a_file_of_numpy(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 2), np.float32))
    inputs = read_inputs(tmp_path / "x.npz", SIGNATURE)
    file = tmp_path / "labels.npy"

    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (4, 1000000000000)}\n"
    np.save(file, np.array([b"\xc3\xa4", b"b"]))
    assert read_labels(file, inputs).tolist() == ["ä", "b"]

    for content, problem in (
        (b"", "expected a file written by numpy.save, got: No data left in file"),
        (
            MAGIC + len(header).to_bytes(2, "little") + header,
            "got: an array of 32000000000000 bytes with 0 bytes of data",
        ),
        (b"PK\x03\x04half", "expected a file written by numpy.save, got: File is not a zip file"),
        ((tmp_path / "x.npz").read_bytes(), "expected 2 integers or texts, one per sample, got several arrays"),
    ):
        file.write_bytes(content)
        with pytest.raises(ServeError, match=problem) as raised:
            read_labels(file, inputs)
        assert raised.value.kind is ErrorKind.INVALID_INPUT
