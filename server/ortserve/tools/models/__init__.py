"""``ortserve models``: shows and controls the models of a running server."""

__all__: list[str] = []
