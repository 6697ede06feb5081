"""Train the example model ``digits`` and write it into the bundled repository, with a README that says what it is.

Run as ``python -m ortserve.example.train_digits``. Needs the packages torch, scikit-learn, onnx, onnxruntime and numpy;
takes under a minute on one CPU core. With the same versions on the same kind of CPU it makes the same model.
"""

import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import sklearn
import torch
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from ortserve.example import repository_path

SEED = 0
EPOCHS = 120
BATCH_ROWS = 64
LEARNING_RATE = 3e-3
PIXEL_MAX = 16.0
OPSET = 21
IR_VERSION = 10
REQUIRED_ACCURACY = 0.97


@dataclass(frozen=True, slots=True)
class Digits:
    """Images are FP32 [n, 1, 8, 8] with values 0..16, labels INT64 [n] with values 0..9."""

    train_images: np.ndarray
    train_labels: np.ndarray
    held_out_images: np.ndarray
    held_out_labels: np.ndarray


def load_split() -> Digits:
    """Return the 1,347 images to train on and the 450 that are held out; the split is always the same."""
    data = load_digits()
    images = data.images.astype(np.float32)[:, np.newaxis]
    labels = data.target.astype(np.int64)
    train_images, held_out_images, train_labels, held_out_labels = train_test_split(
        images, labels, test_size=0.25, random_state=0, stratify=labels
    )
    return Digits(train_images, train_labels, held_out_images, held_out_labels)


def train(images: np.ndarray, labels: np.ndarray) -> torch.nn.Sequential:
    """Fit the network to ``images`` (values 0..16) and return it in evaluation mode; it gives logits [n, 10]."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 24, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.4),
        torch.nn.Linear(24 * 4 * 4, 10),
    )
    inputs = torch.from_numpy(images) / PIXEL_MAX
    targets = torch.from_numpy(labels)
    steps = EPOCHS * -(-len(inputs) // BATCH_ROWS)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    network.train()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(inputs)).split(BATCH_ROWS):
            loss = torch.nn.functional.cross_entropy(
                network(_shifted(inputs[rows])), targets[rows], label_smoothing=0.05
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.eval()


def export(network: torch.nn.Sequential) -> onnx.ModelProto:
    """Export the trained network to ONNX.

    Input: ``image`` FP32 [batch, 1, 8, 8], values 0..16. Outputs: ``probabilities`` FP32 [batch, 10] and ``label``
    INT64 [batch]. The graph is written out here instead of traced: nine nodes with chosen names.
    """
    weights = {name: value.detach().numpy() for name, value in network.named_parameters()}
    initializers = [
        # Scaling the pixels is part of the first layer: its weights take the factor.
        numpy_helper.from_array(weights["0.weight"] / np.float32(PIXEL_MAX), "conv1.weight"),
        numpy_helper.from_array(weights["0.bias"], "conv1.bias"),
        numpy_helper.from_array(weights["2.weight"], "conv2.weight"),
        numpy_helper.from_array(weights["2.bias"], "conv2.bias"),
        numpy_helper.from_array(weights["7.weight"], "dense.weight"),
        numpy_helper.from_array(weights["7.bias"], "dense.bias"),
    ]
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["image", "conv1.weight", "conv1.bias"], ["conv1"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["conv1"], ["relu1"]),
            helper.make_node("Conv", ["relu1", "conv2.weight", "conv2.bias"], ["conv2"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["conv2"], ["relu2"]),
            helper.make_node("MaxPool", ["relu2"], ["pooled"], kernel_shape=[2, 2], strides=[2, 2]),
            helper.make_node("Flatten", ["pooled"], ["features"]),
            helper.make_node("Gemm", ["features", "dense.weight", "dense.bias"], ["logits"], transB=1),
            helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
            helper.make_node("ArgMax", ["logits"], ["label"], axis=1, keepdims=0),
        ],
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [
            helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", 10]),
            helper.make_tensor_value_info("label", TensorProto.INT64, ["batch"]),
        ],
        initializer=initializers,
        doc_string="Handwritten digits, 8x8 grey values 0..16",
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="ortserve.example.train_digits",
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def count_correct(network: torch.nn.Sequential, model: onnx.ModelProto, images: np.ndarray, labels: np.ndarray) -> int:
    """Run ``model`` in ONNX Runtime and count the labels it gets right.

    Raises:
        RuntimeError: ONNX Runtime and torch differ by more than rounding, so that the export is wrong.
    """
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    probabilities, predicted = session.run(["probabilities", "label"], {"image": images})
    with torch.no_grad():
        expected = torch.softmax(network(torch.from_numpy(images) / PIXEL_MAX), dim=1).numpy()
    difference = float(np.abs(probabilities - expected).max())
    if difference > 1e-5 or not np.array_equal(predicted, expected.argmax(axis=1)):
        raise RuntimeError(f"the exported model and torch differ by {difference:g} in a probability")
    return int((predicted == labels).sum())


def describe(correct: int, total: int, train_total: int) -> str:
    """Describe the model in Markdown: its tensors, its accuracy and its origin."""
    versions = ", ".join(
        [
            f"Python {platform.python_version()}",
            *(f"{module.__name__} {module.__version__}" for module in (torch, sklearn, onnx, onnxruntime, np)),
        ]
    )
    return f"""# digits

Recognises handwritten digits with a convolutional network: two convolutions (16 and 24 channels) and a dense layer.

| tensor | datatype | shape | meaning |
|---|---|---|---|
| `image` (input) | FP32 | [batch, 1, 8, 8] | grey values 0 (paper) to 16 (ink); scaling is done inside the model |
| `probabilities` | FP32 | [batch, 10] | one for each digit, they sum to 1 |
| `label` | INT64 | [batch] | the most probable digit |

Held-out accuracy: {correct / total:.4f} ({correct} of {total} images, measured with ONNX Runtime).

Made by `python -m ortserve.example.train_digits`, which trained on {train_total} images and used the {total} held-out
images only once, for this measurement; seed {SEED}, {EPOCHS} epochs.
Versions: {versions}.

The images are those of scikit-learn's `load_digits`: the test part of the UCI Machine Learning Repository's "Optical
Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998), scans of 13 writers' digits, licensed CC BY 4.0.
The model demonstrates a server. It is not meant to read other handwriting.
"""


def main() -> None:
    digits = load_split()
    network = train(digits.train_images, digits.train_labels)
    model = export(network)
    total = len(digits.held_out_labels)
    correct = count_correct(network, model, digits.held_out_images, digits.held_out_labels)
    print(f"held-out accuracy: {correct / total:.4f} ({correct} of {total})")
    if correct / total < REQUIRED_ACCURACY:
        raise SystemExit(f"not written: below {REQUIRED_ACCURACY}")
    folder = repository_path() / "digits"
    _write(folder / "1" / "model.onnx", model.SerializeToString(deterministic=True))
    _write(folder / "README.md", describe(correct, total, len(digits.train_labels)).encode())


def _shifted(images: torch.Tensor) -> torch.Tensor:
    """Move each image by up to one pixel in each direction, at random. This is the only augmentation."""
    padded = torch.nn.functional.pad(images, (1, 1, 1, 1))
    corners = torch.randint(0, 3, (len(images), 2)).tolist()
    return torch.stack([image[:, y : y + 8, x : x + 8] for image, (y, x) in zip(padded, corners, strict=True)])


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


if __name__ == "__main__":
    main()
