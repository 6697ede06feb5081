"""The Open Inference Protocol over gRPC: ``servicer`` answers its calls, ``server`` owns the socket."""
