"""The servers of both protocols: HTTP and gRPC over plain text or TLS."""

__all__ = ["access", "grpc", "http", "load_reports", "metrics_server", "tls", "trace_headers", "unsent_answers"]
