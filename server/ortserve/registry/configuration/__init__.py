"""The configuration of a model: ``model.yaml``, ``config.pbtxt`` or a client's JSON become the same options."""

__all__ = ["configuration"]
