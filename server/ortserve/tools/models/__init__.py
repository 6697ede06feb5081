"""``ortserve models``: the models of a running server, shown and controlled."""

__all__: list[str] = []
