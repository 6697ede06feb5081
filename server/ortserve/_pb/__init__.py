"""Generated protobuf messages of the protocol. Made by ``protos/generate.py``; change the protos, not these files.

Only ``private_pool.py`` and this file are written by hand.
"""
