// What is asked of the CUDA driver itself (libcuda), of the runtime on host memory.
#include <cstddef>

extern "C" {
int host_cuda_range(unsigned long long address, unsigned long long *base, size_t *size);

int cuMemGetAddressRange_v2(unsigned long long *base, size_t *size, unsigned long long address) {
    return host_cuda_range(address, base, size);
}
}
