"""TLS of all ports: the certificate and its renewal, and the sessions that it opens."""
