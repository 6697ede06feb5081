"""Models of ``advice.py``, and the variants of their files that the trials compare."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.tools.remove_initializer_from_input import remove_initializer_from_input
from onnxruntime.transformers.float16 import convert_float_to_float16
from onnxscript import ir
from onnxscript.rewriter.ort_fusions import optimize_for_ort

from advice_arms import inputs_for
from gpu_models import encoder, mlp, residual
from ortserve.tools.opening import open_model
from ortserve.tools.subject import find_model

ROOT: Final = Path(__file__).parents[1]
_DIGITS: Final = ROOT / "server" / "ortserve" / "example" / "repository" / "digits" / "1" / "model.onnx"
_BERT: Final = ROOT / "tests" / "rows" / "corpus" / "transformers_bert_dynamo.onnx"
_SAMPLES: Final = 16

MODELS: Final[Mapping[str, Callable[[Path], object]]] = {
    "digits": lambda path: shutil.copyfile(_DIGITS, path),
    "bert": lambda path: shutil.copyfile(_BERT, path),
    "encoder": lambda path: encoder(path, layers=6, hidden=384, heads=12, length=32, vocabulary=8000),
    "network": lambda path: residual(path, size=64),
    "dense": lambda path: mlp(path, layers=8, width=256),
}
"""Functions that write a model, by its name: a trained classifier of images; an exported tiny BERT; models of the sizes
of MiniLM and ResNet-50 with random weights; dense layers."""


def _link(source: Path, target: Path) -> None:
    target.hardlink_to(source)


def _optimized(source: Path, target: Path) -> None:
    """Write the model that the server's option ``optimized_model_file`` produces."""
    open_model(find_model(str(source)), threads=1, settings={"optimized_model_file": str(target)})


def _open_weights(source: Path, target: Path) -> None:
    """Write the model with all weights as inputs too, as old exporters did."""
    model = onnx.load(source)
    for weight in model.graph.initializer:
        model.graph.input.append(onnx.helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims))
    onnx.save(model, target)


def _closed_weights(source: Path, target: Path) -> None:
    _open_weights(source, target)
    model = onnx.load(target)
    remove_initializer_from_input(model)
    onnx.save(model, target)


def _external(source: Path, target: Path) -> None:
    onnx.save_model(onnx.load(source), target, save_as_external_data=True, location="weights.bin", size_threshold=1024)


def _half(source: Path, target: Path) -> None:
    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), target)


def _fused(source: Path, target: Path) -> None:
    ir.save(optimize_for_ort(ir.load(source))[0], target)


def _quantized(source: Path, target: Path, mode: str, *arguments: str) -> None:
    """Write the model that ``ortserve quantize`` produces, without its own measurement."""
    samples = source.with_name("samples.npz")
    session = ort.InferenceSession(str(source), providers=["CPUExecutionProvider"])
    inputs: dict[str, Any] = inputs_for(session, _SAMPLES)
    np.savez(samples, **inputs)
    calibration = [f"--calibration={samples}"] if mode == "static" else []
    command = [sys.executable, "-m", "ortserve", "quantize", str(source), "-o", str(target), f"--mode={mode}"]
    checks = ["--max-error=cosine=1", "--seconds=0", "--json"]  # random weights have no accuracy to preserve
    command += [*calibration, *arguments, *checks]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr)


VARIANTS: Final[Mapping[str, Callable[[Path, Path], None]]] = {
    "source": _link,
    "optimized": _optimized,
    "weights are inputs": _open_weights,
    "weights are constants": _closed_weights,
    "external weights": _external,
    "FP16": _half,
    "fused attention": _fused,
    "int4 weights": lambda source, target: _quantized(source, target, "weights", "--bits=4"),
    "dynamic int8": lambda source, target: _quantized(source, target, "dynamic"),
    "static int8": lambda source, target: _quantized(source, target, "static"),
    "static int8 with int8 activations": lambda source, target: _quantized(
        source, target, "static", "--activations=int8"
    ),
}
"""Functions that write a variant of a model's file, by name. Arguments: the source and the target."""
