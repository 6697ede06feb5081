"""Tests here run only with a CUDA runtime on host memory; ``tests/integration/test_host_cuda`` starts them."""

import os

collect_ignore_glob = [] if "HOST_CUDA_PACE" in os.environ else ["test_*.py"]
