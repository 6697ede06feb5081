"""Mirrors repositories in object stores, in archives behind HTTPS and on a model hub into folders on the disk."""

__all__ = ["mirrors"]
