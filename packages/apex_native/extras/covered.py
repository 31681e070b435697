"""Names of Apex that apex_native covers; docs/reference/apex_names.md has the same list."""

# For each module of Apex: the modules of apex_native that have its names, and these names. A script
# gets a name from the last of them that has it.
COVERED: dict[str, dict[str, str]] = {
    "amp_C": {
        "extras.multi_tensor": "multi_tensor_axpby multi_tensor_l2norm multi_tensor_scale",
        "extras.multi_tensor_optimizers": "multi_tensor_adagrad multi_tensor_adam "
        "multi_tensor_lamb multi_tensor_novograd multi_tensor_sgd",
    },
    "apex_C": {"extras.flat": "flatten unflatten"},
    "apex.amp": {
        "amp": "initialize scale_loss master_params state_dict load_state_dict disable_casts "
        "half_function bfloat16_function float_function promote_function register_half_function "
        "register_bfloat16_function register_float_function register_promote_function _amp_state",
        "extras.old_amp": "init",
    },
    "apex.amp._amp_state": {"amp.state": "_amp_state master_params"},
    "apex.amp.amp": {
        "amp": "initialize master_params state_dict load_state_dict half_function "
        "bfloat16_function float_function promote_function register_half_function "
        "register_bfloat16_function register_float_function register_promote_function",
        "extras.old_amp": "init",
    },
    "apex.amp.frontend": {"amp": "initialize state_dict load_state_dict"},
    "apex.amp.handle": {"amp": "scale_loss disable_casts"},
    "apex.amp.lists": {},
    "apex.amp.lists.functional_overrides": {"extras.cast_lists": "FP16_FUNCS FP32_FUNCS MODULE"},
    "apex.amp.opt": {"extras.old_amp": "OptimWrapper"},
    "apex.contrib": {},
    "apex.contrib.clip_grad": {"extras.losses": "clip_grad_norm_"},
    "apex.contrib.clip_grad.clip_grad": {"extras.losses": "clip_grad_norm_"},
    "apex.contrib.focal_loss": {"extras.losses": "focal_loss"},
    "apex.contrib.focal_loss.focal_loss": {"extras.losses": "FocalLoss focal_loss"},
    "apex.contrib.group_norm": {"extras.group_norm": "GroupNorm"},
    "apex.contrib.group_norm.group_norm": {"extras.group_norm": "GroupNorm"},
    "apex.contrib.layer_norm": {"extras.layers": "FastLayerNorm"},
    "apex.contrib.layer_norm.layer_norm": {"extras.layers": "FastLayerNorm"},
    "apex.contrib.multihead_attn": {
        "extras.attention": "EncdecMultiheadAttn SelfMultiheadAttn fast_mask_softmax_dropout_func",
    },
    "apex.contrib.multihead_attn.encdec_multihead_attn": {
        "extras.attention": "EncdecMultiheadAttn",
    },
    "apex.contrib.multihead_attn.mask_softmax_dropout_func": {
        "extras.attention": "fast_mask_softmax_dropout_func",
    },
    "apex.contrib.multihead_attn.self_multihead_attn": {"extras.attention": "SelfMultiheadAttn"},
    "apex.contrib.optimizers": {
        "extras.fused_fp16_optimizer": "FP16_Optimizer",
        "extras.contrib_adam": "FusedAdam",
    },
    "apex.contrib.optimizers.distributed_fused_adam": {
        "extras.distributed_optimizers": "DistributedFusedAdam",
    },
    "apex.contrib.optimizers.distributed_fused_lamb": {
        "extras.distributed_optimizers": "DistributedFusedLAMB",
    },
    "apex.contrib.optimizers.fp16_optimizer": {"extras.fused_fp16_optimizer": "FP16_Optimizer"},
    "apex.contrib.optimizers.fused_adam": {"extras.contrib_adam": "FusedAdam"},
    "apex.contrib.xentropy": {"extras.losses": "SoftmaxCrossEntropyLoss"},
    "apex.contrib.xentropy.softmax_xentropy": {"extras.losses": "SoftmaxCrossEntropyLoss"},
    "apex.fp16_utils": {
        "compat": "BN_convert_float clip_grad_norm convert_network master_params_to_model_params "
        "model_grads_to_master_grads network_to_half prep_param_lists to_python_float tofp16",
        "extras.fp16_optimizer": "FP16Model FP16_Optimizer convert_module",
        "extras.loss_scaler": "DynamicLossScaler LossScaler",
    },
    "apex.fp16_utils.fp16_optimizer": {"extras.fp16_optimizer": "FP16_Optimizer"},
    "apex.fp16_utils.fp16util": {
        "compat": "BN_convert_float clip_grad_norm convert_network master_params_to_model_params "
        "model_grads_to_master_grads network_to_half prep_param_lists to_python_float tofp16",
        "extras.fp16_optimizer": "FP16Model convert_module",
    },
    "apex.fp16_utils.loss_scaler": {"extras.loss_scaler": "DynamicLossScaler LossScaler"},
    "apex.fused_dense": {"extras.layers": "FusedDense FusedDenseGeluDense"},
    "apex.fused_dense.fused_dense": {"extras.layers": "FusedDense FusedDenseGeluDense"},
    "apex.mlp": {"extras.layers": "MLP"},
    "apex.mlp.mlp": {"extras.layers": "MLP"},
    "apex.multi_tensor_apply": {"extras.multi_tensor": "MultiTensorApply multi_tensor_applier"},
    "apex.multi_tensor_apply.multi_tensor_apply": {"extras.multi_tensor": "MultiTensorApply"},
    "apex.normalization": {
        "normalization": "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm",
    },
    "apex.normalization.fused_layer_norm": {
        "normalization": "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm",
        "extras.norm_functions": "FusedLayerNormAffineFunction "
        "FusedLayerNormAffineMixedDtypesFunction FusedLayerNormFunction FusedRMSNormAffineFunction "
        "FusedRMSNormAffineMixedDtypesFunction FusedRMSNormFunction "
        "fused_layer_norm fused_layer_norm_affine fused_rms_norm "
        "fused_rms_norm_affine manual_rms_norm mixed_dtype_fused_layer_norm_affine "
        "mixed_dtype_fused_rms_norm_affine",
    },
    "apex.optimizers": {
        "optimizers": "FusedAdagrad FusedAdam FusedLAMB FusedNovoGrad FusedSGD",
        "extras.old_adam": "FusedAdam",
        "extras.fused_fp16_optimizer": "FP16_Optimizer",
        "extras.mixed_precision_lamb": "FusedMixedPrecisionLamb",
    },
    "apex.optimizers.fp16_optimizer": {"extras.fused_fp16_optimizer": "FP16_Optimizer"},
    "apex.optimizers.fused_adagrad": {"optimizers": "FusedAdagrad"},
    "apex.optimizers.fused_adam": {"optimizers": "FusedAdam", "extras.old_adam": "FusedAdam"},
    "apex.optimizers.fused_lamb": {"optimizers": "FusedLAMB"},
    "apex.optimizers.fused_mixed_precision_lamb": {
        "extras.mixed_precision_lamb": "FusedMixedPrecisionLamb",
    },
    "apex.optimizers.fused_novograd": {"optimizers": "FusedNovoGrad"},
    "apex.optimizers.fused_sgd": {"optimizers": "FusedSGD"},
    "apex.parallel": {
        "parallel": "DistributedDataParallel Reducer SyncBatchNorm convert_syncbn_model "
        "create_syncbn_process_group",
    },
    "apex.parallel.LARC": {"parallel.LARC": "LARC"},
    "apex.parallel.distributed": {
        "parallel.distributed": "DistributedDataParallel Reducer",
        "extras.flat": "apply_flat_dist_call flat_dist_call flatten split_by_type unflatten",
    },
    "apex.parallel.optimized_sync_batchnorm": {"parallel": "SyncBatchNorm"},
    "apex.parallel.sync_batchnorm": {"parallel": "SyncBatchNorm"},
    "apex.transformer": {"extras.transformer_enums": "AttnMaskType AttnType LayerType"},
    "apex.transformer.amp": {"extras.transformer_layers": "GradScaler"},
    "apex.transformer.amp.grad_scaler": {"extras.transformer_layers": "GradScaler"},
    "apex.transformer.enums": {
        "extras.transformer_enums": "AttnMaskType AttnType LayerType ModelType",
    },
    "apex.transformer.functional": {"extras.fused_softmax": "FusedScaleMaskSoftmax"},
    "apex.transformer.functional.fused_softmax": {
        "extras.fused_softmax": "FusedScaleMaskSoftmax GenericFusedScaleMaskSoftmax "
        "generic_scaled_masked_softmax scaled_masked_softmax scaled_upper_triang_masked_softmax",
    },
    "apex.transformer.layers": {
        "extras.transformer_layers": "FastLayerNorm FusedLayerNorm MixedFusedLayerNorm",
    },
    "apex.transformer.layers.layer_norm": {
        "extras.transformer_layers": "FastLayerNorm FusedLayerNorm MixedFusedLayerNorm",
    },
    "apex.transformer.microbatches": {
        "extras.transformer_microbatches": "ConstantNumMicroBatches NumMicroBatchesCalculator "
        "RampupBatchsizeNumMicroBatches build_num_microbatches_calculator",
    },
    "apex.transformer.parallel_state": {
        "extras.transformer_parallel_state": "destroy_model_parallel get_data_parallel_group "
        "get_data_parallel_rank get_data_parallel_src_rank get_data_parallel_world_size "
        "get_model_parallel_group get_pipeline_model_parallel_group "
        "get_pipeline_model_parallel_rank get_pipeline_model_parallel_split_rank "
        "get_pipeline_model_parallel_world_size get_rank_info get_tensor_model_parallel_group "
        "get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank "
        "get_tensor_model_parallel_world_size get_virtual_pipeline_model_parallel_rank "
        "get_virtual_pipeline_model_parallel_world_size initialize_model_parallel "
        "is_pipeline_first_stage is_pipeline_last_stage is_pipeline_stage_after_split "
        "is_pipeline_stage_before_split is_unitialized model_parallel_is_initialized",
    },
    "apex.transformer.pipeline_parallel": {},
    "apex.transformer.pipeline_parallel.utils": {
        "extras.transformer_microbatches": "get_current_global_batch_size get_kth_microbatch "
        "get_micro_batch_size get_num_microbatches is_last_rank listify_model "
        "param_is_not_shared print_rank_0 print_rank_last setup_microbatch_calculator "
        "unwrap_model update_num_microbatches",
    },
}
