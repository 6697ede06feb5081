"""Running models: execution providers, sessions, instances. The only room of the server that imports onnxruntime."""
