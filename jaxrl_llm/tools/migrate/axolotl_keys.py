"""Every key of axolotl's YAML that its RLHF pages name, and the usual ones beside them.

axolotl trains with TRL's trainers: `TRL_NAMES` says which key of TRL one of axolotl is, and TRL's table the rest.
"""

from jaxrl_llm.tools.migrate.table import Entry, entry, same

VLLM = "there is no second engine: the sampler is built in and shares the policy's parameters"

# Keys that axolotl hands to TRL under another name; those of the section trl have TRL's own names.
TRL_NAMES = {
    "base_model": "model_name_or_path",
    "trust_remote_code": "trust_remote_code",
    "micro_batch_size": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "num_epochs": "num_train_epochs",
    "max_steps": "max_steps",
    "learning_rate": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "lr_scheduler_kwargs": "lr_scheduler_kwargs",
    "warmup_steps": "warmup_steps",
    "warmup_ratio": "warmup_ratio",
    "optimizer": "optim",
    "weight_decay": "weight_decay",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "adam_epsilon": "adam_epsilon",
    "max_grad_norm": "max_grad_norm",
    "seed": "seed",
    "output_dir": "output_dir",
    "save_steps": "save_steps",
    "save_strategy": "save_strategy",
    "save_total_limit": "save_total_limit",
    "eval_steps": "eval_steps",
    "eval_strategy": "eval_strategy",
    "logging_steps": "logging_steps",
    "gradient_checkpointing": "gradient_checkpointing",
    "bf16": "bf16",
    "fp16": "fp16",
    "sequence_len": "max_length",
    "sample_packing": "packing",
    "simpo_gamma": "simpo_gamma",
    "cpo_alpha": "cpo_alpha",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
    "dpo_loss_type": "loss_type",
    "dpo_loss_weights": "loss_weights",
    "dpo_label_smoothing": "label_smoothing",
    "dpo_use_weighting": "use_weighting",
    "precompute_ref_log_probs": "precompute_ref_log_probs",
    "center_rewards_coefficient": "center_rewards_coefficient",
    "neftune_noise_alpha": "neftune_noise_alpha",
    "lora_r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "peft_use_rslora": "use_rslora",
    "load_in_8bit": "load_in_8bit",
    "load_in_4bit": "load_in_4bit",
    "resume_from_checkpoint": "resume_from_checkpoint",
    "fsdp": "fsdp",
    "fsdp_config": "fsdp_config",
    "deepspeed": "deepspeed",
}
DEFAULTS = {
    "output_dir": "model-out",
    "per_device_train_batch_size": 1,
    "num_train_epochs": 1.0,
    "lr_scheduler_type": "cosine",
    "save_strategy": "epoch",
    "save_total_limit": 4,
    "max_length": 512,
    "ref_model_mixup_alpha": 0.9,
    "ref_model_sync_steps": 64,
    "scale_rewards": True,
    "gradient_checkpointing": False,
    "bf16": None,
    "lora_dropout": 0.0,
}

TABLE: tuple[Entry, ...] = (
    entry("rl", "algorithm.name algorithm.loss algorithm.advantage", "dpo, ipo, kto, orpo, simpo, grpo and gdpo; "
          "without it sft. gdpo with one reward is not grpo: see algorithms.md"),
    entry("base_model", "model.path"),
    entry("datasets", "data.sources", "the same list: path, name, split, type, ds_type, data_files, and the options of "
          "the type"),
    entry("datasets.path datasets.name datasets.split datasets.type datasets.ds_type datasets.data_files "
          "datasets.field_messages datasets.field_chosen datasets.field_rejected datasets.message_property_mappings "
          "datasets.roles type.field_prompt type.field_system type.field_chosen type.field_rejected "
          "type.field_completion type.field_label type.prompt_format type.chosen_format type.rejected_format "
          "type.completion_format", "data.sources", "under the same names. `zephyr.nectar` takes rank 1 for chosen, "
          "where axolotl takes the worst answer"),
    entry("test_datasets", "data.eval_path data.eval_split", "one"),
    entry("val_set_size", "data.sources", "a slice of the split: `split=train[5%:]`, `eval_split=train[:5%]`; axolotl "
          "draws the rows"),
    entry("chat_template", "data.format", "the tokenizer's own template is used, and tokenizer_default is that; the "
          "formats chatml.* and llama3.* write theirs"),
    entry("rl_beta trl.beta", "algorithm.beta", "of grpo the weight of the KL, 0 by default in TRL 1"),
    entry("orpo_alpha", "algorithm.beta", "not read when rl_beta is set"),
    entry("simpo_gamma", "algorithm.simpo_gamma", "documented as 0.5 by default; unset it fails in axolotl"),
    entry("cpo_alpha", "algorithm.cpo_alpha"),
    entry("kto_desirable_weight", "algorithm.desirable_weight", "axolotl makes 1.0 of 0"),
    entry("kto_undesirable_weight", "algorithm.undesirable_weight", "axolotl makes 1.0 of 0"),
    entry("dpo_loss_type", "algorithm.loss"),
    entry("dpo_loss_weights", "algorithm.loss_weights"),
    entry("dpo_label_smoothing", "algorithm.label_smoothing", "TRL 1 ignores it for sigmoid"),
    entry("dpo_use_weighting", "algorithm.use_weighting"),
    entry("precompute_ref_log_probs", "data.precompute_reference"),
    entry("center_rewards_coefficient", "algorithm.center_rewards_coefficient"),
    entry("reward_model", "algorithm.name", "true is reward_model"),
    entry("rl_adapter_ref_model", "lora.reference", "true is copy; otherwise the model without adapters, base"),
    entry("micro_batch_size gradient_accumulation_steps", "batch.prompts batch.microbatch_rows",
          "completions (pairs, rows) on a device there; here prompts (pairs, rows) of a step over all devices"),
    entry("num_epochs max_steps", "total_steps", "epochs need the number of rows: `--rows=N`"),
    entry("learning_rate", "optimizer.learning_rate"),
    entry("lr_scheduler lr_scheduler_kwargs cosine_min_lr_ratio", "optimizer.schedule optimizer.min_lr_ratio",
          "cosine by default there, constant here"),
    entry("warmup_steps warmup_ratio", "optimizer.warmup_steps optimizer.warmup_ratio",
          "unset is 3 % of the steps there, at most 100"),
    entry("optimizer", "optimizer.name"),
    entry("weight_decay", "optimizer.weight_decay"),
    entry("adam_beta1", "optimizer.b1"),
    entry("adam_beta2", "optimizer.b2"),
    entry("adam_epsilon", "optimizer.eps"),
    entry("max_grad_norm", "optimizer.max_grad_norm"),
    entry("neftune_noise_alpha", "algorithm.neftune_alpha"),
    entry("sequence_len", "data.max_length", "512 by default there, 1024 here; not read by grpo"),
    entry("excess_length_strategy", "data.overlong", "drop, the default there, is `filter`; raise is `error`"),
    entry("sample_packing", "data.packing"),
    entry("train_on_inputs", "data.loss_on"),
    entry("shuffle_merged_datasets", "data.shuffle", "", same),
    entry("adapter lora_r lora_model_dir", "lora.rank lora.path", "lora; qlora also sets model.quantize"),
    entry("lora_alpha", "lora.alpha"),
    entry("lora_dropout", "lora.dropout"),
    entry("lora_target_modules lora_target_linear", "lora.targets", "lora_target_linear is all-linear"),
    entry("peft_use_rslora", "lora.rslora"),
    entry("load_in_8bit load_in_4bit", "model.quantize"),
    entry("bf16 fp16", "model.param_dtype", "axolotl loads the model in bfloat16, and trains that"),
    entry("trust_remote_code", "model.trust_remote_code"),
    entry("gradient_checkpointing", "model.remat", "`block`"),
    entry("fsdp fsdp_config deepspeed", "mesh.fsdp mesh.data", "any of them shares parameters over all devices"),
    entry("context_parallel_size sequence_parallel_degree", "mesh.context", "devices that share a row"),
    entry("seed", "seed"),
    entry("output_dir", "output_dir"),
    entry("save_steps save_strategy saves_per_epoch", "checkpoint.every", "each epoch by default there"),
    entry("save_total_limit", "checkpoint.keep", "4 by default there"),
    entry("eval_steps eval_strategy evals_per_epoch", "eval.every"),
    entry("hub_model_id", "export.push_to_hub export.private", "private, as there"),
    entry("early_stopping_patience", "callbacks", "`early_stopping` by eval/loss, of grpo by eval/reward"),
    entry("use_wandb use_tensorboard use_mlflow use_swanlab use_trackio use_comet", "logging.backends", "a project of "
          "W&B, MLflow, Comet or Trackio switches it on, as there; there is no Comet here"),
    entry("wandb_project mlflow_experiment_name swanlab_project trackio_project_name comet_project_name",
          "logging.project", "one for all trackers"),
    entry("wandb_name mlflow_run_name swanlab_experiment_name swanlab_run_name trackio_run_name", "logging.run_name",
          "one for all trackers; unset is the name of `output_dir`"),
    entry("resume_from_checkpoint auto_resume_from_checkpoints", "checkpoint.resume", "auto is the default here"),
    entry("trl.max_completion_length", "rollout.max_completion_length", "unset is TRL's 512"),
    entry("trl.num_generations", "rollout.group_size", "unset is TRL's 8"),
    entry("trl.reward_funcs", "rewards.functions", "`file.function` works as it is; a path is `model:<path>`"),
    entry("trl.reward_weights", "rewards.weights"),
    entry("trl.rollout_func", "environment.rollout_func algorithm.importance_correction", "axolotl's arguments "
          "(model, processing_class, prompts, generation_config) are known"),
    entry("trl.loss_type", "algorithm.aggregation algorithm.loss", "as in TRL"),
    entry("trl.multi_objective_aggregation", "algorithm.advantage", "normalize_then_sum is gdpo"),
    entry("trl.sync_ref_model trl.ref_model_sync_steps", "algorithm.ref_sync_steps", "64 by default there"),
    entry("trl.ref_model_mixup_alpha", "algorithm.ref_mixup_alpha", "0.9 by default there, 0.6 here"),
    entry("trl.scale_rewards", "algorithm.scale_rewards"),
    entry("trl.temperature", "rollout.temperature"),
    entry("trl.top_p", "rollout.top_p"),
    entry("trl.top_k", "rollout.top_k"),
    entry("trl.min_p", "rollout.min_p"),
    entry("trl.num_iterations", "algorithm.num_iterations"),
    entry("trl.epsilon trl.epsilon_high", "algorithm.epsilon_low algorithm.epsilon_high"),
    entry("trl.importance_sampling_level", "algorithm.loss", "sequence is gspo"),
    entry("trl.mask_truncated_completions", "algorithm.mask_truncated"),
    entry("trl.generation_batch_size", "batch.prompts batch.minibatches"),
    entry("trl.chat_template_kwargs", "data.chat_template_kwargs"),
    entry("trl.off_policy_mask_threshold", "algorithm.off_policy_mask_threshold"),
    entry("trl.use_bias_correction_kl", "algorithm.kl_bias_correction"),
    entry("trl.vllm_importance_sampling_correction trl.vllm_importance_sampling_mode trl.vllm_importance_sampling_cap",
          "algorithm.importance_correction algorithm.importance_max", "only where vLLM samples"),
    entry("trl.log_completions trl.num_completions_to_print", "logging.completions_every logging.completions_shown"),
    entry("trl.replay_buffer_size", "algorithm.replay_groups"),
    entry("trl.reward_num_workers", "rewards.workers", "", lambda count: int(count) if int(count) > 1 else 0),
    entry("remove_unused_columns", note="columns always stay, for the rewards"),
    entry("gradient_checkpointing_kwargs gradient_checkpointing_kwargs.use_reentrant",
          note="there is one way of computing again, `model.remat`"),
    entry("vllm vllm.* vllm.host vllm.port vllm.tensor_parallel_size vllm.gpu_memory_utilization vllm.dtype "
          "vllm.max_model_len trl.use_vllm trl.vllm_mode trl.vllm_server_host trl.vllm_server_port "
          "trl.vllm_server_timeout trl.vllm_enable_sleep_mode trl.vllm_lora_sync trl.vllm_sync_interval", note=VLLM),
    entry("trl.vllm_guided_decoding_regex", note="there is no guided decoding; the reward `regex_match` scores the "
          "form"),
    entry("trl.repetition_penalty trl.generation_kwargs", note="sampling is by temperature, top_k, top_p and min_p"),
    entry("trl.use_data_producer trl.async_prefetch trl.prefetch_depth trl.streaming_partial_batch "
          "trl.streaming_min_groups trl.replay_recompute_logps trl.reroll_start_fraction trl.reroll_max_groups "
          "trl.skip_zero_advantage_batches", note="a step samples, scores and learns, in this order"),
    entry("trl.use_liger_loss dpo_use_liger_kernel dpo_padding_free liger_* plugins flash_attention sdp_attention "
          "xformers_attention attn_implementation torch_compile tf32 pad_to_sequence_len group_by_length "
          "flex_attn* flash_attn* fused_attn_kernel use_kernels cut_cross_entropy "
          "use_scattermoe use_sonicmoe tiled_mlp qat.* lora_mlp_kernel lora_qkv_kernel lora_o_kernel unsloth_* "
          "batch_flattening torch_dtype",
          note="kernels and torch settings; JAX compiles every step"),
    entry("--num-processes num_processes", note="give it to this command: `--devices=N`"),
    entry("fsdp_version ddp_* tensor_parallel_size dp_shard_size dp_replicate_size", note="see `mesh`; it changes no "
          "result"),
    entry("eval_batch_size eval_table_size eval_max_new_tokens eval_sample_packing eval_causal_lm_metrics",
          note="an evaluation has the batches that fit: `eval.prompts` is its size"),
    entry("dataset_prepared_path dataset_processes dataset_num_proc dataloader_num_workers dataloader_pin_memory "
          "dataloader_prefetch_factor dataset_keep_in_memory skip_prepare_dataset", note="`data.cache` and "
          "`data.workers`"),
    entry("wandb_entity wandb_mode wandb_watch wandb_log_model wandb_run_id wandb_* mlflow_tracking_uri mlflow_* "
          "hf_mlflow_log_artifacts swanlab_workspace swanlab_mode swanlab_* trackio_space_id trackio_* comet_*",
          note="where and how a tracker keeps its runs is said to the tracker itself, in its environment variables "
          "(`WANDB_ENTITY`, `WANDB_MODE`, `MLFLOW_TRACKING_URI`, `SWANLAB_MODE`, `TRACKIO_SPACE_ID`)"),
    entry("hub_strategy push_dataset_to_hub hf_use_auth_token",
          note="a run is uploaded once, when it ends, with the token of the variable HF_TOKEN; its data is not"),
    entry("logging_steps save_safetensors debug strict special_tokens.* tokens tokens.* eot_tokens processor_type "
          "tokenizer_* "
          "loss_watchdog_* model_type "
          "tokenizer_config is_llama_derived_model local_rank weight_decay_embeddings "
          "save_only_model lora_modules_to_save lora_fan_in_fan_out process_reward_model",
          note="has no key here; models and tokenizers are as their folder says"),
)  # fmt: skip
