"""TLS of all ports: the certificate with its renewal, and the transport of a TLS session."""

__all__ = ["certificate", "transport"]
