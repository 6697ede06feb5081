"""Decides which models are in memory: measures their memory, evicts them, and loads them when requests need them."""

__all__ = ["demand", "ledger", "memory_room"]
