"""The Open Inference Protocol over gRPC: ``*_calls`` answer its calls, ``server`` owns the socket."""
