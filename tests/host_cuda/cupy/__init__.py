"""The part of cupy that the server uses, on a CUDA runtime of host memory: cupy needs NVIDIA's runtime and driver."""
