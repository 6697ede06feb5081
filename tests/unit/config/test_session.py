"""The list of session entries, compared with ONNX Runtime's binaries: the installed, the GPU and a plug-in one."""

import mmap
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import onnxruntime
import pytest

from apart import UnavailableError, installed_apart
from gpu_package import GPU_VERSION
from ortserve.config.session import FILE_ENTRIES, SESSION_ENTRIES, check_session_entry
from plugin_provider import openvino_folder

OF_CUDA = {
    "ep.cuda.enable_gemm_auto_tune",
    "ep.cuda.fpa_intb_gemv_paired_k",
    "ep.cuda.fpa_intb_gemv_wave_aware",
    "ep.cuda.qmoe_int_dequant_max_scratch_bytes",
    "ep.cuda.qmoe_row_tile_size",
}
OF_OPENVINO = {"ep.share_ep_contexts", "ep.stop_share_ep_contexts"}
OF_ARM = {"mlas.enable_gemm_fastmath_arm64_bfloat16"}
"""Entries only in the package for aarch64, in which they were searched as well."""
SINCE_1_32 = {
    "ep.context_source_model_path",
    "ep.cpu.qmoe_deferred_scale",
    "ep.cuda.fpa_intb_dequant_gemm_min_m",
    "ep.cuda.matmul_nbits_m_chunk_size",
    "ep.cuda.moe_packed_gpu_experts",
    "ep.cuda.runtime_fusion.causal_conv_with_state",
    "ep.cuda.runtime_fusion.unit_swish",
    "ep.enable_weightless_ep_context_nodes",
    "ep.enable_weightless_mode",
    "session.kernel_dispatch_policy",
} | {entry for entry in SESSION_ENTRIES if entry.startswith(("session.external_data_loader.", "session.moe.offload."))}
"""Entries that the CPU package of ONNX Runtime 1.31 does not hold."""

NO_ENTRIES = {
    # Entries of a run.
    "memory.enable_memory_arena_shrinkage",
    # Changed while a session runs.
    "ep.dynamic.workload_type",
    # The form in which a plug-in receives its own options.
    "ep.openvinoexecutionprovider.hardware_device_type",
    # The spelling in packages of models; as session entries they have no effect, which was tried.
    "session.enable_cpu_mem_arena",
    "session.enable_mem_pattern",
    "session.enable_profiling",
    "session.execution_mode",
    "session.graph_optimization_level",
    "session.inter_op_num_threads",
    "session.intra_op_num_threads",
    "session.log_id",
    "session.log_severity_level",
    "session.log_verbosity_level",
    "session.optimized_model_filepath",
    "session.use_deterministic_compute",
    "session.use_per_session_threads",
}
LOOKS_LIKE_AN_ENTRY = re.compile(rb"\0((?:ep|memory|mlas|optimization|session)\.[a-z0-9_.]*[a-z0-9])(?=\0)")


def installed() -> Path:
    return Path(onnxruntime.__file__).parent / "capi"


def not_installed() -> set[str]:
    """The entries that the CPU package lacks on this machine."""
    is_old = onnxruntime.__version__.startswith("1.31.")
    return (SINCE_1_32 if is_old else set()) | (set() if platform.machine() == "aarch64" else OF_ARM)


def for_gpus() -> Path:
    package = f"onnxruntime-gpu=={GPU_VERSION}"
    pip = ("--no-deps", "--only-binary=:all:", "--timeout=15", "--retries=1")
    try:
        return installed_apart(package.replace("==", "-"), *pip, package) / "onnxruntime" / "capi"
    except UnavailableError as error:
        pytest.skip(f"ONNX Runtime's package for GPUs cannot be installed: {error}")


def openvino() -> Path:
    return openvino_folder() / "onnxruntime_ep_openvino"


@contextmanager
def contents(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        yield content


@pytest.mark.parametrize("libraries", [installed, for_gpus, openvino])
def test_entry_that_a_binary_holds_is_in_the_list(libraries: Callable[[], Path]) -> None:
    found: set[str] = set()
    for path in libraries().glob("*.so*"):
        with contents(path) as content:
            found |= {text.decode() for text in LOOKS_LIKE_AN_ENTRY.findall(content)}
    assert found
    assert found - SESSION_ENTRIES - NO_ENTRIES == set()
    assert not SESSION_ENTRIES & NO_ENTRIES


@pytest.mark.parametrize(
    ("libraries", "entries"),
    [
        (installed, SESSION_ENTRIES - OF_CUDA - OF_OPENVINO - not_installed()),
        (for_gpus, OF_CUDA),
        (openvino, OF_OPENVINO),
    ],
)
def test_entry_in_the_list_is_in_a_binary(libraries: Callable[[], Path], entries: set[str]) -> None:
    # The compiler builds the entry that exceeds its limit from pieces.
    pieces = {"session.model_external_initializers_file_folder_path": "external_initializers_file"}
    left = {pieces.get(entry, entry) for entry in entries}
    for path in libraries().glob("*.so*"):
        with contents(path) as content:
            left = {entry for entry in left if content.find(entry.encode()) < 0}
    assert left == set()


def test_entries_with_files_are_entries() -> None:
    assert FILE_ENTRIES < SESSION_ENTRIES


@pytest.mark.parametrize(
    "entry",
    [
        "ep.context_source_model_path",
        "ep.share_ep_contexts",
        "ep.stop_share_ep_contexts",
        # Writes post_layout_transform_step_1.onnx to the server's working folder.
        "session.debug_layout_transformation",
    ],
)
def test_entry_that_reaches_beyond_the_model_is_among_those_with_files(entry: str) -> None:
    assert entry in FILE_ENTRIES


def test_misspelt_entry_is_rejected_with_a_suggestion() -> None:
    assert check_session_entry("session.disable_prepacking") == "session.disable_prepacking"
    with pytest.raises(ValueError, match=r"did you mean 'session\.disable_prepacking'\?"):
        check_session_entry("session.disable_prepack")
