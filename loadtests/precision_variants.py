"""What does each precision cost in accuracy, and what does it gain in size and time?

Level: `ortserve quantize`, with each model in a separate process; the processes take turns. Expected: int8 is within
0.5 points of the accuracy of float32. A statically quantized convolutional network and a dynamically quantized encoder
run at least 1.5 times as fast. Quantizing only weights, to 4 or 8 bits, does not make runs faster.

    python loadtests/precision_variants.py [--seconds 4]

- digits: the bundled, trained classifier; calibrated with training images, compared on the 450 images held out.
- encoder: the size of MiniLM, 6 layers of width 384 and 30,522 words; random weights and tokens, sequences of 64.
- residual: the size of ResNet-18, 224 by 224; random weights and images.

Random weights have no outliers and their outputs have no meaning. For the last two models the relevant figures are size
and time; errors only show that the quantized model is the same model. Writes
``loadtests/results/precision_variants.md``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
import numpy as np  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from sklearn.model_selection import train_test_split  # noqa: E402

from gpu_models import encoder, residual  # noqa: E402
from harness import table, write_report  # noqa: E402

DIGITS: Final = HERE.parent / "server" / "ortserve" / "example" / "repository" / "digits"
VOCABULARY: Final = 30_522
LENGTH: Final = 64
LOST_ACCURACY: Final = 0.005

STATIC: Final = tuple(("--mode", "static", "--calibrator", name) for name in ("minmax", "entropy", "percentile"))
DYNAMIC: Final = ("--mode", "dynamic")
WEIGHTS: Final = tuple(("--mode", "weights", "--bits", bits) for bits in ("8", "4"))
ONE_SCALE: Final = ("--mode", "static", "--per-tensor")


@dataclass(frozen=True, slots=True)
class Case:
    """A model, the arguments for its comparison, and the variants to produce."""

    name: str
    model: Path
    calibration: Path
    comparison: tuple[str, ...]
    variants: tuple[tuple[str, ...], ...]


def digits(folder: Path) -> Case:
    """The case of the digits classifier; it splits the images as ``ortserve.example.train_digits`` does."""
    data = load_digits()
    images, labels = data.images.astype(np.float32)[:, np.newaxis], data.target.astype(np.int64)
    train, held_out, _, held_out_labels = train_test_split(
        images, labels, test_size=0.25, random_state=0, stratify=labels
    )
    np.savez(folder / "train.npz", image=train)
    np.savez(folder / "held_out.npz", image=held_out)
    np.save(folder / "labels.npy", held_out_labels)
    compared = ("--inputs", "held_out.npz", "--labels", "labels.npy", "--samples", "450")
    bound = ("--max-error", f"accuracy={LOST_ACCURACY}")
    variants = (DYNAMIC, *STATIC, ONE_SCALE, *WEIGHTS)
    return Case("digits", DIGITS, folder / "train.npz", (*compared, *bound), variants)


def random_encoder(folder: Path) -> Case:
    model = encoder(folder / "encoder.onnx", layers=6, hidden=384, heads=12, length=LENGTH, vocabulary=VOCABULARY)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (32, LENGTH))
    np.savez(folder / "tokens.npz", x=tokens[:16])
    np.savez(folder / "other_tokens.npz", x=tokens[16:])
    compared = ("--inputs", "other_tokens.npz", "--max-error", "cosine=0.1")
    return Case("encoder", model, folder / "tokens.npz", compared, (DYNAMIC, STATIC[0], *WEIGHTS))


def random_residual(folder: Path) -> Case:
    model = residual(folder / "residual.onnx", blocks=(2, 2, 2, 2))
    images = np.random.default_rng(0).standard_normal((24, 3, 224, 224), np.float32)
    np.savez(folder / "images.npz", x=images[:16])
    np.savez(folder / "other_images.npz", x=images[16:])
    compared = ("--inputs", "other_images.npz", "--max-error", "cosine=0.1")
    return Case("residual", model, folder / "images.npz", compared, (STATIC[0], STATIC[2], ONE_SCALE))


def quantize(folder: Path, case: Case, variant: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Run ``ortserve quantize`` as a user does. Returns its result.

    Raises:
        subprocess.CalledProcessError: The command failed; a missed bound is not a failure.
    """
    calibration = ("--calibration", case.calibration) if "static" in variant else ()
    more = ("--seconds", seconds, "-o", folder / "out.onnx", "--json")
    command = (
        sys.executable,
        "-m",
        "ortserve",
        "quantize",
        case.model,
        *variant,
        *calibration,
        *case.comparison,
        *more,
    )
    environment = os.environ | {"ORT_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, stdout=subprocess.PIPE, timeout=1800, check=False
    )
    if done.returncode not in (0, 1) or not done.stdout:
        done.check_returncode()
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def row(case: Case, variant: tuple[str, ...], result: dict[str, Any]) -> list[str]:
    agreement, speed = result["agreement"], result["speed"]
    accuracy = "-" if agreement["accuracy"] is None else f"{agreement['accuracy']:.2%}"
    cosine = max(output["cosine"] for output in agreement["outputs"])
    nodes = result["operators"]
    quantized, total = sum(one["quantized"] for one in nodes), sum(one["quantized"] + one["floating"] for one in nodes)
    ratio = speed and speed["ratio"]
    return [
        case.name,
        " ".join(part for part in variant if part not in ("--mode", "--calibrator")),
        f"{quantized} of {total}",
        accuracy,
        f"{cosine:.5f}",
        f"{result['nbytes'] / 1e6:.3g} MB ({result['nbytes'] / result['source_nbytes']:.0%})",
        f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else "-",
        "; ".join(result["missed"]) or "kept",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="For the speed of each variant.")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    rows, sources, misses = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for make in (digits, random_encoder, random_residual):
            case = make(folder)
            for variant in case.variants:
                result = quantize(folder, case, variant, options.seconds)
                rows.append(row(case, variant, result))
                print(*rows[-1], sep=" | ", flush=True)
                if case.name == "digits" and result["settings"]["bits"] == 8 and result["missed"]:
                    misses.append(" ".join(variant))
            accuracy = result["agreement"]["reference_accuracy"]
            known = f", accuracy {accuracy:.2%}" if accuracy is not None else ""
            sources.append(f"{case.name} {result['source_nbytes'] / 1e6:.3g} MB{known}")
    header = ("model", "variant", "nodes quantized", "accuracy", "worst cosine error", "size", "times as fast", "bound")
    setting = f"""\
In float32: {"; ".join(sources)}. Speed: runs of one row, median of paired blocks with its 95 % interval. Errors and
accuracy: against the source, on samples that were not used for calibration. The encoder and the residual network have
random weights, so that their errors say little about trained ones."""
    page = options.results / "precision_variants.md"
    write_report(page, "Accuracy, size and speed of quantized models", setting, table(header, rows))
    if misses:
        raise SystemExit(f"int8 costs digits more than {LOST_ACCURACY:.1%}: {', '.join(misses)}")


if __name__ == "__main__":
    main()
