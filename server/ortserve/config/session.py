"""Options of ONNX Runtime: execution providers, session settings, and entries of the session configuration."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema

from ortserve.config.expectation import did_you_mean

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
        "session.moe_expert_counter_state_file",
        "session.node_partition_config_file",
        "session.optimized_model_external_initializers_file_name",
        "session.optimized_model_external_initializers_min_size_in_bytes",
        "session.resource_cuda_partitioning_settings",
        "session.save_external_prepacked_constant_initializers",
        "session.save_model_format",
    }
)
"""Those that name files, have files written, or share what a provider has built with other models."""

SESSION_ENTRIES: Final = FILE_ENTRIES | {
    "ep.cuda.enable_gemm_auto_tune",
    "ep.cuda.fpa_intb_gemm",
    "ep.cuda.fpa_intb_gemv_paired_k",
    "ep.cuda.fpa_intb_gemv_wave_aware",
    "ep.cuda.fpa_intb_profile_m",
    "ep.cuda.gqa_workspace_max_total_sequence_length",
    "ep.cuda.matmul_nbits_m_chunk_size",
    "ep.cuda.qmoe_int_dequant_max_scratch_bytes",
    "ep.cuda.qmoe_row_tile_size",
    "ep.enable_weightless",
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
    "session.load_model_format",
    "session.max_shape_override",
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
    """Return the key.

    Raises:
        ValueError: There is no such entry; the text names the one that was probably meant.
    """
    if key not in SESSION_ENTRIES:
        raise ValueError(f"no such entry: '{key}'{did_you_mean(key, SESSION_ENTRIES)}")
    return key


Scalar: TypeAlias = bool | int | float | str
"""A value of ONNX Runtime's options, all of which are texts to it: true is ``1``, false ``0``."""

ProviderName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[\w.]+$")]
ProviderWish: TypeAlias = (
    ProviderName | Annotated[Mapping[ProviderName, Mapping[str, Scalar]], Field(min_length=1, max_length=1)]
)
"""An execution provider by name, or ``{name: {option: value}}``."""

SessionEntry: TypeAlias = Annotated[
    str,
    AfterValidator(check_session_entry),
    WithJsonSchema({"type": "string", "enum": sorted(SESSION_ENTRIES)}),
]

GraphOptimization: TypeAlias = Literal["none", "basic", "extended", "layout", "all"]


class SessionSettings(BaseModel):
    """Settings of ONNX Runtime's sessions; the defaults are those that suit a server."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    graph_optimization: GraphOptimization = "all"
    """How far the graph is rewritten at load. Less makes loading faster and results closer to the exporter's.
    Weights in files of their own are read from beside the model's."""
    execution_mode: Literal["sequential", "parallel"] = "sequential"
    """``parallel`` runs independent branches of the graph at the same time, on ``inter_op_threads`` threads."""
    inter_op_threads: int = Field(default=1, ge=1, le=1024)
    """Threads for branches of the graph, in the execution mode ``parallel``."""
    spinning: bool = False
    """Let idle threads of a session wait in a busy loop: quicker to start, at the cost of whatever else runs there."""
    memory_arena: bool = True
    """Keep freed memory for the next run. Without it memory goes back at once, and runs are a little slower."""
    memory_pattern: bool | None = None
    """Plan the memory of a whole run, once for each shape of its inputs. Unset: where the first axis of inputs alone is
    free, or every other one has its length from ``free_dimensions``. Elsewhere there would be a plan for each length
    that ever came, seldom used again and kept until the model is unloaded."""
    shared_arena: bool = False
    """Take host memory from one arena that all models with this setting share, instead of one each: less memory where
    many models are seldom busy at the same time, but runs then wait for each other where they allocate."""
    shrink_arenas: tuple[Annotated[str, StringConstraints(pattern=r"^(cpu|gpu):\d+$")], ...] = Field(
        default=(), json_schema_extra={"expects": "list of arenas such as cpu:0"}
    )
    """Arenas, such as ``cpu:0`` or ``gpu:0``, that give back what they do not need after every run."""
    thread_affinities: str | None = Field(
        default=None, pattern=r"^\d+([,-]\d+)*(;\d+([,-]\d+)*)*$", json_schema_extra={"expects": "text such as 1,2;3-4"}
    )
    """Processors for each thread but the calling one, groups separated by semicolons, counted from 1: ``1;2`` for
    ``intra_op_threads: 3``. Unset: the system places threads, which serves several models better."""
    dynamic_block_base: int | None = Field(default=None, ge=1, le=1024)
    """Cut work for threads into ever smaller blocks, such as 4: steadier times where processors are shared with others.
    Unset: equal blocks, which cost less to hand out."""
    denormal_as_zero: bool = False
    """Take numbers too small to be normal as 0, which is many times faster for models that have them, and changes their
    results: in what runs of this model compute on processors, and in what ONNX Runtime computes of it while it is
    opened; not in what GPUs compute. Refused where it could not be so in all threads of a run and in no other model's:
    with ``global_threads``, and on machines other than x86-64 and aarch64 with glibc."""
    free_dimensions: Mapping[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict, json_schema_extra={"expects": "{dimension: length, ...}"}
    )
    """Lengths of dimensions that the model only names, so that its graph is rewritten for them; requests of any other
    length are refused."""
    free_dimensions_by_denotation: Mapping[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict, json_schema_extra={"expects": "{denotation: length, ...}"}
    )
    """The same by what the model says that a dimension is for, such as ``DATA_WIDTH``, in capitals or not."""
    optimized_model_file: str | None = Field(
        default=None, pattern="^/", json_schema_extra={"expects": "absolute path of a file"}
    )
    """File to keep the rewritten graph in, of the version that was opened last: for a look at it, or to be served with
    ``graph_optimization: none``, which loads faster, but only on this kind of machine with this version of ONNX Runtime
    and these execution providers. Within the model's folder it is no change of the model, nor is what execution
    providers keep there by their options (``trt_engine_cache_path``) or by ``ep.context_enable``, nor what is written
    there by ``session.collect_node_memory_stats_to_file``."""
    deterministic: bool = False
    """Choose kernels that give the same result for the same input every time, where there are such."""
    entries: Mapping[SessionEntry, Scalar] = Field(default_factory=dict)
    """Entries of ONNX Runtime's session configuration, such as ``session.set_denormal_as_zero: 1``, handed on as they
    are. One that ONNX Runtime does not know is refused here, because it would not say so itself."""
    operator_libraries: tuple[str, ...] = ()
    """Shared libraries with operators of the model's own. A path that is not absolute is one in the model's folder."""


def option_text(value: Scalar) -> str:
    """A value as ONNX Runtime takes it."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def provider_parts(wish: ProviderWish) -> tuple[str, dict[str, str]]:
    """The name of a provider, and its options as texts."""
    if isinstance(wish, str):
        return wish, {}
    ((name, options),) = wish.items()
    return name, {option: option_text(value) for option, value in options.items()}
