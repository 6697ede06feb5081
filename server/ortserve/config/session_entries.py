"""The entries of ONNX Runtime's session configuration.

ONNX Runtime takes any key and says nothing of those it does not know, so that a misspelt one would be believed to work;
hence this list, of ONNX Runtime 1.31.1, its package for GPUs and OpenVINO's plug-in 1.8.1.
"""

from typing import Final

from ortserve.config.suggestion import did_you_mean

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
