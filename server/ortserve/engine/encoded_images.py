"""Models whose inputs are image files, for ``ImageDecoder`` of ONNX and ``DecodeImage`` of onnxruntime-extensions.

ONNX Runtime 1.31 has no kernel for ``ImageDecoder``. The kernel of ``DecodeImage``, in onnxruntime-extensions 0.15.2,
ends the process if a JPEG file is truncated. So sessions get an edited model whose inputs are decoded images, and a
process with Pillow (``image_process``) decodes the files before each run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from threading import Lock
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from ortserve.core.helper_process import HelperProcess, unpack
from ortserve.core.large_memory import LargeMemory
from ortserve.engine import image_process
from ortserve.engine.image_process import PIXEL_FORMATS, Arguments
from ortserve.errors import ErrorKind, ModelRejectionError, ServeError
from ortserve.model_file.editing import GRAPH_INPUT, GRAPH_NODE, Edits, write_node, write_tensor
from ortserve.model_file.graph import UINT8, Model, Node, all_nodes, names_read

_DECODERS: Final = {
    "ImageDecoder": frozenset({""}),
    "DecodeImage": frozenset({"ai.onnx.contrib", "com.microsoft.extensions"}),
}
"""Operators that decode images, with their domains. ``DecodeImage`` always has the pixel format BGR."""

_KEPT_BYTES: Final = 16 * 2**20
"""Memory for large images that a session does not return after a run: enough for 5 million pixels."""


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An input of a model that is one image file, and the node that decodes it.

    Attributes:
        name: The name of the input, UINT8 ``[bytes]``.
        decoded: The name of the node's output, UINT8 ``[height, width, channels]``.
        operator: The operator of the node.
        pixel_format: ``RGB``, ``BGR`` or ``Grayscale``.
    """

    name: str
    decoded: str
    operator: str
    pixel_format: str

    @property
    def channels(self) -> int:
        """The number of channels of a decoded image."""
        return PIXEL_FORMATS[self.pixel_format][2]


def find_images(model: Model) -> dict[str, ImageInput]:
    """The inputs that are image files, by name.

    Raises:
        ServeError: unsupported: a node decodes another tensor than an input of the model, or an input that another
            node reads, too; or a pixel format is unknown.
    """
    decoders = list(filter(_decodes, all_nodes(model)))
    if not decoders:
        return {}
    inputs = {declared.name for declared in model.graph.inputs} - model.graph.constants.keys()
    first = [node for node in model.graph.nodes if _decodes(node) and inputs.intersection(node.inputs)]
    images = {node.inputs[0]: _image_input(node) for node in first}
    read = [name for node in model.graph.nodes for name in names_read(node)]
    read += [declared.name for declared in model.graph.outputs]
    if len(images) == len(decoders) and all(read.count(name) == 1 for name in images):
        return images
    raise ServeError(
        ErrorKind.UNSUPPORTED,
        f"operators {' and '.join(_DECODERS)}: expected each to read an input of the model that no other node reads",
    )


def image_edits(images: Iterable[ImageInput]) -> Edits:
    """The edits after which a model takes decoded images as inputs, under the same names."""
    edits = {}
    for image in images:
        edits[GRAPH_NODE, image.decoded] = write_node("Identity", "", [image.name], image.decoded)
        edits[GRAPH_INPUT, image.name] = write_tensor(GRAPH_INPUT, image.name, UINT8, (None, None, image.channels))
    return edits


class ImageSession:
    """Decodes images before each run of a session, whose model was edited by ``image_edits``.

    It is used like an ``ort.InferenceSession`` of the unedited model, but its inputs cannot be bound. Thread-safe. The
    process that decodes ends with this object.
    """

    def __init__(self, session: ort.InferenceSession, images: Mapping[str, ImageInput], max_pixels: int) -> None:
        """Take the session of an edited model, its image inputs, and the maximum width times height of an image.

        Raises:
            ServeError: unsupported: Pillow is missing.
        """
        if find_spec("PIL") is None:
            operators = " and ".join(sorted({image.operator for image in images.values()}))
            needs = "needs the package Pillow, which is not installed: pip install 'ortserve[extensions]'"
            raise ServeError(ErrorKind.UNSUPPORTED, f"operator {operators} {needs}")
        self._session = session
        self._images = images
        self._max_pixels = max_pixels
        self._process = HelperProcess(image_process.__name__, "decodes images", LargeMemory(_KEPT_BYTES))
        self._lock = Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def __del__(self) -> None:
        process: HelperProcess | None = self.__dict__.get("_process")  # None if Pillow is missing
        if process is not None:
            process.close()

    def get_inputs(self) -> list[Any]:
        """The inputs of the unedited model."""
        return [_FileArg(arg.name) if arg.name in self._images else arg for arg in self._session.get_inputs()]

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], options: Any = None) -> Any:
        """Decode and run.

        Raises:
            ModelRejectionError: An input is not an image file in one of the known formats, or has too many pixels.
            ServeError: overloaded: the process that decodes ended, or has too little memory for the pixels.
        """
        decoded = {name: self._decode(image, feeds[name]) for name, image in self._images.items()}
        return self._session.run(output_names, {**feeds, **decoded}, options)

    def run_with_ort_values(self, output_names: Sequence[str], feeds: Mapping[str, Any], options: Any = None) -> Any:
        """Decode and run on OrtValues; see ``run``."""
        decoded = {
            name: ort.OrtValue.ortvalue_from_numpy(self._decode(image, feeds[name].numpy()))
            for name, image in self._images.items()
        }
        return self._session.run_with_ort_values(output_names, {**feeds, **decoded}, options)

    def _decode(self, image: ImageInput, file: np.ndarray) -> np.ndarray:
        """The pixels of a file, UINT8 ``[height, width, channels]``."""
        arguments: Arguments = (image.name, image.pixel_format, self._max_pixels)
        with self._lock:
            parts = self._process.call(arguments, np.ascontiguousarray(file).data)
        try:
            shape = unpack(parts[0])
        except ServeError as error:
            if error.kind is ErrorKind.REJECTED_BY_MODEL:
                raise ModelRejectionError(error.message, image.operator) from None
            raise
        return np.frombuffer(parts[1], np.uint8).reshape(shape)


@dataclass(frozen=True, slots=True)
class _FileArg:
    """The declaration of an image file, with the attributes of ``ort.NodeArg``."""

    name: str
    type: str = "tensor(uint8)"
    shape: tuple[None] = (None,)


def _decodes(node: Node) -> bool:
    return node.domain in _DECODERS.get(node.op, ())


def _image_input(node: Node) -> ImageInput:
    pixel_format = str(node.attributes.get("pixel_format", "RGB")) if node.op == "ImageDecoder" else "BGR"
    if pixel_format not in PIXEL_FORMATS:
        expected = ", ".join(PIXEL_FORMATS)
        raise ServeError(
            ErrorKind.UNSUPPORTED, f"operator {node.op}: pixel_format: expected {expected}, got {pixel_format}"
        )
    return ImageInput(node.inputs[0], node.outputs[0], node.op, pixel_format)
