"""Ensembles: models that consist of other models.

``plan`` decides which steps a request needs and when each may start. ``members`` finds the versions that answer the
steps. ``interface`` checks the steps against their members and derives the signature. ``route`` connects the steps to
their members and to the tensors that they read and write. ``run`` runs one request through the steps. ``turns`` orders
the requests of sequences, ``limits`` limits the requests of each step, and ``served_ensemble`` is the
version that answers.
"""

__all__ = ["interface", "members", "plan", "served_ensemble", "turns"]
