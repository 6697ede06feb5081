"""The use cases, free of any protocol: inference, and what there is to know about the server and its models."""
