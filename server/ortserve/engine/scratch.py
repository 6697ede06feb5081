"""Temporary folders for files that ONNX Runtime writes: traces and optimized graphs."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_PROBE_NBYTES: Final = 1 << 16


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder in the system's folder for temporary files. It is removed at the end.

    ONNX Runtime does not report a full disk: a trace then ends somewhere. So the end of the block, also after an error,
    tries to write a little more.

    Raises:
        OSError: There is no folder for temporary files, or its disk is full. The text names ``TMPDIR``.
    """
    with _naming_tmpdir():
        folder = tempfile.TemporaryDirectory(prefix="ortserve-")
    with folder as name:
        try:
            yield Path(name)
        finally:
            with _naming_tmpdir():
                (Path(name) / "probe").write_bytes(bytes(_PROBE_NBYTES))


@contextmanager
def _naming_tmpdir() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # ``tempdir`` is None if none of the usual folders can be written.
        text = f"{error.strerror}; set TMPDIR to a folder with more space"
        raise OSError(error.errno, text, tempfile.tempdir) from None
