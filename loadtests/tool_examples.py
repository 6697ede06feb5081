"""Runs the tools on real models and writes their output to ``docs/reference/tools/examples.md``.

    python loadtests/tool_examples.py

The models are the bundled digits classifier, an encoder of MiniLM's size and a convolutional network like ResNet (both
with random weights), and exports of PyTorch, scikit-learn and ONNX Runtime's quantization. Takes three minutes.
"""

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from gpu_models import encoder, residual

ROOT: Final = Path(__file__).parents[1]
CORPUS: Final = ROOT / "tests" / "rows" / "corpus"
PAGE: Final = ROOT / "docs" / "reference" / "tools" / "examples.md"

EXPORTED: Final = {
    "gru": ("torch_gru_with_lengths", "a GRU over sequences of several lengths, exported by PyTorch"),
    "decoder": ("torch_greedy_decoder", "a decoder with control flow, exported by PyTorch"),
    "words": ("sklearn_words", "texts to word counts to classes, exported by skl2onnx"),
    "cnn_int8": ("quantized_cnn_qdq", "a convolutional network in int8, with QDQ nodes"),
}

COMMANDS: Final = (
    ("inspect", "{model}"),
    ("profile", "{model}", "--runs", "20"),
    ("bench", "{model}", "--batch", "{batch}", "--seconds", "2"),
)
UNBATCHED: Final = ("decoder.onnx",)
"""Models whose outputs have a different number of rows than their inputs, so they are not batched."""


def make_models(folder: Path) -> dict[str, str]:
    """Write the models into a folder. Returns a description of each, by the argument that names it there."""
    encoder(folder / "encoder.onnx", layers=6, hidden=384, heads=12, length=32)
    residual(folder / "residual.onnx", blocks=(2, 2, 2, 2), width=32)
    (folder / "models").symlink_to(ROOT / "server" / "ortserve" / "example" / "repository")
    for name, (source, _) in EXPORTED.items():
        (folder / f"{name}.onnx").symlink_to(CORPUS / f"{source}.onnx")
    return {
        "models/digits": "the bundled classifier of digits",
        "encoder.onnx": "a transformer encoder of MiniLM's size: 6 layers of 384, random weights",
        "residual.onnx": "a convolutional network of ResNet's kind: 8 blocks, random weights",
        **{f"{name}.onnx": text for name, (_, text) in EXPORTED.items()},
    }


def run(folder: Path, *arguments: str) -> str:
    """Run an ``ortserve`` command as a user would. Returns its output.

    Raises:
        subprocess.CalledProcessError: The command failed.
    """
    environment: Mapping[str, str] = os.environ | {"ORT_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "ortserve", *arguments],
        cwd=folder,
        env=environment,
        check=True,
        timeout=180,
        stdout=subprocess.PIPE,
        text=True,
    )
    return "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    machine = f"{os.cpu_count()} processors ({platform.machine()}), shared with other work"
    lines = ["# What the tools show of real models", "", f"Written by `loadtests/tool_examples.py` on {machine}."]
    with TemporaryDirectory() as name:
        folder = Path(name)
        for model, text in make_models(folder).items():
            lines += ["", f"## {model}: {text}"]
            for command in COMMANDS:
                arguments = [part.format(model=model, batch="1" if model in UNBATCHED else "1,8") for part in command]
                print(*arguments, file=sys.stderr)
                lines += ["", f"### {' '.join(arguments)}", "", "```text", run(folder, *arguments), "```"]
        print("doctor", file=sys.stderr)
        lines += ["", "## The machine", "", "### doctor", "", "```text", run(folder, "doctor"), "```"]
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
