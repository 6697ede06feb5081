"""Model files of steps: read, written and changed so that large weights stay out of memory where nothing needs them."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import onnx
from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from ortserve.errors import invalid_input
from ortserve.model_file.reading import model_nbytes, read_model

if TYPE_CHECKING:
    import onnx_ir

_Result = TypeVar("_Result")

MOST_INLINE_BYTES: Final = (1 << 31) - (1 << 24)
"""Protocol Buffers hold less than 2 GiB; the graph needs some of that."""
LEAST_EXTERNAL_BYTES: Final = 1024
"""Smaller weights stay in the model file: ONNX Runtime reads shapes and axes before it reads external data."""
_ALIGNMENT: Final = 4096
"""Of large weights in the data file, so that they can be mapped."""
_CHUNK: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class Made:
    """What a step says about the model that it has made.

    Attributes:
        notes: For people.
        libraries: Packages that made it.
    """

    notes: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()


def data_file(model: Path) -> Path:
    """The file with the external data of a model that a step made."""
    return model.with_name(f"{model.name}.data")


def nbytes_of(model: Path) -> int:
    """The size of a model with its external data."""
    return model_nbytes(model, read_model(model))


def edit(source: Path, target: Path, change: Callable[[ModelProto], _Result]) -> _Result:
    """Change a model without its external data, which the new file shares with the old one."""
    model = onnx.load(source, load_external_data=False)
    result = change(model)
    onnx.save(model, target)
    if data_file(source).exists():
        os.link(data_file(source), data_file(target))
    return result


def is_sorted(graph: GraphProto) -> bool:
    """Whether each node comes after those whose results it reads."""
    later = {name for node in graph.node for name in node.output if name}
    for node in graph.node:
        if later.intersection(names_read(node)):
            return False
        later.difference_update(node.output)
    return True


def names_read(node: NodeProto) -> Iterator[str]:
    """The values that a node reads, also in its graphs; with them come names of values within those."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
            yield from (output.name for output in graph.output)
            for inner in graph.node:
                yield from names_read(inner)


def save(model: ModelProto, target: Path, source: Path) -> None:
    """Save a model that holds its weights, with external data if ``source``, which it came from, has them."""
    if data_file(source).exists() or model.ByteSize() > MOST_INLINE_BYTES:
        name, least = data_file(target).name, LEAST_EXTERNAL_BYTES
        onnx.save(model, target, save_as_external_data=True, location=name, size_threshold=least)
    else:
        onnx.save(model, target)


def save_ir(model: "onnx_ir.Model", target: Path, source: Path) -> None:
    """As ``save``, for a model whose weights ``onnx_ir`` reads when it writes them."""
    import onnx_ir  # its caller has imported it

    if data_file(source).exists() or nbytes_of(source) > MOST_INLINE_BYTES:
        name = data_file(target).name
        onnx_ir.save(model, target, external_data=name, size_threshold_bytes=LEAST_EXTERNAL_BYTES)
    else:
        onnx_ir.save(model, target)


def pack(source: Path, target: Path) -> None:
    """Write a model with its large weights, wherever they were, in ``data_file``, one tensor at a time."""
    model = onnx.load(source, load_external_data=False)
    with data_file(target).open("wb") as data:
        for tensor in tensors(model.graph):
            parts = contents(tensor, source.parent)
            if nbytes_of_tensor(tensor) < LEAST_EXTERNAL_BYTES:
                _store_inside(tensor, b"".join(parts))
                continue
            if (position := data.tell()) % _ALIGNMENT:
                data.seek(_ALIGNMENT - position % _ALIGNMENT, os.SEEK_CUR)
            begin = data.tell()
            for part in parts:
                data.write(part)
            _set_location(tensor, data_file(target).name, begin, data.tell() - begin)
    onnx.save(model, target)
    drop_empty_data(target)


def drop_empty_data(model: Path) -> None:
    """Remove the data file if all weights are small."""
    if data_file(model).exists() and not data_file(model).stat().st_size:
        data_file(model).unlink()


def prepare(source: Path, target: Path) -> None:
    """Give a model the form that steps expect: nodes in order, external data in ``data_file``. A link if it has it.

    Raises:
        ServeError: invalid_input: the file is no model, or its external data are missing.
    """
    try:
        model = onnx.load(source, load_external_data=False)
        has_data = any(tensor.data_location == TensorProto.EXTERNAL for tensor in tensors(model.graph))
        if not is_sorted(model.graph):
            sort_nodes(source, target)
        elif has_data or source.stat().st_size > MOST_INLINE_BYTES:
            pack(source, target)
        else:
            target.symlink_to(source.absolute())
    except FileNotFoundError as error:
        raise invalid_input(f"{source}: its external data '{Path(error.filename).name}' are missing") from None
    except (DecodeError, ValueError) as error:
        raise invalid_input(f"{source}: expected an ONNX model: {str(error).splitlines()[0]}") from None


def sort_nodes(source: Path, target: Path) -> None:
    """Write a model with each node after those whose results it reads, as ONNX demands."""
    import onnx_ir

    model = onnx_ir.load(source)
    model.graph.sort()
    save_ir(model, target, source)


def tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """The weights of a graph and of those within it: initializers and tensors that are attributes."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            for inner in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                yield from tensors(inner)


def contents(tensor: TensorProto, folder: Path) -> Iterator[bytes]:
    """The bytes of a tensor, in parts; empty for those that are stored as lists of numbers or texts."""
    if tensor.data_location != TensorProto.EXTERNAL:
        yield tensor.raw_data
        return
    where = {entry.key: entry.value for entry in tensor.external_data}
    with (folder / where["location"]).open("rb") as file:
        file.seek(int(where.get("offset", 0)))
        left = int(where.get("length") or os.fstat(file.fileno()).st_size - file.tell())
        while left and (part := file.read(min(left, _CHUNK))):
            left -= len(part)
            yield part


def nbytes_of_tensor(tensor: TensorProto) -> int:
    """The size of a tensor; 0 for those that are stored as lists of numbers or texts."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return len(tensor.raw_data)
    return math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def _store_inside(tensor: TensorProto, content: bytes) -> None:
    if tensor.data_location == TensorProto.EXTERNAL:
        tensor.ClearField("data_location")
        del tensor.external_data[:]
        tensor.raw_data = content


def _set_location(tensor: TensorProto, name: str, offset: int, length: int) -> None:
    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", name), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
