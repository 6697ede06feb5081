"""Repositories in object stores, in archives behind HTTPS, and on a model hub, as folders on the disk."""

__all__ = ["mirrors"]
