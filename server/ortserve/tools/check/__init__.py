"""``ortserve check``: makes all checks that a server makes when it loads a repository, without serving."""
