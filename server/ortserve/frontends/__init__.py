"""Sockets: how REST and gRPC callers reach the service."""
