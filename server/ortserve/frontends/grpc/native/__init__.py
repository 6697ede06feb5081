__all__ = ["limits", "server"]
