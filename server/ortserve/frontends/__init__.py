"""The servers of both protocols: HTTP and gRPC over plain text or TLS."""

__all__ = ["access", "grpc", "http", "load_reports", "tls", "trace_headers"]
