"""Failed runs that their inputs cause: real models that reject inputs, and texts of real failures."""

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
import pytest
from onnx import GraphProto, NodeProto, TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from ortserve.engine.ort_errors import run_error
from ortserve.errors import ErrorKind, ModelRejectionError

TABLE = helper.make_tensor("table", TensorProto.FLOAT, [3], [0.0, 1.0, 2.0])
GATHER = helper.make_node("Gather", ["table", "x"], ["y"], name="lookup")


def model(nodes: Sequence[NodeProto], x: int, *constants: TensorProto) -> bytes:
    inputs = [helper.make_tensor_value_info("x", x, ["n"])]
    outputs = [helper.make_empty_tensor_value_info("y")]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, [TABLE, *constants])
    return bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )


def body(*, is_loop: bool) -> GraphProto:
    values = helper.make_tensor_value_info
    state = [values("goes_on", TensorProto.BOOL, [])] if is_loop else []
    taken = [values("step", TensorProto.INT64, []), values("went_on", TensorProto.BOOL, [])] if is_loop else []
    copy = [helper.make_node("Identity", ["went_on"], ["goes_on"])] if is_loop else []
    inner = helper.make_node("Gather", ["table", "x"], ["found"], name="inner")
    return helper.make_graph([inner, *copy], "body", taken, [*state, values("found", TensorProto.FLOAT, None)])


def scan_body() -> GraphProto:
    inner = helper.make_node("Gather", ["table", "one"], ["found"], name="inner")
    values = helper.make_tensor_value_info
    return helper.make_graph(
        [inner], "body", [values("one", TensorProto.INT64, [])], [values("found", TensorProto.FLOAT, [])]
    )


TWICE = helper.make_tensor("twice", TensorProto.INT64, [], [2])
THREES = helper.make_tensor("threes", TensorProto.INT64, [2], [-1, 3])
NINE = np.array([9])


@pytest.mark.parametrize(
    ("content", "x", "node"),
    [
        (model([GATHER], TensorProto.INT64), NINE, "Gather 'lookup'"),  # INVALID_ARGUMENT
        (model([GATHER], TensorProto.INT64), np.array([[1]]), ""),  # rejected before any node
        (
            model([helper.make_node("Reshape", ["x", "threes"], ["y"])], TensorProto.FLOAT, THREES),
            np.ones(5, np.float32),
            "Reshape",  # FAIL
        ),
        (
            model([helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)], TensorProto.STRING),
            np.array(["one"], object),
            "Cast",  # RUNTIME_EXCEPTION
        ),
        (
            model(
                [
                    helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
                    helper.make_node("Cast", ["most"], ["yes"], to=TensorProto.BOOL),
                    helper.make_node(
                        "If", ["yes"], ["y"], then_branch=body(is_loop=False), else_branch=body(is_loop=False)
                    ),
                ],
                TensorProto.INT64,
            ),
            NINE,
            "Gather 'inner'",
        ),
        (
            model([helper.make_node("Loop", ["twice", ""], ["y"], body=body(is_loop=True))], TensorProto.INT64, TWICE),
            NINE,
            "Gather 'inner'",
        ),
        (
            model([helper.make_node("Scan", ["x"], ["y"], body=scan_body(), num_scan_inputs=1)], TensorProto.INT64),
            NINE,
            "Gather 'inner'",
        ),
    ],
    ids=["value", "rank", "failed assertion", "exception", "If", "Loop", "Scan"],
)
def test_rejected_inputs_are_client_errors_that_name_the_node(content: bytes, x: np.ndarray, node: str) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    with pytest.raises(Exception, match="ONNXRuntimeError") as caught:
        session.run(None, {"x": x})
    error = run_error(caught.value)
    assert isinstance(error, ModelRejectionError)
    assert error.kind is ErrorKind.REJECTED_BY_MODEL
    assert error.message.startswith("the model rejected the inputs: [ONNXRuntimeError] : ")
    assert error.node == node


def test_rejection_of_a_run_on_a_binding_names_the_node() -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model([GATHER], TensorProto.INT64), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_cpu_input("x", NINE)
    binding.bind_output("y")
    with pytest.raises(RuntimeError) as caught:
        session.run_with_iobinding(binding)
    error = run_error(caught.value)
    assert isinstance(error, ModelRejectionError)
    assert error.node == "Gather 'lookup'"


NODE = "Non-zero status code returned while running Expand node. Name:'' Status Message: "


NO_CUDNN = (
    "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Non-zero status code returned while running Conv node. Name:'' Status "
    "Message: /onnxruntime_src/onnxruntime/core/providers/cuda/cuda_kernel.h:296 static cudnnContext* "
    "onnxruntime::cuda::CudaKernel::RequireCudnnHandle(cudnnHandle_t) [ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : cuDNN "
    "is unavailable or disabled for CUDA Execution Provider: dlopen failed for libcudnn.so: libcudnn.so: cannot open "
    "shared object file: No such file or directory\n"
)


def test_missing_cudnn_is_named() -> None:
    message = run_error(ort_errors.NotImplemented(NO_CUDNN)).message
    assert message.startswith("ONNX Runtime failed to run the model: ")
    assert "cuDNN is unavailable or disabled for CUDA Execution Provider: dlopen failed for libcudnn.so: " in message
    assert ".h:296" not in message


@pytest.mark.parametrize(
    "error",
    [
        ort_errors.NotImplemented(NO_CUDNN),
        ort_errors.Fail(f"{NODE}bfc_arena.cc:360 Failed to allocate memory for requested buffer of size 4398046511104"),
        ort_errors.RuntimeException(f"{NODE}std::bad_alloc"),
        ort_errors.Fail(f"{NODE}CUDA failure 9: invalid configuration argument"),
        ort_errors.Fail(f"{NODE}CUDNN failure 8: CUDNN_STATUS_EXECUTION_FAILED"),
        ort_errors.Fail(f"{NODE}CUBLAS failure 13: the GPU program failed to execute"),
        ort_errors.EPFail(f"{NODE}TensorRT EP execution context enqueue failed."),
        ort_errors.Fail(f"{NODE}Exiting due to terminate flag being set to true."),
        ort_errors.Fail("Exiting due to terminate flag being set to true."),
        ort_errors.RuntimeException("Non-zero status code: a node was not named"),
        RuntimeError(f"Error in execution: {NODE}CUDA failure 9: invalid configuration argument"),
        RuntimeError("Error in execution: Exiting due to terminate flag being set to true."),
        RuntimeError("Numpy_type 260 can't be converted to MLDataType."),
        ValueError("could not broadcast input array"),
    ],
    ids=str,
)
def test_memory_device_and_server_failures_are_internal(error: Exception) -> None:
    failure = run_error(error)
    assert not isinstance(failure, ModelRejectionError)
    assert failure.kind is ErrorKind.INTERNAL


def test_long_names_of_nodes_are_cut() -> None:
    error = run_error(ort_errors.InvalidArgument(NODE.replace("''", f"'{'a' * 1000}'")))
    assert isinstance(error, ModelRejectionError)
    assert len(error.node) < 150


def test_quoted_text_of_a_kernel_is_not_read_as_a_node() -> None:
    quoted = NODE.replace("''", "'forged'")
    error = run_error(ort_errors.Fail(f"[ONNXRuntimeError] : 1 : FAIL : {NODE}no category {quoted}"))
    assert isinstance(error, ModelRejectionError)
    assert error.node == "Expand"
    assert run_error(ort_errors.Fail(f"cannot parse {quoted}")).kind is ErrorKind.INTERNAL
