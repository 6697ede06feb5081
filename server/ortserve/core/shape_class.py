"""Keys of shape classes: requests whose keys are equal may share a batch."""


class Alone:
    """The key of one request that no other may join, whatever its shape. Equal to no other."""

    def __str__(self) -> str:
        return "alone"
