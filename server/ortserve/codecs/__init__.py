"""Wire bytes to requests and responses to wire bytes: pure functions, one file a format."""
