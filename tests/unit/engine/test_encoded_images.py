"""Sessions that decode image files, compared with Pillow; files that are not images; models that are rejected."""

import gc
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import psutil
import pytest
from onnx import TensorProto, helper
from PIL import Image

from models import builders
from models.images import EXTENSIONS, decoder, save
from ortserve.config.session import SessionSettings
from ortserve.engine.host_binding import can_bind
from ortserve.engine.model_signature import read_signature
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import Session, SessionOptions, open_session
from ortserve.errors import ErrorKind, ModelRejectionError, ServeError
from ortserve.model_file.reading import read_model

PIXELS = np.random.default_rng(0).integers(0, 256, (13, 17, 3), np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def opened(path: Path, **settings: object) -> Session:
    return open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), 1, SessionSettings(**settings)))  # type: ignore[arg-type]


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> np.ndarray:
    file = io.BytesIO()
    image.save(file, form, **options)
    return np.frombuffer(file.getvalue(), np.uint8)


def decode(session: Session, file: np.ndarray) -> np.ndarray:
    (pixels,) = session.run(None, {"file": file})
    return np.asarray(pixels)


@pytest.mark.parametrize("form", ["BMP", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP"])
def test_files_of_all_formats_are_decoded(path: Path, form: str) -> None:
    file = encoded(Image.fromarray(PIXELS), form)
    expected = np.asarray(Image.open(io.BytesIO(file.tobytes())))
    assert np.array_equal(decode(opened(decoder(path)), file), expected)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda path: decoder(path), PIXELS),
        (lambda path: decoder(path, pixel_format="RGB"), PIXELS),
        (lambda path: decoder(path, pixel_format="BGR"), PIXELS[:, :, ::-1]),
        (lambda path: decoder(path, "DecodeImage"), PIXELS[:, :, ::-1]),
        (
            lambda path: decoder(path, pixel_format="Grayscale"),
            np.asarray(Image.fromarray(PIXELS).convert("L"))[:, :, None],
        ),
    ],
)
def test_channels_are_in_the_order_of_the_operator(
    path: Path, build: Callable[[Path], Path], expected: np.ndarray
) -> None:
    pixels = decode(opened(build(path)), encoded(Image.fromarray(PIXELS)))
    assert pixels.dtype == np.uint8
    assert np.array_equal(pixels, expected)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr"])
def test_images_of_other_modes_become_rgb(path: Path, mode: str) -> None:
    image = Image.fromarray(PIXELS).convert(mode)
    file = encoded(image, "TIFF" if mode in ("CMYK", "YCbCr") else "PNG")
    expected = np.asarray(Image.open(io.BytesIO(file.tobytes())).convert("RGB"))
    assert np.array_equal(decode(opened(decoder(path)), file), expected)


def test_signature_is_of_the_file(path: Path) -> None:
    session = opened(decoder(path))
    signature = read_signature(session, read_model(path))
    (spec,) = signature.inputs
    assert (spec.name, spec.datatype.value, spec.shape, spec.is_image) == ("file", "UINT8", (-1,), True)
    assert signature.unbatched_because == "input 'file' is one image file"
    assert not can_bind(session, signature, None)


def test_every_truncated_file_is_rejected(path: Path) -> None:
    session = opened(decoder(path, "DecodeImage"))
    for form, options in (("JPEG", {"progressive": True}), ("JPEG", {}), ("PNG", {}), ("WEBP", {}), ("TIFF", {})):
        file = encoded(Image.fromarray(PIXELS), form, **options)
        for length in range(len(file) - 20):
            with pytest.raises(
                ModelRejectionError, match=r"^the model rejected the inputs: input 'file': expected an im"
            ):
                decode(session, file[:length])
        assert decode(session, file).shape == PIXELS.shape


def test_damaged_files_are_decoded_or_rejected(path: Path) -> None:
    session, generator = opened(decoder(path)), np.random.default_rng(1)
    rejected: list[str] = []
    for form in ("BMP", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP"):
        whole = encoded(Image.fromarray(PIXELS), form)
        for _ in range(100):
            file = whole.copy()
            file[generator.integers(0, len(file), 4)] = generator.integers(0, 256, 4)
            try:
                assert decode(session, file).shape[2] == 3
            except ModelRejectionError as error:
                rejected.append(error.message)
    assert len(rejected) > 100
    assert not any("0x" in message for message in rejected)


def test_large_image_is_rejected_before_it_is_decoded(path: Path) -> None:
    file = encoded(Image.new("1", (9_000, 9_000)))
    assert len(file) < 20_000
    with pytest.raises(ModelRejectionError) as caught:
        decode(opened(decoder(path)), file)
    assert caught.value.message.endswith(
        "expected an image of at most 67108864 pixels (session.max_image_pixels), got 9000 by 9000"
    )
    with pytest.raises(ModelRejectionError, match="at most 220 pixels"):
        decode(opened(path, max_image_pixels=220), encoded(Image.fromarray(PIXELS)))
    assert decode(opened(path, max_image_pixels=221), encoded(Image.fromarray(PIXELS))).shape == PIXELS.shape


def test_image_of_16_bits_is_rejected(path: Path) -> None:
    file = encoded(Image.fromarray(np.full((4, 4), 40_000, np.uint16)))
    with pytest.raises(ModelRejectionError, match="at most 8 bits a channel, got Pillow's mode I;16"):
        decode(opened(decoder(path)), file)


def test_one_session_decodes_in_several_threads(path: Path) -> None:
    session = opened(decoder(path))
    images = [np.full((64, 64, 3), value, np.uint8) for value in range(32)]
    files = [encoded(Image.fromarray(image)) for image in images]
    with ThreadPoolExecutor(8) as threads:
        for image, pixels in zip(images, threads.map(lambda file: decode(session, file), files), strict=True):
            assert np.array_equal(image, pixels)


def helpers() -> list[psutil.Process]:
    """The running processes that decode images for this one."""
    gc.collect()  # frees sessions of earlier tests, which tracebacks reference
    children = psutil.Process().children()
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "image_process" in " ".join(child.cmdline())]


def test_a_process_that_is_killed_is_replaced(path: Path) -> None:
    session, file = opened(decoder(path)), encoded(Image.fromarray(PIXELS))
    decode(session, file)
    (helper,) = helpers()
    helper.kill()
    psutil.wait_procs([helper], timeout=10)
    assert np.array_equal(decode(session, file), PIXELS)
    (helper,) = helpers()
    del session
    assert not helper.is_running()


def test_a_process_that_ends_in_the_middle_fails_one_request(path: Path) -> None:
    session, small = opened(decoder(path)), encoded(Image.fromarray(PIXELS))
    decode(session, small)
    (helper,) = helpers()
    idle_s = helper.cpu_times().user
    slow = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (700, 700, 3), np.uint8)), "JPEG2000")
    with ThreadPoolExecutor(1) as thread:
        decoding = thread.submit(decode, session, slow)
        while helper.cpu_times().user < idle_s + 0.05:
            assert not wait([decoding], timeout=0.005).done
        helper.kill()
        with pytest.raises(ServeError, match="the process that decodes images ended with status -9 while it read"):
            decoding.result(60)
    assert np.array_equal(decode(session, small), PIXELS)


def test_bfloat16_outputs_beside_images(path: Path) -> None:
    nodes = [
        helper.make_node("ImageDecoder", ["file"], ["image"]),
        helper.make_node("Cast", ["image"], ["numbers"], to=TensorProto.BFLOAT16),
    ]
    output = helper.make_tensor_value_info("numbers", TensorProto.BFLOAT16, [None, None, 3])
    session = opened(save(path, nodes, {"": 20}, output))
    file = ort.OrtValue.ortvalue_from_numpy(encoded(Image.fromarray(PIXELS)))
    (numbers,) = session.run_with_ort_values(["numbers"], {"file": file})
    assert numbers.shape() == list(PIXELS.shape)


def inner_decoder() -> list[onnx.NodeProto]:
    decode_it = helper.make_node("ImageDecoder", ["file"], ["inner"])
    inner = helper.make_tensor_value_info("inner", TensorProto.UINT8, None)
    body = helper.make_graph([decode_it], "body", [], [inner])
    return [
        helper.make_node("Constant", [], ["yes"], value=helper.make_tensor("yes", TensorProto.BOOL, [], [True])),
        helper.make_node("If", ["yes"], ["image"], then_branch=body, else_branch=body),
    ]


@pytest.mark.parametrize(
    "nodes",
    [
        [helper.make_node("Identity", ["file"], ["copy"]), helper.make_node("ImageDecoder", ["copy"], ["image"])],
        [helper.make_node("ImageDecoder", ["file"], ["image"]), helper.make_node("Size", ["file"], ["size"])],
        [helper.make_node("ImageDecoder", ["file"], [name]) for name in ("image", "twice")],
        [helper.make_node("DecodeImage", ["file"], ["x"], domain=EXTENSIONS), *inner_decoder()],
        inner_decoder(),
    ],
    ids=["inner tensor", "another reader", "two decoders", "beside one in a graph", "in a graph"],
)
def test_images_elsewhere_than_at_inputs_are_refused(path: Path, nodes: list[onnx.NodeProto]) -> None:
    save(path, nodes, {"": 20, EXTENSIONS: 1})
    with pytest.raises(
        ServeError, match="expected each to read an input of the model that no other node reads"
    ) as caught:
        opened(path)
    assert caught.value.kind is ErrorKind.UNSUPPORTED


def test_unknown_pixel_format_is_refused(path: Path) -> None:
    with pytest.raises(ServeError, match="pixel_format: expected RGB, BGR, Grayscale, got CMYK"):
        opened(decoder(path, pixel_format="CMYK"))


def test_missing_pillow_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortserve.engine.encoded_images.find_spec", lambda name: None)
    with pytest.raises(ServeError, match=r"needs the package Pillow.*pip install 'ortserve\[extensions\]'"):
        opened(decoder(path))


def test_models_without_images_are_opened_as_before(path: Path) -> None:
    assert type(opened(builders.mlp(path))).__name__ == "InferenceSession"
