"""Models of real exporters: those of ``corpus``, and those of installed packages.

``ORTSERVE_TEST_PACKAGES`` is the folder with the packages, as ``pip install --target`` creates it. The packages are too
large to be fetched for each run of the tests.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from ortserve.model_file.reading import read_model
from ortserve.rows import RowVerdict, prove_model
from rows.brute_force import BATCHES, Observation, observe
from rows.cases import ROWS, random_array

CORPUS: Final = Path(__file__).parent / "corpus"
PACKAGES: Final = os.environ.get("ORTSERVE_TEST_PACKAGES", "")


@dataclass(frozen=True)
class Exported:
    """A model of an exporter, with its request of one row.

    Attributes:
        made_by: The exporter, with its version.
        shapes: Shapes of the inputs of one row; 1 along the axis of the rows.
        below: Upper bounds of the integers of inputs.
        scale: Factor of the floats.
        axes: The axis of rows for inputs whose rows are not on axis 0; None for inputs without rows.
        independent: Whether the rows are independent along these axes, as known from the model or from many trials.
        values: Values of inputs that require particular ones.
    """

    name: str
    path: Path
    made_by: str
    shapes: Mapping[str, Sequence[int]]
    below: Mapping[str, int] = field(default_factory=dict)
    scale: float = 1.0
    axes: Mapping[str, int | None] = field(default_factory=dict)
    independent: bool = True
    values: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def model(self) -> onnx.ModelProto:
        return onnx.load(self.path)

    @property
    def row_axes(self) -> dict[str, int | None]:
        return {name: self.axes.get(name, 0) for name in self.shapes}

    @property
    def verdict(self) -> RowVerdict:
        return prove_model(read_model(self.path))

    def rows(self, seed: int = 0) -> list[dict[str, np.ndarray]]:
        rng = np.random.default_rng(seed)
        types = {value.name: value.type.tensor_type.elem_type for value in self.model.graph.input}
        rows: list[dict[str, np.ndarray]] = [{} for _ in range(ROWS)]
        for name, shape in self.shapes.items():
            for row in rows:
                if name in self.values:
                    dtype = onnx.helper.tensor_dtype_to_np_dtype(types[name])
                    row[name] = np.full(shape, self.values[name], dtype)
                else:
                    row[name] = random_array(rng, types[name], shape, self.below.get(name, 4), self.scale)
        if any("mask" in name for name in self.shapes):  # the first token is never masked out
            for row in rows:
                for name in row:
                    if "mask" in name:
                        row[name][..., 0] = 1
        return rows

    def observe(self, *, inside: bool, seed: int = 0) -> dict[str, Observation]:
        return observe(self.model, self.rows(seed), self.row_axes, BATCHES, inside=inside)


def committed() -> list[Exported]:
    """The models of the folder ``corpus``."""
    manifest: dict[str, dict[str, Any]] = json.loads((CORPUS / "manifest.json").read_text())
    return [Exported(name, CORPUS / f"{name}.onnx", **entry) for name, entry in manifest.items()]


def packaged(folder: Path) -> Iterator[Exported]:
    """The models of packages in the folder."""
    for path, entry in _PACKAGED.items():
        if (folder / path).exists():
            yield Exported(path, folder / path, **entry)


_VOICE: Final[dict[str, Any]] = {
    "made_by": "torch, TorchScript",
    "shapes": {"input": (1, 576), "state": (2, 1, 128), "sr": ()},
    "axes": {"state": 1, "sr": None},
    "values": {"sr": 16000},
}
_FRAMES: Final[dict[str, Any]] = {
    "made_by": "torch, dynamo",
    "shapes": {"input": (1, 576), "h": (1, 1, 128), "c": (1, 1, 128)},
    "axes": {"h": None, "c": None},
    "values": {"h": 0, "c": 0},
    "independent": False,
}
_DETECTOR: Final[dict[str, Any]] = {"made_by": "paddle2onnx", "shapes": {"x": (1, 3, 64, 96)}}
_READER: Final[dict[str, Any]] = {"made_by": "paddle2onnx", "shapes": {"x": (1, 3, 48, 96)}}
_ECHO: Final[dict[str, Any]] = {
    "made_by": "torch, TorchScript",
    "axes": {"h0": None},
    "values": {"h0": 0},
    "independent": False,
}
_LINE: Final[dict[str, Any]] = {
    "made_by": "torch, TorchScript",
    "shapes": {"input1": (1, 1, 64, 1)},
    "axes": {"input1": 3},
    "independent": False,
}

_PACKAGED: Final[dict[str, dict[str, Any]]] = {
    "arabic_name_romanizer/resources/decoder.onnx": {
        "made_by": "torch 2.14.0, TorchScript",
        "shapes": {"prefix": (1, 4), "memory": (1, 7, 256), "src_mask": (1, 7), "hidden": (1, 2, 256)},
        "below": {"prefix": 160},
    },
    "arabic_name_romanizer/resources/encoder.onnx": {
        "made_by": "torch 2.14.0, TorchScript",
        "shapes": {"src": (1, 7), "src_mask": (1, 7)},
        "below": {"src": 40},
    },
    "basic_pitch/saved_models/icassp_2022/nmp.onnx": {
        "made_by": "tf2onnx 1.15.1",
        "shapes": {"serving_default_input_2:0": (1, 43844, 1)},
        "scale": 0.1,
    },
    "ddddocr/common.onnx": _LINE,
    "ddddocr/common_old.onnx": _LINE | {"made_by": "torch, TorchScript, quantized"},
    "faster_whisper/assets/silero_vad_v6.onnx": _FRAMES,
    "magika/models/standard_v3_3/model.onnx": {
        "made_by": "tf2onnx 1.16.1",
        "shapes": {"bytes": (1, 2048)},
        "below": {"bytes": 257},
    },
    "nudenet/320n.onnx": {"made_by": "torch 2.3.1, ultralytics", "shapes": {"images": (1, 3, 320, 320)}, "scale": 0.3},
    "piper/hebrew/nakdimon.onnx": {
        "made_by": "tf2onnx 1.16.1",
        "shapes": {"input_1": (1, 20)},
        "below": {"input_1": 20},
    },
    "piper/tashkeel/model.onnx": {
        "made_by": "torch 2.1.2, TorchScript",
        "shapes": {"char_inputs": (1, 12), "diac_inputs": (1, 12), "input_lengths": (1,)},
        "below": {"char_inputs": 30, "diac_inputs": 10},
        "values": {"input_lengths": 12},
    },
    "rapidocr/models/PP-OCRv6_det_small.onnx": _DETECTOR,
    "rapidocr/models/PP-OCRv6_rec_small.onnx": _READER,
    "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx": _READER,
    "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx": _DETECTOR,
    "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx": _READER,
    "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx": _READER,
    "silero_vad/data/silero_vad.onnx": _VOICE,
    "silero_vad/data/silero_vad_16k_op15.onnx": _VOICE,
    "silero_vad/data/silero_vad_16k_sequence.onnx": _FRAMES,
    "silero_vad/data/silero_vad_half.onnx": {
        "made_by": "torch 2.3.1, TorchScript",
        "shapes": {"input": (1, 576), "state": (2, 1, 128)},
        "axes": {"state": 1},
    },
    "silero_vad/data/silero_vad_op18_ifless.onnx": _VOICE,
    "speechmos/aecmos_models/Run_1663829550_Stage_0.onnx": _ECHO
    | {"shapes": {"input": (1, 3, 20, 160), "h0": (4, 1, 64)}},
    "speechmos/aecmos_models/Run_1663915512_Stage_0.onnx": _ECHO
    | {"shapes": {"input": (1, 3, 20, 160), "h0": (4, 1, 64)}},
    "speechmos/aecmos_models/Run_1668423760_Stage_0.onnx": _ECHO
    | {"shapes": {"input": (1, 3, 20, 160), "h0": (4, 1, 96)}},
    "speechmos/dnsmos_models/bak_ovr.onnx": {"made_by": "keras2onnx 1.8.1", "shapes": {"input_1": (1, 901, 161)}},
    "speechmos/dnsmos_models/model_v8.onnx": {"made_by": "keras2onnx 1.7.0", "shapes": {"input_1": (1, 900, 120)}},
    "speechmos/dnsmos_models/sig.onnx": {"made_by": "keras2onnx 1.8.1", "shapes": {"input_1": (1, 901, 161)}},
    "speechmos/dnsmos_models/sig_bak_ovr.onnx": {"made_by": "keras2onnx 1.8.1", "shapes": {"input_1": (1, 144160)}},
    "speechmos/plcmos_models/plcmos_v2.onnx": {
        "made_by": "torch 1.11.0, TorchScript",
        "shapes": {"degraded_audio": (1, 1, 20, 257), "rater_embed": (1, 64)},
        "independent": False,
    },
    "vietcombank_captcha/models/vietcombank_captcha.onnx": {
        "made_by": "tf2onnx 1.16.1",
        "shapes": {"input": (1, 50, 155, 3)},
    },
}
"""Packaged models by path: their inputs, and whether their rows are independent, which brute force shows."""
