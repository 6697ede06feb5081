"""Sockets: how REST and gRPC callers reach the service."""

__all__ = ["exposure", "grpc", "http", "load_reports", "tls", "trace_headers"]
