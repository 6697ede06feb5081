"""The native gRPC transport: HTTP/2 on the server's own event loop, without a task per unary call."""

__all__ = ["dispatcher", "server"]
