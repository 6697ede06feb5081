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
    "--grpc-http2-min-recv-ping-interval-without-data": "--grpc-http2-min-recv-ping-interval-without-data-s",
    "--grpc-infer-response-compression-level": "--grpc-response-compression",
    "--grpc-keepalive-time": "--grpc-keepalive-time-s",
    "--grpc-keepalive-timeout": "--grpc-keepalive-timeout-s",
    "--grpc-max-connection-age": "--grpc-max-connection-age-s",
    "--grpc-max-connection-age-grace": "--grpc-max-connection-age-grace-s",
    "--grpc-restricted-protocol": "--infer-keys-file",
    "--grpc-root-cert": "--tls-client-ca-file",
    "--grpc-server-cert": "--tls-cert-file",
    "--grpc-server-key": "--tls-key-file",
    "--grpc-use-ssl": "--tls-cert-file",
    "--grpc-use-ssl-mutual": "--tls-client-ca-file",
    "--http-address": "--host",
    "--http-max-input-size": "--max-body-bytes",
    "--http-restricted-api": "--infer-keys-file",
    "--id": "--server-name",
    "--log-error": "--log-level",
    "--log-info": "--log-level",
    "--log-verbose": "--log-level",
    "--log-warning": "--log-level",
    "--metrics-address": "--host",
    "--model-repository": "REPOSITORY",
    "--model-store": "REPOSITORY",
    "--repository-poll-secs": "--repository-poll-s",
    "--response-cache-byte-size": "--cache-bytes",
    "--reuse-grpc-port": "--reuse-port",
    "--reuse-http-port": "--reuse-port",
    "--trace-config": "--trace-file",
}
"""Flags of ``tritonserver``, and the flags of ``ortserve serve`` in their place; ``docs/migrate.md`` explains them."""

_OTHER_FLAGS_OF_TRITON: Final = frozenset(
    {
        "--allow-cpu-metrics",
        "--allow-gpu-metrics",
        "--allow-grpc",
        "--allow-http",
        "--allow-metrics",
        "--allow-sagemaker",
        "--allow-vertex-ai",
        "--backend-config",
        "--backend-directory",
        "--buffer-manager-thread-count",
        "--cache-directory",
        "--cuda-memory-pool-byte-size",
        "--cuda-virtual-address-size",
        "--disable-auto-complete-config",
        "--enable-peer-access",
        "--exit-on-error",
        "--grpc-header-forward-pattern",
        "--grpc-infer-allocation-pool-size",
        "--grpc-infer-thread-count",
        "--grpc-max-response-pool-size",
        "--host-policy",
        "--http-header-forward-pattern",
        "--http-thread-count",
        "--log-file",
        "--metrics-config",
        "--metrics-interval-ms",
        "--min-supported-compute-capability",
        "--model-config-name",
        "--model-load-gpu-limit",
        "--model-load-retry-count",
        "--model-load-thread-count",
        "--model-namespacing",
        "--pinned-memory-pool-byte-size",
        "--rate-limit",
        "--rate-limit-resource",
        "--repoagent-directory",
        "--sagemaker-port",
        "--sagemaker-safe-port-range",
        "--sagemaker-thread-count",
        "--strict-model-config",
        "--vertex-ai-default-model",
        "--vertex-ai-port",
        "--vertex-ai-thread-count",
    }
)
"""Flags of ``tritonserver`` that no flag of ``ortserve serve`` replaces; ``docs/migrate.md`` explains most of them."""


def hint_for(key: str) -> str:
    """The problem with a key that only Triton knows; empty for other keys."""
    if key == "dynamic_batching":
        return "unknown key; requests share batches without this field of a config.pbtxt"
    known = _NAMES_OF_TRITON.get(key)
    return f"unknown key; this field of a config.pbtxt is '{known}' here" if known else ""


def hint_for_flag(flag: str) -> str:
    """The end of a message about a flag that only Triton knows; empty for other flags."""
    if flag in _OTHER_FLAGS_OF_TRITON:
        return f"; no flag replaces {flag} of tritonserver"
    known = _FLAGS_OF_TRITON.get(flag)
    return f"; {flag} of tritonserver is {known} here" if known else ""
