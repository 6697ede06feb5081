"""What an operator may set: the server's options and the keys of ``model.yaml``, declared once and frozen after start.

``model.py`` declares what can be said for one model, ``options.py`` the rest and the order of sources;
``expectation.py`` reads a declaration back in words for ``--help``, errors and the page that ``reference.py`` writes.
Nothing here knows what an option does.
"""

__all__ = [
    "expectation",
    "model",
    "option_groups",
    "options",
    "session",
    "tensors",
]
