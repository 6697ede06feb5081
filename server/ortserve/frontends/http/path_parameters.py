"""What stands in the paths of REST: a model's name and version."""

from typing import Annotated, TypeAlias

from fastapi import Path

ModelName: TypeAlias = Annotated[str, Path(description="Name of the model", examples=["digits"])]
ModelVersion: TypeAlias = Annotated[str, Path(description="Version of the model", pattern="^[0-9]+$", examples=["1"])]
