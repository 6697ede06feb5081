"""Sockets: how REST and gRPC callers reach the service."""

__all__ = ["exposure", "grpc", "http", "load_reports", "metrics_server", "tls", "trace_headers"]
