"""Options of ONNX Runtime: execution providers, session settings, and entries of the session configuration."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, Field, StringConstraints, WithJsonSchema

from ortserve.config.declaration import DECLARATION, did_you_mean

FILE_ENTRIES: Final = frozenset(
    {
        "ep.context_embed_mode",
        "ep.context_enable",
        "ep.context_file_path",
        "ep.context_model_external_initializers_file_name",
        "ep.context_source_model_path",
        "ep.share_ep_contexts",
        "ep.stop_share_ep_contexts",
        "session.collect_node_memory_stats_to_file",
        "session.debug_layout_transformation",
        "session.layer_assignment_settings",
        "session.model_external_initializers_file_folder_path",
        "session.moe.offload.budget_group",
        "session.moe.offload.derived_cache_dir",
        "session.moe.offload.popularity_file",
        "session.moe.offload.source_root",
        "session.moe_expert_counter_state_file",
        "session.node_partition_config_file",
        "session.optimized_model_external_initializers_file_name",
        "session.optimized_model_external_initializers_min_size_in_bytes",
        "session.resource_cuda_partitioning_settings",
        "session.save_external_prepacked_constant_initializers",
        "session.save_model_format",
    }
)
"""Entries that name files, write files, or share a provider's compiled contexts or memory with other models."""

# ONNX Runtime accepts any key and ignores unknown ones, so a misspelt entry would have no effect. These are the
# entries of ONNX Runtime 1.32.0, the GPU package 1.31.1 and OpenVINO's plug-in 1.8.1.
SESSION_ENTRIES: Final = FILE_ENTRIES | {
    "ep.cpu.qmoe_deferred_scale",
    "ep.cuda.enable_gemm_auto_tune",
    "ep.cuda.fpa_intb_dequant_gemm_min_m",
    "ep.cuda.fpa_intb_gemm",
    "ep.cuda.fpa_intb_gemv_paired_k",
    "ep.cuda.fpa_intb_gemv_wave_aware",
    "ep.cuda.fpa_intb_profile_m",
    "ep.cuda.gqa_workspace_max_total_sequence_length",
    "ep.cuda.matmul_nbits_m_chunk_size",
    "ep.cuda.moe_packed_gpu_experts",
    "ep.cuda.qmoe_int_dequant_max_scratch_bytes",
    "ep.cuda.qmoe_row_tile_size",
    "ep.cuda.runtime_fusion.causal_conv_with_state",
    "ep.cuda.runtime_fusion.unit_swish",
    "ep.enable_weightless",
    "ep.enable_weightless_ep_context_nodes",
    "ep.enable_weightless_mode",
    "mlas.disable_kleidiai",
    "mlas.enable_gemm_fastmath_arm64_bfloat16",
    "mlas.kleidiai.conv_igemm_max_work",
    "mlas.nchwc_depthwise_sliding",
    "mlas.nchwc_pointwise_conv_max_input_channel_batch",
    "mlas.qnbit.force_fp32",
    "mlas.use_lut_gemm",
    "optimization.constant_folding_max_output_size_in_bytes",
    "optimization.disable_specified_optimizers",
    "optimization.enable_cast_chain_elimination",
    "optimization.enable_gelu_approximation",
    "optimization.minimal_build_optimizations",
    "session.allow_released_opsets_only",
    "session.compile_only",
    "session.disable_aot_function_inlining",
    "session.disable_cpu_ep_fallback",
    "session.disable_double_qdq_remover",
    "session.disable_model_compile",
    "session.disable_prepacking",
    "session.disable_qdq_constant_folding",
    "session.disable_quant_qdq",
    "session.dynamic_block_base",
    "session.enable_dq_matmulnbits_fusion",
    "session.enable_moe_expert_counting",
    "session.enable_moe_expert_statistics",
    "session.enable_quant_qdq_cleanup",
    "session.enable_saved_runtime_optimizations",
    "session.external_data_loader.chunk_bytes",
    "session.external_data_loader.min_size_bytes",
    "session.external_data_loader.pinned_memory_bytes",
    "session.external_data_loader.threads",
    "session.fail_on_suboptimal_compiled_model",
    "session.force_spinning_stop",
    "session.function_expansion_byte_limit",
    "session.function_expansion_node_limit",
    "session.gqa_value_layout",
    "session.graph_optimizations_loop_level",
    "session.inter_op.allow_spinning",
    "session.inter_op.spin_backoff_max",
    "session.inter_op.spin_duration_us",
    "session.intra_op.allow_spinning",
    "session.intra_op.spin_backoff_max",
    "session.intra_op.spin_duration_us",
    "session.intra_op_thread_affinities",
    "session.kernel_dispatch_policy",
    "session.load_model_format",
    "session.max_shape_override",
    "session.moe.offload.allow_file_backing",
    "session.moe.offload.async_max_tokens",
    "session.moe.offload.cpu_execution",
    "session.moe.offload.cpu_threads",
    "session.moe.offload.device_expert_bytes",
    "session.moe.offload.device_working_bytes",
    "session.moe.offload.gpu_budget_bytes",
    "session.moe.offload.gpu_device_mem_limit",
    "session.moe.offload.host_expert_bytes",
    "session.moe.offload.host_working_bytes",
    "session.moe.offload.min_expert_weight",
    "session.moe.offload.mode",
    "session.moe.offload.node_overrides",
    "session.moe.offload.pinned_bytes",
    "session.moe.offload.placement",
    "session.moe.offload.prefill_wave_experts",
    "session.moe.offload.reserve_device_bytes",
    "session.moe.offload.skip_tail_cold_only",
    "session.moe.offload.skip_zero_cold_doorbell",
    "session.moe.offload.tail_substitution_min_rank",
    "session.moe.offload.tail_substitution_threshold",
    "session.moe_expert_counter_alpha",
    "session.moe_expert_counter_beta",
    "session.name_based_layer_assignment",
    "session.prepack.enable_parallel",
    "session.qdq_matmulnbits_accuracy_level",
    "session.qdq_matmulnbits_block_size",
    "session.qdqisint8allowed",
    "session.record_ep_graph_assignment_info",
    "session.set_denormal_as_zero",
    "session.strict_shape_type_inference",
    "session.strict_workspace_verification",
    "session.use_device_allocator_for_initializers",
    "session.use_env_allocators",
    "session.use_external_initializer_file_buffers_directly",
    "session.use_memory_mapped_ort_model",
    "session.use_ort_model_bytes_directly",
    "session.use_ort_model_bytes_for_initializers",
    "session.x64quantprecision",
}


def check_session_entry(key: str) -> str:
    """Return ``key``.

    Raises:
        ValueError: The entry is unknown; the message suggests a similar one.
    """
    if key not in SESSION_ENTRIES:
        raise ValueError(f"unknown entry: '{key}'{did_you_mean(key, SESSION_ENTRIES)}")
    return key


Scalar: TypeAlias = bool | int | float | str
"""A value of an ONNX Runtime option. ONNX Runtime expects texts: true is ``1``, false is ``0``."""

ProviderName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[\w.]+$")]
ProviderWish: TypeAlias = (
    ProviderName | Annotated[Mapping[ProviderName, Mapping[str, Scalar]], Field(min_length=1, max_length=1)]
)
"""An execution provider: its name, or ``{name: {option: value}}``."""

SessionEntry: TypeAlias = Annotated[
    str,
    AfterValidator(check_session_entry),
    WithJsonSchema({"type": "string", "enum": sorted(SESSION_ENTRIES)}),
]

GraphOptimization: TypeAlias = Literal["none", "basic", "extended", "layout", "all"]

EXTENSIONS: Final = "onnxruntime-extensions"
"""An operator library of this name is the library of the package ``onnxruntime-extensions``."""


class SessionSettings(BaseModel):
    """Settings of ONNX Runtime's sessions. The defaults suit a server."""

    model_config = DECLARATION

    graph_optimization: GraphOptimization = "all"
    """Level of graph optimization at load. A lower level loads faster, with results closer to the exporter's. External
    weights are read from the model's folder."""
    execution_mode: Literal["sequential", "parallel"] = "sequential"
    """``parallel`` runs independent branches of the graph concurrently, on ``inter_op_threads`` threads."""
    inter_op_threads: int = Field(default=1, ge=1, le=1024)
    """Threads for branches of the graph in the execution mode ``parallel``."""
    spinning: bool = False
    """Let idle threads of a session spin: runs start faster, but other work on the machine slows down."""
    memory_arena: bool = True
    """Keep freed memory for the next run. Off: memory is returned at once, and runs are slightly slower."""
    memory_pattern: bool | None = None
    """Plan the memory of a whole run, once per input shape. Unset: on if only the first axis of the inputs is free, or
    ``free_dimensions`` fixes all others. Otherwise every new length would add a plan that is kept until the model is
    unloaded."""
    shared_arena: bool = False
    """Use one host memory arena for all models with this setting instead of one per session. Saves memory if few models
    are busy at a time; concurrent runs wait for each other when they allocate."""
    shrink_arenas: tuple[Annotated[str, StringConstraints(pattern=r"^(cpu|gpu):\d+$")], ...] = Field(
        default=(), json_schema_extra={"expects": "list of arenas such as cpu:0"}
    )
    """Arenas, for example ``cpu:0`` or ``gpu:0``, that return unused memory after every run."""
    thread_affinities: str | None = Field(
        default=None, pattern=r"^\d+([,-]\d+)*(;\d+([,-]\d+)*)*$", json_schema_extra={"expects": "text such as 1,2;3-4"}
    )
    """Processors of each thread except the calling one, as groups separated by semicolons, counted from 1: ``1;2`` for
    ``intra_op_threads: 3``. The load fails if the server may use no processor of a group. Unset: the operating system
    places threads, which is better for several models."""
    dynamic_block_base: int | None = Field(default=None, ge=1, le=1024)
    """Divide the work of threads into blocks of decreasing size, with this base, for example 4. Run times vary less if
    other work shares the processors. Unset: equal blocks, which cost less."""
    denormal_as_zero: bool = False
    """Treat denormal numbers as 0. This is many times faster for models that produce them, and changes their results.
    It applies to CPU computation during runs of this model and while it is opened, but not to GPUs. The load fails if
    the setting cannot be limited to all threads of this model: with ``global_threads``, and on systems other than
    x86-64 or aarch64 with glibc."""
    free_dimensions: Mapping[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict, json_schema_extra={"expects": "{dimension: length, ...}"}
    )
    """Fixed lengths of named dimensions. The graph is optimized for them, and requests of other lengths are
    rejected."""
    free_dimensions_by_denotation: Mapping[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict, json_schema_extra={"expects": "{denotation: length, ...}"}
    )
    """Fixed lengths of dimensions by their denotation in the model, for example ``DATA_WIDTH``; case is ignored."""
    optimized_model_file: str | None = Field(
        default=None, pattern="^/", json_schema_extra={"expects": "absolute path of a file"}
    )
    """File to which the optimized graph is written when a version is opened; the latest version overwrites it. It can
    be inspected, or served with ``graph_optimization: none``, which loads faster but requires the same kind of machine,
    version of ONNX Runtime and execution providers. Inside the model's folder, this file does not count as a change of
    the model, nor do files of execution providers (``trt_engine_cache_path``, ``ep.context_enable``) or of
    ``session.collect_node_memory_stats_to_file``."""
    deterministic: bool = False
    """Prefer kernels that give the same result for the same input every time."""
    entries: Mapping[SessionEntry, Scalar] = Field(default_factory=dict)
    """Entries of ONNX Runtime's session configuration, for example ``session.set_denormal_as_zero: 1``, passed on
    unchanged. Unknown entries are rejected, because ONNX Runtime ignores them silently."""
    operator_libraries: tuple[str, ...] = ()
    """Shared libraries with custom operators. Relative paths are relative to the model's folder.
    ``onnxruntime-extensions`` names the library of that package, with tokenizers; install ``ortserve[extensions]``."""
    max_image_pixels: int = Field(default=2**26, ge=1, le=2**30)
    """Maximum width times height of an image that the model decodes; larger ones are rejected. Each decoded pixel takes
    3 bytes, and more in the model."""


def option_text(value: Scalar) -> str:
    """Convert a value to text for ONNX Runtime."""
    return str(int(value)) if isinstance(value, bool) else str(value)


_SHORT_NAMES: Final = ("cpu", "cuda", "tensorrt", "openvino")


def provider_parts(wish: ProviderWish) -> tuple[str, dict[str, str]]:
    """The name of an execution provider, and its options as texts. Short names, of any case, become lower case."""
    name, options = (wish, {}) if isinstance(wish, str) else next(iter(wish.items()))
    if name.lower() in _SHORT_NAMES:
        name = name.lower()
    return name, {option: option_text(value) for option, value in options.items()}
