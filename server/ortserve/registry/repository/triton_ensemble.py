"""Reads the parts of a ``config.pbtxt`` that are specific to ensembles. The texts of errors are Triton's."""

from typing import Any, Final

from ortserve._pb import model_config_pb2 as pb
from ortserve.errors import invalid_input

_PLATFORM: Final = "ensemble"


def check_ensemble_fields(name: str, config: pb.ModelConfig) -> bool:
    """Check that an ensemble sets all fields that it needs, and no fields of other models.

    Returns:
        Whether the configuration describes an ensemble.

    Raises:
        ServeError: invalid_input.
    """
    has_steps = config.HasField("ensemble_scheduling")
    if config.platform != _PLATFORM:
        if has_steps:
            raise invalid_input(f"ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble")
        return False
    if not has_steps:
        raise invalid_input(f"ensemble scheduling must be set for ensemble {name} whose platform is ensemble")
    if config.backend:
        raise invalid_input(f"Ensemble model '{name}' must have platform type 'ensemble' and empty backend type")
    if config.instance_group:
        raise invalid_input(f"instance group should not be specified for ensemble '{name}'")
    if config.HasField("optimization"):
        raise invalid_input(f"optimization should not be specified for ensemble '{name}'")
    if config.model_warmup:
        raise invalid_input(f"model_warmup can not be specified for ensemble '{name}'")
    if config.batch_input or config.batch_output or any(tensor.allow_ragged_batch for tensor in config.input):
        raise invalid_input(
            f"batch_input, batch_output and allow_ragged_batch can not be specified for ensemble '{name}': its members "
            "form the batches"
        )
    steps = config.ensemble_scheduling.step
    if not steps:
        raise invalid_input(f"must specify 'step' for ensemble '{name}'")
    for number, step in enumerate(steps):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                raise invalid_input(f"must specify '{field}' in step {number} of ensemble '{name}'")
    return True


def ensemble_steps(config: pb.ModelConfig) -> list[dict[str, Any]]:
    """The steps in the form of ``model.yaml``."""
    return [
        {
            "model": step.model_name,
            "version": step.model_version,
            "inputs": dict(step.input_map),
            "outputs": dict(step.output_map),
        }
        for step in config.ensemble_scheduling.step
    ]
