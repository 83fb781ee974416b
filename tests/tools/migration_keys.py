"""Keys, arguments and flags that the pages, examples and configurations of other libraries name."""

TRL = """
output_dir overwrite_output_dir do_train do_eval do_predict eval_strategy prediction_loss_only
per_device_train_batch_size per_device_eval_batch_size per_gpu_train_batch_size per_gpu_eval_batch_size
gradient_accumulation_steps eval_accumulation_steps eval_delay torch_empty_cache_steps learning_rate weight_decay
adam_beta1 adam_beta2 adam_epsilon max_grad_norm num_train_epochs max_steps lr_scheduler_type lr_scheduler_kwargs
warmup_ratio warmup_steps log_level log_level_replica log_on_each_node logging_dir logging_strategy logging_first_step
logging_steps logging_nan_inf_filter save_strategy save_steps save_total_limit save_safetensors save_on_each_node
save_only_model restore_callback_states_from_checkpoint no_cuda use_cpu use_mps_device seed data_seed jit_mode_eval
use_ipex bf16 fp16 fp16_opt_level half_precision_backend bf16_full_eval fp16_full_eval tf32 local_rank ddp_backend
tpu_num_cores tpu_metrics_debug debug dataloader_drop_last eval_steps dataloader_num_workers dataloader_prefetch_factor
past_index run_name disable_tqdm remove_unused_columns label_names load_best_model_at_end metric_for_best_model
greater_is_better ignore_data_skip fsdp fsdp_min_num_params fsdp_config tp_size fsdp_transformer_layer_cls_to_wrap
accelerator_config deepspeed label_smoothing_factor optim optim_args adafactor group_by_length length_column_name
report_to ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers dataloader_pin_memory
dataloader_persistent_workers skip_memory_metrics use_legacy_prediction_loop push_to_hub resume_from_checkpoint
hub_model_id hub_strategy hub_token hub_private_repo hub_always_push gradient_checkpointing
gradient_checkpointing_kwargs include_inputs_for_metrics include_for_metrics eval_do_concat_batches fp16_backend
evaluation_strategy push_to_hub_model_id push_to_hub_organization push_to_hub_token mp_parameters auto_find_batch_size
full_determinism torchdynamo ray_scope ddp_timeout torch_compile torch_compile_backend torch_compile_mode
dispatch_batches split_batches include_tokens_per_second include_num_input_tokens_seen neftune_noise_alpha
optim_target_modules batch_eval_metrics eval_on_start use_liger_kernel eval_use_gather_object
average_tokens_across_devices model_init_kwargs max_prompt_length num_generations max_completion_length
ds3_gather_for_generation temperature top_p top_k min_p repetition_penalty cache_implementation use_vllm
vllm_server_host vllm_server_port vllm_server_timeout vllm_guided_decoding_regex beta num_iterations epsilon
epsilon_high reward_weights scale_rewards sync_ref_model ref_model_mixup_alpha ref_model_sync_steps log_completions
vllm_device vllm_gpu_memory_utilization vllm_dtype vllm_max_model_len vllm_enable_prefix_caching
model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes callbacks optimizers
peft_config model_name dataset_name tags
config_file num_processes num_machines main_process_ip machine_rank rdzv_backend server_ip tensor_parallel_size
"""

_DATA = """
tokenizer train_files val_files prompt_key max_prompt_length max_response_length train_batch_size return_raw_input_ids
return_raw_chat return_full_prompt shuffle filter_overlong_prompts filter_overlong_prompts_workers truncation image_key
trust_remote_code custom_cls.path custom_cls.name path response_key data_source_key reward_model_key
"""
_MODEL = """
path external_lib external_libs override_config.model_config override_config.moe_config.freeze_moe_router
enable_gradient_checkpointing enable_activation_offload trust_remote_code use_remove_padding
"""
_ACTOR = """
strategy ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu
grad_clip clip_ratio entropy_coeff use_kl_loss use_torch_compile kl_loss_coef kl_loss_type ppo_epochs data_loader_seed
shuffle ulysses_sequence_parallel_size optim.lr optim.lr_warmup_steps optim.lr_warmup_steps_ratio optim.min_lr_ratio
optim.num_cycles optim.warmup_style optim.total_training_steps fsdp_config.wrap_policy.min_num_params
fsdp_config.wrap_policy.transformer_layer_cls_to_wrap fsdp_config.param_offload fsdp_config.optimizer_offload
fsdp_config.fsdp_size checkpoint.save_contents checkpoint.load_contents
"""
_REF = """
fsdp_config.param_offload fsdp_config.wrap_policy.min_num_params log_prob_micro_batch_size
log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu ulysses_sequence_parallel_size
"""
_ROLLOUT = """
name temperature top_k top_p prompt_length response_length dtype gpu_memory_utilization ignore_eos enforce_eager
free_cache_engine load_format tensor_model_parallel_size max_num_batched_tokens max_num_seqs log_prob_micro_batch_size
log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu do_sample
engine_kwargs.vllm.swap_space engine_kwargs.vllm.disable_mm_preprocessor_cache engine_kwargs.sglang.attention_backend n
val_kwargs.top_k val_kwargs.top_p val_kwargs.temperature val_kwargs.n val_kwargs.do_sample
"""
_OPTIM = """
optimizer lr clip_grad total_training_steps lr_warmup_init lr_warmup_steps lr_warmup_steps_ratio lr_decay_steps
lr_decay_style min_lr weight_decay weight_decay_incr_style lr_wsd_decay_style lr_wsd_decay_steps
use_checkpoint_opt_param_scheduler warmup_steps_ratio lr_scheduler
"""
_REWARD_MODEL = """
enable model.input_tokenizer model.path model.external_lib model.trust_remote_code model.fsdp_config.min_num_params
model.fsdp_config.param_offload micro_batch_size_per_gpu max_length reward_manager
"""
_ALGORITHM = """
gamma gemma lam adv_estimator use_kl_in_reward kl_penalty kl_ctrl.type kl_ctrl.kl_coef kl_ctrl.horizon kl_ctrl.target_kl
"""
_TRAINER = """
total_epochs project_name experiment_name logger log_val_generations nnodes n_gpus_per_node save_freq val_before_train
test_freq critic_warmup default_hdfs_dir default_local_dir resume_mode resume_from_path remove_previous_ckpt_in_save
del_local_ckpt_after_load ray_wait_register_center_timeout
"""
_SFT_MODEL = """
partial_pretrain fsdp_config.model_dtype fsdp_config.wrap_policy.min_num_params fsdp_config.cpu_offload
fsdp_config.offload_params external_lib enable_gradient_checkpointing trust_remote_code lora_rank lora_alpha
target_modules use_liger
"""
_SECTIONS = {
    "data": _DATA,
    "actor_rollout_ref.model": _MODEL,
    "actor_rollout_ref.actor": _ACTOR,
    "actor_rollout_ref.ref": _REF,
    "actor_rollout_ref.rollout": _ROLLOUT,
    "actor_rollout_ref": "hybrid_engine",
    "optim": _OPTIM,
    "reward_model": _REWARD_MODEL,
    "custom_reward_function": "path name",
    "custom_cls": "path name",
    "algorithm": _ALGORITHM,
    "trainer": _TRAINER,
    "model": _SFT_MODEL,
}
VERL = [f"{section}.{key}" for section, keys in _SECTIONS.items() for key in keys.split()]

AXOLOTL = """
rl base_model datasets datasets.path datasets.name datasets.split datasets.type datasets.ds_type datasets.data_files
datasets.field_messages datasets.field_chosen datasets.field_rejected datasets.message_property_mappings datasets.roles
type.field_prompt type.field_system type.field_chosen type.field_rejected type.field_completion type.field_label
type.prompt_format type.chosen_format type.rejected_format type.completion_format
chat_template orpo_alpha rl_beta kto_desirable_weight kto_undesirable_weight simpo_gamma cpo_alpha remove_unused_columns
gradient_checkpointing gradient_checkpointing_kwargs gradient_checkpointing_kwargs.use_reentrant
vllm vllm.host vllm.port vllm.tensor_parallel_size vllm.gpu_memory_utilization vllm.dtype vllm.max_model_len
trl.use_vllm trl.vllm_server_host trl.vllm_server_port trl.vllm_server_timeout trl.beta trl.max_completion_length
trl.num_generations trl.reward_funcs trl.reward_weights trl.rollout_func trl.loss_type trl.multi_objective_aggregation
context_parallel_size rl_adapter_ref_model --num-processes
"""

HARMONY = """
SFT PPO GRPO DPO dataset model policy_model value_model grader lr lr_policy lr_value samples_per_batch
samples_per_mini_batch max_grad_norm kl_beta max_num_ppo_steps completions_per_sample beta spawn_train tp world_size ctx
client CombinedGrader setup model.save save_model_safely InputConfig
"""

_OPTIMIZER = """
learning_rate opt_type schedule_type value peak_value init_value end_value warmup_ratio b1 b2 weight_decay warmup_steps
decay_steps max_grad_norm
"""
_TRAINING = """
eval_every_n_steps max_steps gradient_accumulation_steps checkpoint_root_directory checkpointing_options.max_to_keep
checkpointing_options.save_interval_steps checkpointing_options.enable_async_checkpointing
metrics_logging_options.project_name metrics_logging_options.run_name metrics_logging_options.log_dir
metrics_logging_options.flush_every_n_steps perf_metrics_options profiler_options.log_dir data_sharding_axis
max_inflight_computations
"""
_TUNIX_MODEL = """
model_name model_source model_id model_path model_download_path rng_seed model_display intermediate_ckpt_dir
use_flash_attention flash_attention_block_size lora_config lora_config.rank lora_config.alpha lora_config.module_path
lora_config.weight_qtype lora_config.tile_size mesh.shape mesh.axis_names mesh.allocation_policy remat_config
same_mesh_as
"""
_TUNIX_SECTIONS = {
    "model_config": _TUNIX_MODEL,
    "actor_model_config": _TUNIX_MODEL,
    "tokenizer_config": "tokenizer_path tokenizer_type add_bos add_eos",
    "optimizer_config": _OPTIMIZER,
    "rl_training_config.actor_optimizer_config": _OPTIMIZER,
    "rl_training_config.critic_optimizer_config": _OPTIMIZER,
    "training_config": _TRAINING,
    "rl_training_config": f"{_TRAINING} mini_batch_size train_micro_batch_size rollout_micro_batch_size",
    "ppo_config": "num_iterations gae_lambda gamma beta epsilon entropy_coef clip_range_value kl_method epsilon_c",
    "grpo_config": "num_generations num_iterations beta epsilon loss_agg_mode kl_loss_mode loss_algo sampler_is",
    "agentic_grpo_config": "num_generations beta epsilon_high max_turns max_concurrency off_policy_steps",
    "rollout_config": "total_generation_steps max_prompt_length temperature top_p top_k eos_tokens return_logprobs",
}
TUNIX = [f"{section}.{key}" for section, keys in _TUNIX_SECTIONS.items() for key in keys.split()]
_TUNIX = """
critic_model_config reference_model_config.mesh data_source data_directory data_module apply_chat_template_to_dataset
dataset_name batch_size max_target_length num_train_epochs train_fraction num_test_batches tfds_download num_batches
rollout_engine vllm_config sglang_jax_config offload_to_cpu verl_compatible reward_functions training_mode
"""

OPENRLHF = """
ref.num_nodes actor.num_nodes actor.num_gpus_per_node critic.num_nodes train.colocate_actor_ref train.colocate_all
vllm.num_engines vllm.tensor_parallel_size vllm.enable_sleep vllm.gpu_memory_utilization
algo.advantage.is_correction_enable algo.advantage.is_correction_threshold algo.advantage.is_correction_type
train.async_enable train.async_queue_size train.partial_rollout_enable eval.steps ckpt.save_steps logger.logging_steps
ckpt.path ckpt.save_hf ckpt.max_num ckpt.load_enable local_rank ds.zero_stage actor.gradient_checkpointing_enable
ds.param_dtype train.enable_ema train.ema_beta ds.adam_offload ds.attn_implementation ds.packing_samples
train.dynamic_batch_enable rollout.max_tokens_per_gpu train.max_tokens_per_gpu ds.load_in_4bit ds.lora.rank
ds.lora.alpha ds.lora.target_modules ds.lora.dropout ckpt.output_dir train.num_episodes rollout.batch_size
rollout.vllm_generate_batch_size rollout.micro_batch_size train.max_epochs data.max_len rollout.max_new_tokens
data.max_samples actor.eps_clip actor.eps_clip_low_high actor.dual_clip critic.value_clip algo.advantage.lambd
algo.advantage.gamma train.micro_batch_size train.batch_size reward.normalize_enable rollout.top_p rollout.temperature
train.seed critic.freezing_steps rollout.n_samples_per_prompt algo.kl.target algo.kl.horizon algo.kl.init_coef
actor.policy_loss_type algo.kl.estimator actor.aux_loss_coef actor.entropy_coef reward.clip_range actor.optim
actor.muon.lr actor.adam.lr actor.adam.betas actor.adam.eps actor.adam.weight_decay actor.lr_scheduler
actor.lr_warmup_ratio actor.min_lr_ratio actor.max_norm critic.adam.lr algo.advantage.estimator algo.kl.use_loss
algo.advantage.no_std_norm reward.overlong_buffer_len reward.overlong_penalty_factor
reward.stop_properly_penalty_coef ds.ring_attn_size actor.model_name_or_path reward.model_name_or_path
reward.remote_url critic.model_name_or_path ref.offload train.agent_func_path data.prompt_dataset data.prompt_probs
data.prompt_split eval.dataset eval.split eval.temperature eval.n_samples_per_prompt data.input_key data.label_key
data.input_template data.apply_chat_template logger.wandb.key logger.wandb.project logger.wandb.run_name
algo.dynamic_filtering_enable algo.dynamic_filtering_range data.image_key logger.tensorboard_dir use_ms
adam.lr lr_scheduler max_norm data.output_key data.multiturn data.tokenizer_chat_template data.dataset
model.pretrain_mode_enable model.beta model.ipo_enable model.label_smoothing model.nll_loss_coef ref.model_name_or_path
data.prompt_key data.chosen_key data.rejected_key model.loss_type model.margin_loss_enable
pretrain reward_pretrain remote_rm_url save_path init_kl_coef use_kl_loss prompt_max_len generate_max_len
actor_learning_rate learning_rate n_samples_per_prompt advantage_estimator prompt_data packing_samples bf16 use_wandb
"""

NEMO_RL = """
grpo.num_prompts_per_step grpo.num_generations_per_prompt grpo.max_rollout_turns grpo.max_num_epochs grpo.max_num_steps
grpo.normalize_rewards grpo.use_leave_one_out_baseline grpo.val_period grpo.val_start_at grpo.val_at_start
grpo.val_at_end grpo.overlong_filtering grpo.advantage_clip_low grpo.max_val_samples
grpo.val_num_generations_per_prompt grpo.val_batch_size grpo.seed grpo.use_dynamic_sampling
grpo.dynamic_sampling_max_gen_batches grpo.batch_multiplier grpo.reward_shaping.enabled
grpo.reward_shaping.overlong_buffer_length grpo.reward_shaping.max_response_length grpo.adv_estimator.name
grpo.adv_estimator.minus_baseline grpo.reward_scaling.enabled grpo.seq_logprob_error_threshold grpo.async_grpo.enabled
grpo.async_grpo.max_trajectory_age_steps grpo.async_grpo.in_flight_weight_updates
loss_fn.reference_policy_kl_penalty loss_fn.reference_policy_kl_type loss_fn.kl_input_clamp_value
loss_fn.ratio_clip_min loss_fn.ratio_clip_max loss_fn.ratio_clip_c loss_fn.use_on_policy_kl_approximation
loss_fn.use_importance_sampling_correction loss_fn.truncated_importance_sampling_type
loss_fn.truncated_importance_sampling_ratio loss_fn.truncated_importance_sampling_ratio_min
loss_fn.sequence_level_importance_ratios loss_fn.token_level_loss loss_fn.force_on_policy_ratio
loss_fn.use_kl_in_reward loss_fn.use_cispo loss_fn.disable_ppo_ratio loss_fn.positive_example_nll_weight
checkpointing.enabled checkpointing.checkpoint_dir checkpointing.metric_name checkpointing.keep_top_k
checkpointing.save_period policy.model_name policy.tokenizer.name policy.train_global_batch_size
policy.train_micro_batch_size policy.logprob_batch_size policy.max_total_sequence_length policy.precision
policy.dtensor_cfg.tensor_parallel_size policy.dtensor_cfg.lora_cfg.dim policy.megatron_cfg.enabled
policy.megatron_cfg.optimizer.lr policy.megatron_cfg.scheduler.lr_decay_style policy.sequence_packing.enabled
policy.max_grad_norm policy.optimizer.kwargs.lr policy.scheduler policy.generation.max_new_tokens
policy.generation.temperature policy.generation.top_k policy.generation.vllm_cfg.tensor_parallel_size
policy.generation.colocated.enabled data.max_input_seq_length data.shuffle data.train.dataset_name
data.train.split_validation_size data.validation data.default.prompt_file data.default.env_name env.math.num_workers
logger.wandb_enabled logger.wandb.project cluster.gpus_per_node data_plane.enabled on_policy_distillation
sft.max_num_steps sft.val_batches sft.only_unmask_final dpo.reference_policy_kl_penalty dpo.sft_loss_weight
dpo.preference_average_log_probs rm.val_period distillation.topk_logits_k loss_fn.kl_type teacher.model_name
"""

LLAMAFACTORY = """
stage do_train finetuning_type lora_rank lora_alpha lora_dropout lora_target additional_target use_galore galore_rank
loraplus_lr_ratio pissa_init adapter_name_or_path quantization_bit quantization_method quantization_type pure_bf16
dataset eval_dataset dataset_dir template cutoff_len max_samples val_size train_on_prompt mask_history streaming
packing neat_packing default_system enable_thinking preprocessing_num_workers overwrite_cache tokenized_path
pref_beta pref_ftx pref_loss dpo_label_smoothing simpo_gamma kto_chosen_weight kto_rejected_weight ld_alpha
use_badam use_apollo use_adam_mini use_muon use_dft_loss use_eaft_loss freeze_trainable_layers plot_loss
disable_gradient_checkpointing flash_attn enable_liger_kernel use_unsloth rope_scaling moe_aux_loss_coef
freeze_vision_tower ddp_timeout use_swanlab train_from_scratch model_revision
ppo_epochs ppo_buffer_size ppo_target ppo_whiten_rewards ppo_score_norm reward_model reward_model_type max_new_tokens
"""

ALL = {
    "TRL": TRL.split(),
    "VERL": VERL,
    "AXOLOTL": AXOLOTL.split(),
    "OPENRLHF": OPENRLHF.split(),
    "NEMO-RL": NEMO_RL.split(),
    "LLAMAFACTORY": LLAMAFACTORY.split(),
    "TUNIX": [*TUNIX, *_TUNIX.split()],
    "HARMONY": HARMONY.split(),
}
