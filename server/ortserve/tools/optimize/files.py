"""Reads and writes the model files of steps. Only one large weight is in memory at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import onnx
from google.protobuf.message import DecodeError

from ortserve.errors import invalid_input
from ortserve.model_file.reading import model_nbytes, read_model
from ortserve.tools.opening import read_graph

if TYPE_CHECKING:
    import onnx_ir

MAX_INLINE_BYTES: Final = (1 << 31) - (1 << 24)
"""Maximum size of weights in the model file. Protocol Buffers hold less than 2 GiB; the graph needs some of it."""
_MAPS: Final = "types of outputs that are maps"
MIN_EXTERNAL_BYTES: Final = 1024
"""Smaller weights stay in the model file: ONNX Runtime reads shapes and axes before it reads external data."""


def data_file(model: Path) -> Path:
    """The file with the external data of a model that a step made."""
    return model.with_name(f"{model.name}.data")


def nbytes_of(model: Path) -> int:
    """The size of a model with its external data."""
    return model_nbytes(model, read_model(model))


def needs_data_file(model: Path) -> bool:
    """Whether a step that reads this model writes large weights to ``data_file``."""
    return data_file(model).exists() or nbytes_of(model) > MAX_INLINE_BYTES


def load(source: Path) -> "onnx_ir.Model":
    """Read a model for ``save``. Its external data stay on the disk."""
    import onnx_ir

    model = from_proto(onnx.load(source, load_external_data=False))
    onnx_ir.external_data.set_base_dir(model.graph, source.parent)
    return model


def from_proto(proto: onnx.ModelProto) -> "onnx_ir.Model":
    """Convert a model to ``onnx_ir``, which does not support maps. ``save`` restores the types of such outputs."""
    import onnx_ir

    maps = {value.name: value for value in proto.graph.output if "map_type" in str(value.type)}
    types = {name: value.type.SerializeToString() for name, value in maps.items()}
    for value in maps.values():
        value.ClearField("type")
    kept = [value for value in proto.graph.value_info if "map_type" not in str(value.type)]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(kept)
    model: onnx_ir.Model = onnx_ir.from_proto(proto)
    model.meta[_MAPS] = types
    return model


def _restore_maps(file: Path, types: Mapping[str, bytes]) -> None:
    if types:
        proto = onnx.load(file, load_external_data=False)
        for value in proto.graph.output:
            if value.name in types:
                value.type.ParseFromString(types[value.name])
        file.write_bytes(proto.SerializeToString())


def save(model: "onnx_ir.Model", target: Path, source: Path | None = None) -> None:
    """Write a model. Large weights go into ``data_file`` if the model or its source needs one.

    Args:
        model: From ``load`` or ``from_proto``. Its external data are copied one tensor at a time.
        target: The new file.
        source: The model that it was made from; None to write ``data_file`` in any case.
    """
    import onnx_ir  # its caller has imported it

    nbytes = sum(one.const_value.nbytes for one in model.graph.initializers.values() if one.const_value is not None)
    if source is None or nbytes > MAX_INLINE_BYTES or needs_data_file(source):
        name = data_file(target).name
        onnx_ir.save(model, target, external_data=name, size_threshold_bytes=MIN_EXTERNAL_BYTES)
        drop_empty_data(target)
    else:
        onnx_ir.save(model, target)
    _restore_maps(target, model.meta.get(_MAPS, {}))


def pack(source: Path, target: Path) -> None:
    """Copy a model. The copy has its nodes in topological order and its large weights in ``data_file``."""
    model = load(source)
    model.graph.sort()
    save(model, target)


def drop_empty_data(model: Path) -> None:
    """Remove the data file if all weights are small."""
    if data_file(model).exists() and not data_file(model).stat().st_size:
        data_file(model).unlink()


def prepare(source: Path, target: Path) -> None:
    """Give a model the form that steps expect: nodes in topological order, external data in ``data_file``.

    If it has this form already, ``target`` becomes a symbolic link to it.

    Raises:
        ServeError: invalid_input: the file is not a model, or its external data are missing.
    """
    graph = read_graph(source)
    try:
        if graph.external_files or source.stat().st_size > MAX_INLINE_BYTES:
            return pack(source, target)
        model = load(source)
        order = list(model.graph.all_nodes())
        model.graph.sort()
        if order != list(model.graph.all_nodes()):
            return save(model, target, source)
        target.symlink_to(source.absolute())
    except FileNotFoundError as error:
        raise invalid_input(f"{source}: its external data '{Path(error.filename).name}' are missing") from None
    except (DecodeError, ValueError) as error:
        raise invalid_input(f"{source}: expected an ONNX model: {str(error).splitlines()[0]}") from None
