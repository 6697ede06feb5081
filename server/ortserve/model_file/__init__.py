"""Reads a model file once, without the package ``onnx`` and without its weights, into one record for all analyses.

``protobuf`` reads and writes the wire format, ``graph`` is the record, ``tensors`` reads constants, ``reading`` creates
the record of a file, ``damage`` finds damaged files, and ``editing`` writes models and replaces nodes for a session.
"""

__all__ = ["damage", "editing", "graph", "reading"]
