"""Reading a model file without the package ``onnx``: once, without its weights, into one record for all analyses.

``protobuf`` is the wire format, ``graph`` the record, ``tensors`` reads constants, and ``reading`` makes the record of
a file.
"""

__all__ = ["graph", "protobuf", "reading"]
