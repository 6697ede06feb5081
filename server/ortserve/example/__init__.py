"""The bundled model repository that ``ortserve serve --example`` serves, and the scripts that made its models.

The scripts need packages the server does not (onnx, torch, …) and are never imported by it.
"""

from pathlib import Path


def repository_path() -> Path:
    """Return the folder of the bundled models: ``<name>/<version>/model.onnx``. It may be read-only."""
    return Path(__file__).parent / "repository"
