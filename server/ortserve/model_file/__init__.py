"""Reading a model file without the package ``onnx``: once, without its weights, into one record for all analyses.

``protobuf`` is the wire format, ``graph`` the record, ``tensors`` reads constants, ``reading`` makes the record of a
file, ``damage`` says which files are not whole, and ``editing`` replaces nodes for a session.
"""

__all__ = ["damage", "editing", "graph", "protobuf", "reading"]
