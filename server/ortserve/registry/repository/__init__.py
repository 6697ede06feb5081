"""What a model is loaded from: files in a repository or sent by a client, and fingerprints that show changes."""

__all__ = ["client_model", "model_files", "source"]
