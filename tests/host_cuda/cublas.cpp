// What of cuBLAS multiplies matrices, computed on the host on the stream of its handle. cuBLASLt can be opened.
#include <cuda_runtime_api.h>
#include <library_types.h>

#include <memory>
#include <utility>

namespace {

struct Handle {
    cudaStream_t stream = nullptr;
    int mode = 0;
};

struct Product {
    bool is_a_turned, is_b_turned;
    int m, n, k;
    float alpha, beta;
    const void *a;
    const void *b;
    void *c;
    int lda, ldb, ldc;
    bool is_half;

    float read(const void *matrix, size_t at) const {
        return is_half ? static_cast<float>(static_cast<const _Float16 *>(matrix)[at])
                       : static_cast<const float *>(matrix)[at];
    }

    void compute() const {
        for (int column = 0; column < n; column++)
            for (int row = 0; row < m; row++) {
                float sum = 0;
                for (int i = 0; i < k; i++) {
                    size_t at_a = is_a_turned ? size_t(row) * lda + i : size_t(i) * lda + row;
                    size_t at_b = is_b_turned ? size_t(i) * ldb + column : size_t(column) * ldb + i;
                    sum += read(a, at_a) * read(b, at_b);
                }
                size_t at = size_t(column) * ldc + row;
                float value = alpha * sum + (beta ? beta * read(c, at) : 0);
                if (is_half)
                    static_cast<_Float16 *>(c)[at] = static_cast<_Float16>(value);
                else
                    static_cast<float *>(c)[at] = value;
            }
    }
};

int status_of_next = 0;

int enqueue(void *handle, const Product &product) {
    if (int status = std::exchange(status_of_next, 0)) return status;
    auto *kept = new Product(product);  // for good: a graph may hold it
    return cudaLaunchHostFunc(static_cast<Handle *>(handle)->stream,
                              [](void *data) { static_cast<Product *>(data)->compute(); }, kept)
               ? 13
               : 0;
}

}  // namespace

extern "C" {

int cublasCreate_v2(void **handle) {
    *handle = new Handle();
    return 0;
}
int cublasDestroy_v2(void *handle) {
    delete static_cast<Handle *>(handle);
    return 0;
}
int cublasSetStream_v2(void *handle, cudaStream_t stream) {
    static_cast<Handle *>(handle)->stream = stream;
    return 0;
}
int cublasSetMathMode(void *handle, int mode) {
    static_cast<Handle *>(handle)->mode = mode;
    return 0;
}
int cublasGetMathMode(void *handle, int *mode) {
    *mode = static_cast<Handle *>(handle)->mode;
    return 0;
}
// The texts of cuBLAS 13.10. ONNX Runtime reports the second one.
const char *cublasGetStatusName(int status) {
    return status == 3 ? "CUBLAS_STATUS_ALLOC_FAILED" : status == 13 ? "CUBLAS_STATUS_EXECUTION_FAILED" : "CUBLAS_STATUS";
}
const char *cublasGetStatusString(int status) {
    return status == 3    ? "the resource allocation failed"
           : status == 13 ? "the function failed to launch on the GPU"
                          : "cuBLAS on the host";
}
// For tests: the next product fails with this status.
void host_cuda_fail_product(int status) { status_of_next = status; }
int cublasLtCreate(void **handle) { return cublasCreate_v2(handle); }
int cublasLtDestroy(void *handle) { return cublasDestroy_v2(handle); }

int cublasSgemm_v2(void *handle, int turn_a, int turn_b, int m, int n, int k, const float *alpha, const float *a,
                   int lda, const float *b, int ldb, const float *beta, float *c, int ldc) {
    return enqueue(handle, {turn_a != 0, turn_b != 0, m, n, k, *alpha, *beta, a, b, c, lda, ldb, ldc, false});
}
int cublasGemmEx(void *handle, int turn_a, int turn_b, int m, int n, int k, const void *alpha, const void *a,
                 cudaDataType kind_a, int lda, const void *b, cudaDataType, int ldb, const void *beta, void *c,
                 cudaDataType, int ldc, int computed_in, int) {
    bool is_half = kind_a == CUDA_R_16F;
    bool scales_are_half = computed_in == 64;  // CUBLAS_COMPUTE_16F
    auto scale = [&](const void *at) {
        return scales_are_half ? static_cast<float>(*static_cast<const _Float16 *>(at)) : *static_cast<const float *>(at);
    };
    return enqueue(handle, {turn_a != 0, turn_b != 0, m, n, k, scale(alpha), scale(beta), a, b, c, lda, ldb, ldc, is_half});
}
}
