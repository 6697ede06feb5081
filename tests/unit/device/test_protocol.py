"""The meaning of errors of CUDA and ONNX Runtime, with their original texts."""

import pytest

from ortserve.device.protocol import device_run_error
from ortserve.errors import DeviceLostError, ErrorKind, OutOfMemoryError, ServeError


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=x ; expr=...", DeviceLostError),
        ("cudaErrorIllegalAddress: an illegal memory access was encountered", DeviceLostError),
        ("cudaErrorLaunchFailure: unspecified launch failure", DeviceLostError),
        ("CUDA failure 719: unspecified launch failure", DeviceLostError),
        ("CUDA failure 226: contained", DeviceLostError),
        ("cudaErrorContained: contained", DeviceLostError),
        ("cudaErrorTensorMemoryLeak: tensor memory", DeviceLostError),
        ("cudaErrorECCUncorrectable: uncorrectable ECC error encountered", DeviceLostError),
        ("CUDA failure 999: unknown error", DeviceLostError),
        ("BFCArena: Failed to allocate memory for requested buffer of size 1073741824", OutOfMemoryError),
        ("Available memory of 1024 is smaller than requested bytes of 2048", OutOfMemoryError),
        ("CUDA failure 2: out of memory ; GPU=0", OutOfMemoryError),
        ("cudaErrorMemoryAllocation: out of memory", OutOfMemoryError),
        # cuBLAS 13.10, cuDNN 9.28
        ("CUBLAS failure 3: the resource allocation failed ; GPU=0", OutOfMemoryError),
        ("cublasLtMatmul failed: CUBLAS_STATUS_ALLOC_FAILED", OutOfMemoryError),
        ("CUBLAS failure 13: the function failed to launch on the GPU ; GPU=0", ServeError),
        ("CUDNN failure 4003: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED ; GPU=0", OutOfMemoryError),
        ("CUDNN failure 4004: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED ; GPU=0", OutOfMemoryError),
        ("CUDNN failure 5000: CUDNN_STATUS_EXECUTION_FAILED ; GPU=0", ServeError),
        ("CUFFT failure 2: CUFFT_ALLOC_FAILED ; GPU=0", OutOfMemoryError),
        ("CUDA failure 900: operation not permitted when stream is capturing", ServeError),
        ("CUDA failure 1: invalid argument", ServeError),
        ("indices element out of data bounds, idx=99 must be within the inclusive range [-16,15]", ServeError),
        ("This is about 700 rows", ServeError),
    ],
)
def test_error_is_classified_by_its_text(text: str, kind: type[ServeError]) -> None:
    failure = device_run_error(RuntimeError(text), "cuda:0")
    assert type(failure) is kind
    assert text.partition(" ; GPU=")[0] in failure.message  # the host is not shown


def test_a_lost_device_is_not_ready_and_a_bad_batch_is_internal() -> None:
    assert device_run_error(RuntimeError("CUDA failure 700"), "cuda:0").kind is ErrorKind.NOT_READY
    assert device_run_error(RuntimeError("out of memory"), "cuda:0").kind is ErrorKind.INTERNAL
    assert device_run_error(RuntimeError("x"), "cuda:0").kind is ErrorKind.INTERNAL


def test_paths_are_removed_from_errors() -> None:
    assert "/home" not in device_run_error(RuntimeError("/home/x/model.onnx: CUDA failure 700"), "cuda:0").message
