"""Which models run: what lies in the repositories, which versions should serve, and bringing them up and down."""

__all__ = ["lifecycle", "model_config", "registry", "served"]
