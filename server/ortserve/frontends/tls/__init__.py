"""TLS of all ports: the certificate and its renewal, and the sessions that it opens."""

__all__ = ["certificate", "server_certificate", "transport"]
