"""The helper process that decodes image files with Pillow, the reference decoder of ONNX's ``ImageDecoder``.

Pillow holds the interpreter lock for parts of its work. For JPEG 2000 it holds it all the time, which is seconds for
large images. A malformed file that crashes a library below Pillow ends this process instead of the server.
``engine/encoded_images`` starts the process.
"""

import io
import warnings
from typing import TYPE_CHECKING, Final, TypeAlias

from ortserve.core.helper_process import Parts, pack, serve
from ortserve.errors import ErrorKind, ServeError

if TYPE_CHECKING:
    from PIL.Image import Image

Arguments: TypeAlias = tuple[str, str, int]
"""The name of the input, the pixel format, and the maximum width times height."""

PIXEL_FORMATS: Final = {"RGB": ("RGB", "RGB", 3), "BGR": ("RGB", "BGR", 3), "Grayscale": ("L", "L", 1)}
"""Pillow's mode, the order in memory, and the number of channels."""

_FORMATS: Final = ("BMP", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""The formats for which ``ImageDecoder`` is defined. Pillow supports others, some of which start programs."""

_DEPTH_8: Final = ("1", "CMYK", "HSV", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "YCbCr")
"""Pillow's modes with at most 8 bits per channel. Pillow would convert other modes by clipping their values."""

_NICENESS: Final = 0
"""The level of runs, because decoding is part of a run."""


def decode(arguments: Arguments, file: memoryview) -> Parts:
    """Decode a file to the shape and the pixels, UINT8 ``[height, width, channels]``.

    Raises:
        ServeError: rejected_by_model: the bytes are not an image in a known format, the image is too large, or it has
            more than 8 bits per channel.
        MemoryError: There is too little memory for the pixels.
    """
    import PIL.Image

    name, pixel_format, _ = arguments
    mode, order, channels = PIXEL_FORMATS[pixel_format]
    try:
        with PIL.Image.open(io.BytesIO(file), formats=_FORMATS) as image:
            _check(image, arguments)
            pixels = image.convert(mode).tobytes("raw", order)
            return [pack((image.height, image.width, channels)), pixels]
    except (MemoryError, ServeError):
        raise
    except PIL.UnidentifiedImageError:  # its text names an address
        raise _rejection(name, f"an image file ({', '.join(_FORMATS)})", f"{len(file)} bytes") from None
    except Exception as error:  # noqa: BLE001 - Pillow raises errors of any kind for malformed files
        got = f"{len(file)} bytes that cannot be decoded: {f'{error}':.200}"
        raise _rejection(name, "an image file", got) from None


def _check(image: "Image", arguments: Arguments) -> None:
    """Check the file's header, before memory for the pixels is allocated."""
    name, _, max_pixels = arguments
    if image.width * image.height > max_pixels:
        expected = f"an image of at most {max_pixels} pixels (session.max_image_pixels)"
        raise _rejection(name, expected, f"{image.width} by {image.height}")
    if image.mode not in _DEPTH_8:
        raise _rejection(name, "an image of at most 8 bits a channel", f"Pillow's mode {image.mode}")


def _rejection(name: str, expected: str, got: str) -> ServeError:
    message = f"the model rejected the inputs: input '{name}': expected {expected}, got {got}"
    return ServeError(ErrorKind.REJECTED_BY_MODEL, message)


def main() -> None:
    """Decode the files that the server sends, until it closes the connection."""
    import PIL.Image

    PIL.Image.MAX_IMAGE_PIXELS = None  # the arguments contain the limit
    warnings.filterwarnings("ignore", module=r"PIL\.")  # callers could fill the log with warnings
    serve(decode, "the pixels of an image", _NICENESS)
