"""Every key of TRL: its trainers' configurations, its scripts' arguments, and what its pages name besides."""

from jaxrl_llm.tools.migrate.table import Entry, entry, same

STEPS = "counted in optimizer updates there, in training steps here: divided by the updates of a step"
ENGINE = "there is no second engine: the sampler is built in and shares the policy's parameters"
HUB = "a run is uploaded once, when it ends, with the token of the variable HF_TOKEN"
TORCH = "a setting of torch; JAX compiles every step"
METHOD_LOSS = "by trainer: of GRPO `algorithm.aggregation` too; the others' names are ours (sigmoid is dpo)"


def _text(options: dict) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


MODEL: tuple[Entry, ...] = (
    entry("model model_name_or_path", "model.path", "of a model object made in Python the name it was loaded by", same),
    entry("dtype torch_dtype", "model.param_dtype", "`auto` (the checkpoint's type) has no name here: taken as "
          "float32"),
    entry("model_init_kwargs", "model.param_dtype", "only its dtype is read"),
    entry("trust_remote_code", "model.trust_remote_code", "for tokenizers; models are written in JAX", same),
    entry("bf16 fp16", "model.dtype", "the type of the computation; parameters stay float32, and float16 has no loss "
          "scaling. GRPO's bf16=None is `auto`"),
    entry("gradient_checkpointing", "model.remat", "`block`; on by default in TRL 1, off here",
          lambda on: "block" if on else "none"),
    entry("cast_lm_head_to_fp32", "model.fp32_head", "", same),
    entry("router_aux_loss_coef", "model.router_aux_loss_coef", "", same),
    entry("load_in_8bit load_in_4bit bnb_4bit_quant_type", "model.quantize", "int8; nf4, or int4 for fp4"),
    entry("use_peft peft_config lora_r r", "lora.rank", "0 is none. TRL's scripts have rank 16, alpha 32, dropout 0.05 "
          "by default, PEFT's LoraConfig 8, 8 and 0"),
    entry("lora_alpha", "lora.alpha", "16 by default here"),
    entry("lora_dropout", "lora.dropout", ""),
    entry("use_rslora", "lora.rslora", ""),
    entry("lora_target_modules target_modules", "lora.targets", "unset is chosen by PEFT for the architecture, mostly "
          "q_proj and v_proj, which is what is written"),
)  # fmt: skip

DATA: tuple[Entry, ...] = (
    entry("train_dataset dataset_name", "data.path", "a data set made in Python goes to `train(config, "
          "train_dataset=...)`"),
    entry("dataset_config", "data.name", "", same),
    entry("dataset_train_split", "data.split", "", same),
    entry("eval_dataset dataset_test_split", "data.eval_path data.eval_split", "a dictionary of several is "
          "`eval.sets`; `eval.prompts` (128) rows of it; all there"),
    entry("dataset_streaming", "data.streaming", "", same),
    entry("shuffle_dataset train_sampling_strategy", "data.shuffle", "the first in GRPO and RLOO, the second "
          "(sequential by default in KTO, and then rows are not shuffled) in the others"),
    entry("max_length", "data.max_length data.overlong", "rows that are longer are cut there and an error here, so "
          "`truncate_right` (`truncation_mode=keep_start`) or `truncate_left` is written"),
    entry("truncation_mode", "data.overlong"),
    entry("max_prompt_length", "rollout.max_prompt_length data.overlong", "cut on the left there: `truncate_left` is "
          "written. TRL 1 has no limit, here there is always one: 512, and a longer prompt is an error"),
    entry("completion_only_loss assistant_only_loss", "data.loss_on", "TRL learns all tokens of messages and texts, "
          "and of prompt/completion rows the completion; here `completion` (also every turn of the assistant) is the "
          "default"),
    entry("packing", "data.packing", "packed rows do not see each other", same),
    entry("precompute_ref_log_probs", "data.precompute_reference", "", same),
    entry("chat_template_kwargs", "data.chat_template_kwargs", "", _text),
)  # fmt: skip

SAMPLING: tuple[Entry, ...] = (
    entry("num_generations", "rollout.group_size", "2 by default in RLOO", same),
    entry("num_generations_eval", "eval.samples", "", same),
    entry("max_completion_length response_length", "rollout.max_completion_length", "", same),
    entry("temperature", "rollout.temperature", "0.9 by default in TRL 0.16, 0.7 in PPO", same),
    entry("top_p", "rollout.top_p", "", same),
    entry("top_k", "rollout.top_k", "None and 0 are off: 0. TRL 0.16 has 50 by default. Log-probs are over the full "
          "vocabulary here", lambda k: max(int(k), 0)),
    entry("min_p", "rollout.min_p", "", same),
    entry("reward_funcs reward_model_path", "rewards.functions", "functions of a script are named `file.py:function`; "
          "a "
          "model is `model:<path>`"),
    entry("reward_weights", "rewards.weights", "", tuple),
    entry("tools", "environment.tools", "named `file.py:function`"),
    entry("environment_factory", "environment.name", "named `file.py:Class`"),
    entry("rollout_func", "environment.rollout_func algorithm.importance_correction", "named `file.py:function`; a "
          "correction must be chosen: `token_truncate` is written"),
    entry("max_tool_calling_iterations", "environment.max_turns", "turns, one more than rounds of calls",
          lambda calls: int(calls) + 1),
)  # fmt: skip

ALGORITHM: tuple[Entry, ...] = (
    entry("beta", "algorithm.beta algorithm.kl_in_reward", "0.04 by default in TRL 0.16, 0 in 1.x; RLOO's (0.05) is in "
          "the reward. Of a preference loss its beta"),
    entry("kl_coef", "algorithm.beta", "PPO's, in the reward", same),
    entry("kl_estimator", "algorithm.kl", "", same),
    entry("epsilon cliprange", "algorithm.epsilon_low algorithm.epsilon_high", ""),
    entry("epsilon_high", "algorithm.epsilon_high", "None is epsilon; with cispo the cap itself"),
    entry("delta", "algorithm.delta", "", same),
    entry("num_iterations num_ppo_epochs", "algorithm.num_iterations", "", same),
    entry("loss_type", "algorithm.loss algorithm.aggregation", METHOD_LOSS),
    entry("loss_weights", "algorithm.loss_weights", "", tuple),
    entry("importance_sampling_level", "algorithm.loss", "sequence is gspo"),
    entry("sapo_temperature_pos sapo_temperature_neg", "algorithm.loss", "options: `sapo(temperature_positive=1.0)`"),
    entry("multi_objective_aggregation", "algorithm.advantage", "normalize_then_sum is gdpo"),
    entry("scale_rewards", "algorithm.scale_rewards", "True is group, False is none",
          lambda by: {True: "group", False: "none", "True": "group", "False": "none"}.get(by, by)),
    entry("normalize_advantages", "algorithm.advantage", "`rloo(normalize=True)`"),
    entry("reward_clip_range", "algorithm.reward_clip", "", tuple),
    entry("missing_eos_penalty", "algorithm.missing_eos_penalty", "", same),
    entry("gamma lam whiten_rewards", "algorithm.advantage", "`ppo(gamma=1.0, lam=0.95, whiten_rewards=False)`"),
    entry("vf_coef", "critic.learning_rate", "TRL adds the losses for one optimizer; the critic's own optimizer has "
          "the same rate here, and Adam does not see a factor"),
    entry("cliprange_value", "critic.epsilon", "", same),
    entry("mask_truncated_completions", "algorithm.mask_truncated", "", same),
    entry("sync_ref_model ref_model_sync_steps", "algorithm.ref_sync_steps", STEPS + "; online only"),
    entry("ref_model_mixup_alpha", "algorithm.ref_mixup_alpha"),
    entry("top_entropy_quantile", "algorithm.top_entropy_quantile", "", same),
    entry("entropy_coef", "algorithm.entropy_coef", "", same),
    entry("use_adaptive_entropy", "algorithm.entropy_controller", "", lambda on: "adaptive" if on else "fixed"),
    entry("entropy_coef_min", "algorithm.entropy_coef_min", "", same),
    entry("entropy_coef_max", "algorithm.entropy_coef_max", "", same),
    entry("entropy_coef_delta", "algorithm.entropy_delta", "", same),
    entry("entropy_target", "algorithm.entropy_target", "", same),
    entry("vllm_importance_sampling_correction vllm_importance_sampling_mode", "algorithm.importance_correction",
          "only where TRL samples with vLLM: sequence_mask by default there"),
    entry("vllm_importance_sampling_clip_max vllm_importance_sampling_cap", "algorithm.importance_max"),
    entry("vllm_importance_sampling_clip_min", "algorithm.importance_min"),
    entry("off_policy_mask_threshold", "algorithm.off_policy_mask_threshold", "", same),
    entry("use_bias_correction_kl", "algorithm.kl_bias_correction", "on by default in TRL 1.16, off here"),
    entry("label_smoothing", "algorithm.label_smoothing", "TRL 1 ignores it for sigmoid; then it is left out"),
    entry("label_smoothing_factor", "algorithm.label_smoothing", "of SFT"),
    entry("neftune_noise_alpha", "algorithm.neftune_alpha", "of SFT", same),
    entry("f_divergence_type", "algorithm.f_divergence", "", same),
    entry("f_alpha_divergence_coef", "algorithm.f_alpha", "of TRL before 1.0 it is one minus this", same),
    entry("ld_alpha", "algorithm.ld_alpha", "", same),
    entry("use_weighting", "algorithm.use_weighting", "", same),
    entry("discopop_tau", "algorithm.discopop_tau", "", same),
    entry("reference_free", "algorithm.reference_free", "gone in TRL 1", same),
    entry("rpo_alpha", "algorithm.loss algorithm.loss_weights", "gone in TRL 1: `dpo+sft`"),
    entry("simpo_gamma", "algorithm.simpo_gamma", "", same),
    entry("cpo_alpha", "algorithm.cpo_alpha", "1.0 by default, as here: pure SimPO is 0", same),
    entry("alpha", "algorithm.alphapo_alpha"),
    entry("desirable_weight", "algorithm.desirable_weight", "", same),
    entry("undesirable_weight", "algorithm.undesirable_weight", "", same),
    entry("center_rewards_coefficient", "algorithm.center_rewards_coefficient", "", same),
)  # fmt: skip

TRAINING: tuple[Entry, ...] = (
    entry("output_dir", "output_dir", "", same),
    entry("seed data_seed", "seed", "one seed for all; the numbers that it makes are others"),
    entry("max_steps num_train_epochs total_episodes", "total_steps", STEPS + ". Epochs need the number of rows: "
          "`--rows=N`"),
    entry("per_device_train_batch_size gradient_accumulation_steps num_processes num_machines",
          "batch.prompts batch.microbatch_rows", "TRL counts completions (pairs, rows) on a device; `batch.prompts` "
          "counts prompts (pairs, rows) of a step over all devices, `batch.microbatch_rows` rows (a pair is two)"),
    entry("generation_batch_size steps_per_generation num_mini_batches", "batch.prompts batch.minibatches",
          "a step here is one generation batch; it has steps_per_generation / gradient_accumulation_steps updates"),
    entry("optim adafactor", "optimizer.name", "fused, paged and 8-bit variants are the plain ones"),
    entry("learning_rate", "optimizer.learning_rate", "", same),
    entry("lr_scheduler_type lr_scheduler_kwargs", "optimizer.schedule optimizer.min_lr_ratio optimizer.cycles "
          "optimizer.decay_steps", "linear by default there, constant here"),
    entry("warmup_steps", "optimizer.warmup_steps optimizer.warmup_ratio", STEPS + "; below 1 a ratio"),
    entry("warmup_ratio", "optimizer.warmup_ratio"),
    entry("weight_decay", "optimizer.weight_decay", "", same),
    entry("adam_beta1", "optimizer.b1", "", same),
    entry("adam_beta2", "optimizer.b2", "", same),
    entry("adam_epsilon", "optimizer.eps", "", same),
    entry("max_grad_norm", "optimizer.max_grad_norm", "", same),
    entry("save_strategy save_steps", "checkpoint.every", STEPS + "; `no` is 0, the last step is always saved"),
    entry("save_total_limit", "checkpoint.keep checkpoint.keep_every", "unset keeps all there: `keep_every=1`; 2 here",
          same),
    entry("load_best_model_at_end metric_for_best_model greater_is_better", "checkpoint.best checkpoint.best_mode",
          "it is kept; `hf` is the model of the last step, and `jaxrl_llm.export` writes another"),
    entry("resume_from_checkpoint", "checkpoint.resume", "True and unset are auto; a path is one of ours"),
    entry("eval_strategy evaluation_strategy eval_steps do_eval", "eval.every", STEPS + "; `no`, the default there, is "
          "-1. After the last step there is one here"),
    entry("eval_on_start", "eval.at_start", "off by default there, on here"),
    entry("callbacks", "callbacks", "named `file.py:Class`, or given to `train(config, callbacks=...)`, with the hooks "
          "of docs/callbacks.md; `EarlyStoppingCallback` is `early_stopping(metric='eval/reward', patience=3)`"),
    entry("push_to_hub hub_model_id push_to_hub_model_id", "export.push_to_hub", "OWNER/NAME; once, when the run ends"),
    entry("hub_private_repo", "export.private"),
    entry("report_to", "logging.backends", "beside console and jsonl: tensorboard, wandb, mlflow, swanlab, trackio"),
    entry("project WANDB_PROJECT MLFLOW_EXPERIMENT_NAME SWANLAB_PROJECT TRACKIO_PROJECT", "logging.project", "of all "
          "trackers; the names in capitals are environment variables that a script sets"),
    entry("run_name WANDB_NAME", "logging.run_name", "unset is the name of `output_dir`"),
    entry("log_completions logging_steps num_completions_to_print", "logging.completions_every "
          "logging.completions_shown", STEPS + ". Metrics of every step are logged; completions not by default there"),
    entry("fsdp fsdp_config deepspeed", "mesh.fsdp mesh.data", "any of them shares parameters over all devices: "
          "`mesh.fsdp=-1`; it changes no result"),
    entry("tp_size tensor_parallel_size", "mesh.tensor", "for the training mesh, of which sampling is part; of "
          "`trl vllm-serve` there is nothing to keep"),
)  # fmt: skip

NONE: tuple[Entry, ...] = (
    entry("args", note="is the configuration itself"),
    entry("processing_class reward_processing_classes", note="the tokenizers of the policy's and the reward model's "
          "folders"),
    entry("optimizers", note="an optimizer object; see the keys of `optimizer`"),
    entry("model_name tags", note="of create_model_card: no card is written"),
    entry("remove_unused_columns label_names", note="columns always stay, for the rewards"),
    entry("overwrite_output_dir", note="`checkpoint.resume=never` starts anew"),
    entry("do_train do_predict prediction_loss_only", note="the command says what is done: train, evaluate, generate"),
    entry("per_device_eval_batch_size per_gpu_train_batch_size per_gpu_eval_batch_size eval_accumulation_steps "
          "eval_do_concat_batches eval_use_gather_object batch_eval_metrics",
          note="an evaluation has the batches that fit: `eval.prompts` is its size"),
    entry("eval_delay", note="evaluations start before the first step"),
    entry("include_inputs_for_metrics include_for_metrics", note="no function of metrics is called"),
    entry("torch_empty_cache_steps torch_compile torch_compile_backend torch_compile_mode torchdynamo jit_mode_eval "
          "use_ipex tf32 half_precision_backend fp16_backend fp16_opt_level bf16_full_eval fp16_full_eval "
          "use_legacy_prediction_loop mp_parameters full_determinism padding_free pad_to_multiple_of use_cache "
          "enable_jit_checkpoint attn_implementation", note=TORCH),
    entry("no_cuda use_cpu use_mps_device tpu_num_cores tpu_metrics_debug debug",
          note="JAX_PLATFORMS chooses the devices"),
    entry("gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs",
          note="there is one way of computing again, `model.remat`"),
    entry("activation_offloading", note="`model.remat=offload` keeps layer inputs in the host's memory"),
    entry("use_liger_kernel use_liger_loss liger_kernel_config",
          note="the log-probs are always computed in chunks of the vocabulary"),
    entry("local_rank ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_timeout "
          "ddp_static_graph ray_scope accelerator_config parallelism_config dispatch_batches split_batches config_file "
          "main_process_ip machine_rank rdzv_backend server_ip",
          note="one command on each host, and JAX finds the others"),
    entry("fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap ds3_gather_for_generation",
          note="every parameter is shared, and sampling is on the same mesh"),
    entry("auto_find_batch_size", note="set `batch.microbatch_rows`; it changes no result"),
    entry("average_tokens_across_devices", note="tokens are always counted over the whole optimizer batch"),
    entry("log_level log_level_replica log_on_each_node logging_dir logging_strategy logging_first_step "
          "logging_nan_inf_filter disable_tqdm skip_memory_metrics include_tokens_per_second "
          "include_num_input_tokens_seen log_unique_prompts log_multimodal log_completions_hub_repo",
          note="metrics of every step, tokens and speed among them, go to the console and metrics.jsonl"),
    entry("trackio_space_id trackio_bucket_id trackio_static_space_id WANDB_ENTITY WANDB_MODE MLFLOW_TRACKING_URI",
          note="where a tracker keeps its runs is said to the tracker itself, in its environment variables"),
    entry("save_safetensors", note="models are always saved as safetensors"),
    entry("save_on_each_node save_only_model restore_callback_states_from_checkpoint ignore_data_skip",
          note="checkpoints are whole, and a resumed run goes on with the row it stopped at"),
    entry("push_to_hub_organization push_to_hub_token hub_strategy hub_token hub_always_push hub_revision", note=HUB),
    entry("dataloader_drop_last dataloader_num_workers dataloader_prefetch_factor dataloader_pin_memory "
          "dataloader_persistent_workers dataloader_multiprocessing_context dataloader_in_order dataset_num_proc "
          "dataset_kwargs dataset_text_field past_index", note="rows are tokenised once, before the first step"),
    entry("group_by_length length_column_name",
          note="rows come in the order that the seed makes"),
    entry("optim_args optim_target_modules", note="arguments of torch optimizers"),
    entry("repetition_penalty cache_implementation generation_kwargs", note="sampling is by temperature, top_k, top_p "
          "and min_p alone: then log-probs mean the same to sampler and trainer"),
    entry("use_vllm vllm_server_host vllm_server_port vllm_server_timeout vllm_server_base_url vllm_group_port "
          "vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_device vllm_gpu_memory_utilization vllm_dtype "
          "vllm_max_model_len vllm_max_model_length vllm_enable_prefix_caching vllm_tensor_parallel_size "
          "use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config",
          note=ENGINE),
    entry("vllm_guided_decoding_regex vllm_structured_outputs_regex", note="there is no guided decoding; the reward "
          "`regex_match` scores the form"),
    entry("disable_dropout", note="models have no dropout here"),
    entry("vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg", note="`vespo` has TRL's default numbers"),
    entry("model_revision lora_target_parameters lora_modules_to_save lora_task_type use_dora "
          "use_bnb_nested_quant bnb_4bit_quant_storage ignore_bias_buffers task_type bias modules_to_save",
          note="has no key here"),
    entry("chat_template_path eos_token pad_token padding_value", note="the tokenizer's own are used"),
    entry("packing_strategy eval_packing", note="rows are packed best fit first"),
    entry("generate_during_eval is_encoder_decoder", note="see `eval.measure`"),
    entry("precompute_ref_batch_size local_rollout_forward_batch_size num_sample_generations",
          note="chunking, which changes no result"),
    entry("sft_model_path stop_token stop_token_id exp_name", note="`model.path` is the policy and the reference; a "
          "completion ends with the model's end of text"),
)  # fmt: skip

TABLE = (*MODEL, *DATA, *SAMPLING, *ALGORITHM, *TRAINING, *NONE)
