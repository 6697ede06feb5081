"""Names that users of Triton may write: keys of a ``model.yaml``, and flags."""

from typing import Final

_NAMES_OF_TRITON: Final = {
    "default_model_filename": "model_file",
    "ensemble_scheduling": "ensemble",
    "instance_group": "instances",
    "max_batch_size": "max_rows",
    "model_warmup": "warmup_samples",
    "sequence_batching": "sequences",
}
"""Fields of a ``config.pbtxt``, and the keys of a ``model.yaml`` in their place."""

_FLAGS_OF_TRITON: Final = {
    "--cache-config": "--cache-bytes",
    "--exit-timeout-secs": "--drain-timeout-s",
    "--grpc-address": "--host",
    "--grpc-restricted-protocol": "--infer-keys-file",
    "--grpc-root-cert": "--tls-client-ca-file",
    "--grpc-server-cert": "--tls-cert-file",
    "--grpc-server-key": "--tls-key-file",
    "--http-address": "--host",
    "--http-restricted-api": "--infer-keys-file",
    "--log-verbose": "--log-level",
    "--metrics-address": "--host",
    "--model-repository": "REPOSITORY",
    "--model-store": "REPOSITORY",
    "--repository-poll-secs": "--repository-poll-s",
    "--reuse-grpc-port": "--reuse-port",
    "--reuse-http-port": "--reuse-port",
    "--trace-config": "--trace-file",
}
"""Flags of ``tritonserver``, and the flags of ``ortserve serve`` in their place; ``docs/migrate.md`` explains them."""


def hint_for(key: str) -> str:
    """The problem with a key that only Triton knows; empty for other keys."""
    if key == "dynamic_batching":
        return "unknown key; requests share batches without this field of a config.pbtxt"
    known = _NAMES_OF_TRITON.get(key)
    return f"unknown key; this field of a config.pbtxt is '{known}' here" if known else ""


def hint_for_flag(flag: str) -> str:
    """The end of a message about a flag that only Triton knows; empty for other flags."""
    known = _FLAGS_OF_TRITON.get(flag)
    return f"; this option of tritonserver is {known} here" if known else ""
