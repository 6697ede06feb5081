"""``ortserve check``: everything that a load of a repository's models would check, without serving."""
