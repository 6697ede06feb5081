"""Dataclasses of which some are made for each request."""

from typing import TYPE_CHECKING, Any

__all__ = ["quick_dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass as quick_dataclass
else:
    from dataclasses import dataclass

    def quick_dataclass(*, frozen: bool, slots: bool) -> Any:
        """As ``dataclass``, but frozen for type checkers alone: at run time it makes setting each field slower."""
        return dataclass(slots=slots, unsafe_hash=frozen)
