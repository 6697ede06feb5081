"""Decides which models are in memory: measures their memory, reserves it, and evicts them."""

__all__ = ["ledger", "memory_room"]
