"""What the server takes of cupy, of the CUDA runtime on host memory: cupy itself holds NVIDIA's, and asks a driver."""
