"""Ensembles: models that consist of other models.

``plan`` decides which steps a request needs and when each may start, ``members`` finds the models of the steps,
``interface`` checks them and makes the signature, ``route`` connects the steps to their members and says what each
reads and writes, ``run`` carries one request through them, ``turns`` keeps the order of sequences, ``limits`` bounds
the requests of each step, and ``served`` is the version that answers.
"""

__all__ = ["interface", "members", "plan", "served", "turns"]
