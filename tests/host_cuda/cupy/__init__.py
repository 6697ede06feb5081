"""The part of cupy that the server uses, on a CUDA runtime on host memory; cupy itself needs NVIDIA's libraries."""
