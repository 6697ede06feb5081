"""``ortserve tune``: the options of a model that serve a load best on this machine."""
