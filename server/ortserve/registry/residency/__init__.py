"""Which models are in memory: what each holds, whose place a load takes, and requests that wait for a load."""

__all__ = ["demand", "ledger", "memory_room"]
