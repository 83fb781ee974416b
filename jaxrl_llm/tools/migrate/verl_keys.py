"""Every key of verl's ppo_trainer.yaml (FSDP and Megatron), sft_trainer.yaml and evaluation.yaml."""

from jaxrl_llm.tools.migrate.table import Entry, entry, same

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
ENGINE = "there is no second engine: the sampler is built in and shares the policy's parameters"
OVERLONG = "`truncate_left`, `truncate_right`, `truncate_middle`, `error`; filter_overlong_prompts is `filter`"
SHARDED = "`mesh.fsdp` is the number of devices that share parameters and optimizer state; it changes no result"
CHUNKS = "log-probs are computed in the micro-batches of the update, and in chunks of the vocabulary"
STEPS = "of the policy's optimizer; a step here has train_batch_size / ppo_mini_batch_size x ppo_epochs updates"


def _each(section: str, keys: str) -> str:
    return " ".join(f"{section}.{key}" for key in keys.split())


DATA: tuple[Entry, ...] = (
    entry("data.train_files", "data.path data.sources", "a list is `data.sources`"),
    entry("data.val_files", "data.eval_path data.eval_split eval.sets", "a list is `eval.sets`; all rows there, "
          "`eval.prompts` (128) here"),
    entry("data.prompt_key", "data.prompt_key", "of sft_trainer.yaml `question` by default", same),
    entry("data.max_prompt_length", "rollout.max_prompt_length", "", same),
    entry("data.max_response_length", "rollout.max_completion_length", "512 by default there, 256 here", same),
    entry("data.train_batch_size", "batch.prompts", "prompts in both (1024 by default there); of sft rows", same),
    entry("data.max_length", "data.max_length", "of sft_trainer.yaml", same),
    entry("data.shuffle", "data.shuffle", "", same),
    entry("data.seed", "seed", "", same),
    entry("data.truncation data.filter_overlong_prompts", "data.overlong", OVERLONG),
    entry("data.return_raw_input_ids data.return_raw_chat data.return_full_prompt", "data.format",
          "columns for rewards: `verl(return_raw_chat=True)`"),
    entry("data.trust_remote_code", "model.trust_remote_code", "for tokenizers; models are written in JAX"),
    entry("data.custom_cls.path data.custom_cls.name custom_cls.path custom_cls.name", "data.path", "`file.py:Class`"),
    entry("data.apply_chat_template_kwargs", "data.chat_template_kwargs", ""),
    entry("data.filter_overlong_prompts_workers", "data.workers", "threads; 0, the default here, is one a core", same),
    entry("data.tokenizer", note="the tokenizer of `model.path`"),
    entry("data.image_key data.video_key", note="models read text only"),
    entry("data.reward_fn_key data.train_max_samples data.val_max_samples data.val_batch_size data.tool_config_path "
          "data.dataloader_num_workers data.validation_shuffle data.return_multi_modal_inputs data.image_patch_size "
          "data.use_shm data.sampler.* data.datagen.* data.balance_dp_token data.chat_template", note="has no key "
          "here"),
    entry("data.path data.response_key data.data_source_key data.reward_model_key", note="of evaluation.yaml, which "
          "scores given responses: `python -m jaxrl_llm evaluate --responses=FILE`, with the other three under their "
          "own names, `--response_key=responses`"),
    entry("data.micro_batch_size_per_gpu data.micro_batch_size", "batch.microbatch_rows", "of sft; times the GPUs"),
    entry("data.multiturn.* data.prompt_dict_keys data.response_dict_keys", "data.format",
          "`messages` are known; other columns by a format of your own, `file.py:function`"),
)  # fmt: skip

MODEL: tuple[Entry, ...] = (
    entry(f"{M}.path model.partial_pretrain", "model.path", "", same),
    entry(f"{M}.trust_remote_code model.trust_remote_code", "model.trust_remote_code", "for tokenizers"),
    entry(f"{M}.enable_gradient_checkpointing {M}.enable_activation_offload model.enable_gradient_checkpointing",
          "model.remat", "`block`, and `offload` where activations are offloaded; on by default in verl now"),
    entry(f"{M}.lora_rank {M}.lora.rank model.lora_rank", "lora.rank", "", same),
    entry(f"{M}.lora_alpha {M}.lora.alpha model.lora_alpha", "lora.alpha", "", same),
    entry(f"{M}.target_modules model.target_modules", "lora.targets", "",
          lambda names: (names,) if isinstance(names, str) else tuple(names)),
    entry(f"{M}.lora_adapter_path", "lora.path", "", same),
    entry(f"{M}.override_config.moe_config.freeze_moe_router", "model.freeze_router", "", same),
    entry("model.fsdp_config.model_dtype", "model.param_dtype", "fp32 by default in both",
          lambda name: {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(str(name), str(name))),
    entry(f"{M}.override_config.* {M}.override_config.model_config", note="models have no dropout, and config.json "
          "says "
          "the rest"),
    entry(f"{M}.external_lib {M}.external_libs model.external_lib", note="families of models are in the package"),
    entry(f"{M}.use_remove_padding use_remove_padding", note="of prompts and completions only the used length is "
          "computed; `data.packing` is for sft"),
    entry(f"{M}.use_liger model.use_liger {M}.use_fused_kernels {A}.use_fused_kernels", note="the log-probs are always "
          "computed in chunks of the vocabulary"),
    entry(f"{M}.hf_config_path {M}.tokenizer_path {M}.use_shm {M}.custom_chat_template {M}.exclude_modules "
          f"{M}.tiled_mlp.* "
          f"{M}.fused_kernel_options.* {M}.mtp.* model.strategy model.use_shm", note="has no key here"),
)  # fmt: skip

ACTOR: tuple[Entry, ...] = (
    entry(f"{A}.ppo_mini_batch_size", "batch.minibatches", "prompts of an update there (times n); here how many "
          "updates "
          "a batch makes"),
    entry(f"{A}.ppo_micro_batch_size_per_gpu {A}.ppo_micro_batch_size trainer.nnodes trainer.n_gpus_per_node",
          "batch.microbatch_rows", "rows of all devices here: times the GPUs; it changes no result"),
    entry(f"{A}.ppo_epochs", "algorithm.num_iterations", "", same),
    entry(f"{A}.shuffle", "batch.shuffle", "", same),
    entry(f"{A}.grad_clip {A}.optim.clip_grad optim.clip_grad", "optimizer.max_grad_norm", "", same),
    entry(f"{A}.clip_ratio {A}.clip_ratio_low {A}.clip_ratio_high", "algorithm.epsilon_low algorithm.epsilon_high",
          "verl now reads the last two alone, 0.2 each unless set"),
    entry(f"{A}.clip_ratio_c", "algorithm.dual_clip", "3.0 by default there, off here", same),
    entry(f"{A}.policy_loss.loss_mode {A}.policy_loss.clip_cov_ratio {A}.policy_loss.clip_cov_lb "
          f"{A}.policy_loss.clip_cov_ub {A}.policy_loss.kl_cov_ratio {A}.policy_loss.ppo_kl_coef {A}.tau_pos "
          f"{A}.tau_neg",
          "algorithm.loss", "vanilla is ppo_clip, gpg reinforce, geo_mean gmpo"),
    entry(f"{A}.loss_agg_mode", "algorithm.aggregation", "token-mean (the default there) is token; seq-mean-token-mean "
          "sequence, seq-mean-token-sum sequence_sum, seq-mean-token-sum-norm constant"),
    entry(f"{A}.entropy_coeff", "algorithm.entropy_coef", "", same),
    entry(f"{A}.use_kl_loss {A}.kl_loss_coef", "algorithm.beta", "off by default there"),
    entry(f"{A}.kl_loss_type algorithm.kl_penalty", "algorithm.kl", "kl is k1, mse k2, low_var_kl k3; full is not "
          "there"),
    entry(f"{A}.optim.lr optim.lr", "optimizer.learning_rate", "", same),
    entry(f"{A}.optim.lr_warmup_steps {A}.optim.lr_warmup_steps_ratio optim.lr_warmup_steps "
          "optim.lr_warmup_steps_ratio optim.warmup_steps_ratio", "optimizer.warmup_steps optimizer.warmup_ratio",
          "steps below 0 mean the ratio"),
    entry(f"{A}.optim.min_lr_ratio", "optimizer.min_lr_ratio", "", same),
    entry(f"{A}.optim.num_cycles", "optimizer.cycles", "", same),
    entry(f"{A}.optim.warmup_style {A}.optim.lr_scheduler_type optim.lr_scheduler optim.lr_decay_style "
          f"{A}.optim.lr_decay_style", "optimizer.schedule", "the shape after the warm-up"),
    entry(f"{A}.optim.weight_decay optim.weight_decay", "optimizer.weight_decay optimizer.no_decay", "0.01 by default "
          "there, 0 here; verl decays norms and biases too", same),
    entry(f"{A}.optim.betas optim.betas", "optimizer.b1 optimizer.b2", "0.95 for sft there"),
    entry(f"{A}.optim.optimizer {A}.optim.optimizer_impl optim.optimizer", "optimizer.name"),
    entry(f"{A}.optim.min_lr optim.min_lr", "optimizer.min_lr_ratio", "Megatron: as a fraction of the peak"),
    entry(f"{A}.optim.lr_wsd_decay_steps optim.lr_wsd_decay_steps", "optimizer.decay_steps", "Megatron"),
    entry(f"{A}.optim.lr_wsd_decay_style optim.lr_wsd_decay_style", "optimizer.decay_shape", "Megatron", same),
    entry(f"{A}.fsdp_config.optimizer_offload", "optimizer.offload", "", same),
    entry(f"{A}.fsdp_config.fsdp_size", "mesh.fsdp mesh.data", "-1, all devices, is the default there and is written; "
          "1, copies, is ours"),
    entry(f"{A}.ulysses_sequence_parallel_size ulysses_sequence_parallel_size", "mesh.context", "devices that share a "
          "row"),
    entry(f"{A}.use_dynamic_bsz {A}.ppo_max_token_len_per_gpu", "batch.microbatch_tokens", "micro-batches of so many "
          "tokens; it changes no result"),
    entry(f"{A}.strategy", note="there is one way to share parameters, the `mesh`"),
    entry(f"{A}.data_loader_seed", note="`seed` makes every order"),
    entry(f"{A}.use_torch_compile {A}.entropy_from_logits_with_chunking {A}.entropy_checkpointing "
          f"{A}.calculate_entropy "
          f"{A}.use_prefix_grouper {A}.loss_scale_factor {A}.freeze_vision_tower {A}.use_remove_padding {A}.profiler.* "
          f"{A}.router_replay.* {A}.calculate_sum_pi_squared {A}.sum_pi_squared_checkpointing {A}.rollout_n "
          f"{A}.megatron.*", note="a setting of torch; JAX compiles every step"),
    entry(f"{A}.optim.total_training_steps optim.total_training_steps", note="`total_steps`, of which the schedule "
          "knows"),
    entry(f"{A}.optim.override_optimizer_config {A}.optim.override_optimizer_config.*", note="see the keys of "
          "`optimizer`"),
    entry("optim.lr_warmup_init optim.lr_decay_steps optim.weight_decay_incr_style "
          f"optim.use_checkpoint_opt_param_scheduler {A}.optim.lr_warmup_init {A}.optim.lr_decay_steps "
          f"{A}.optim.weight_decay_incr_style {A}.optim.use_checkpoint_opt_param_scheduler",
          note="Megatron: warm-up starts at 0, the decay ends with the run, weight decay is constant, and the schedule "
          "is that of the configuration"),
    entry(f"{A}.fsdp_config.param_offload {A}.fsdp_config.wrap_policy.* {A}.fsdp_config.wrap_policy.min_num_params "
          f"{A}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap {A}.fsdp_config.* model.fsdp_config.cpu_offload "
          "model.fsdp_config.offload_params model.fsdp_config.wrap_policy.min_num_params model.fsdp_config.*",
          note=SHARDED),
    entry(f"{A}.checkpoint.save_contents {A}.checkpoint.load_contents {A}.checkpoint.* trainer.checkpoint.*",
          note="checkpoints are whole, and `hf` is written at the end"),
)  # fmt: skip

REF, CRITIC = "actor_rollout_ref.ref", "critic"
ROLLOUT: tuple[Entry, ...] = (
    entry(f"{R}.n", "rollout.group_size", "1 by default there, 8 here", same),
    entry(f"{R}.temperature", "rollout.temperature", "", same),
    entry(f"{R}.top_p", "rollout.top_p", "", same),
    entry(f"{R}.top_k", "rollout.top_k", "-1 is 0", lambda k: max(int(k), 0)),
    entry(f"{R}.val_kwargs.n", "eval.samples eval.estimate eval.extremes", "1 by default there; above it best@k, "
          "worst@k and maj@k as verl draws them", same),
    entry(f"{R}.val_kwargs.temperature {R}.val_kwargs.do_sample", "eval.temperature eval.greedy", "an evaluation there "
          "is greedy unless it samples; here it also may be both"),
    entry(f"{R}.val_kwargs.top_k", "eval.top_k", "-1 is 0"),
    entry(f"{R}.val_kwargs.top_p", "eval.top_p"),
    entry(f"{R}.max_num_seqs", "rollout.slots", "of each GPU there, of all devices here; it changes no sample"),
    entry(f"{R}.prompt_length {R}.response_length", "rollout.max_prompt_length rollout.max_completion_length",
          "copies of data.max_prompt_length and data.max_response_length"),
    entry(f"{R}.multi_turn.max_assistant_turns", "environment.max_turns", "", same),
    entry(f"{REF}.fsdp_config.param_offload", "algorithm.offload_reference", "", same),
    entry(f"{R}.do_sample", note="training always samples: temperature must be above 0"),
    entry(f"{R}.ignore_eos", note="a completion ends with the model's end of text"),
    entry(f"{R}.quantization", "rollout.weights_dtype algorithm.importance_correction", "fp8; a correction must be "
          "chosen: `token_truncate` is written unless rollout_correction is set"),
    entry(f"{R}.dtype", note="the policy's own parameters sample, in its type; `rollout.weights_dtype` is another"),
    entry(f"{R}.tensor_model_parallel_size", note="sampling is on the training mesh: `mesh.tensor`"),
    entry(f"{R}.name {R}.mode {R}.gpu_memory_utilization {R}.enforce_eager {R}.free_cache_engine {R}.load_format "
          f"{R}.max_num_batched_tokens {R}.engine_kwargs.vllm.swap_space "
          f"{R}.engine_kwargs.vllm.disable_mm_preprocessor_cache "
          f"{R}.engine_kwargs.sglang.attention_backend {R}.engine_kwargs.* {R}.enable_chunked_prefill "
          f"{R}.enable_prefix_caching {R}.max_model_len {R}.data_parallel_size {R}.expert_parallel_size "
          f"{R}.pipeline_model_parallel_size {R}.agent.* {R}.multi_turn.* {R}.calculate_log_probs {R}.trace.* "
          f"{R}.profiler.* {R}.prometheus.* {R}.checkpoint_engine.* {R}.disable_log_stats {R}.skip_* {R}.quantization* "
          f"{R}.layered_summon {R}.logprobs_mode {R}.scheduling_policy {R}.cudagraph_capture_sizes "
          f"{R}.multi_stage_wake_up {R}.enable_rollout_routing_replay {R}._target_ "
          f"{A}._target_ {M}._target_ {A}.optim._target_ {R}.val_kwargs._target_ "
          f"{R}.over_sample_rate "
          "actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout", note=ENGINE),
    entry(f"{R}.log_prob_micro_batch_size {R}.log_prob_micro_batch_size_per_gpu {R}.log_prob_use_dynamic_bsz "
          f"{R}.log_prob_max_token_len_per_gpu {REF}.log_prob_micro_batch_size {REF}.log_prob_micro_batch_size_per_gpu "
          f"{REF}.log_prob_use_dynamic_bsz {REF}.log_prob_max_token_len_per_gpu", note=CHUNKS),
    entry(f"{REF}.ulysses_sequence_parallel_size {REF}.fsdp_config.wrap_policy.min_num_params {REF}.fsdp_config.* "
          f"{REF}.strategy {REF}.*", note="the reference is on the policy's mesh"),
)  # fmt: skip

REWARDS: tuple[Entry, ...] = (
    entry("custom_reward_function.path custom_reward_function.name", "rewards.functions", "`file.py:compute_score`; "
          "unset, verl chooses by data_source, and a function must be named here"),
    entry("custom_reward_function.reward_kwargs custom_reward_function.reward_kwargs.*", "rewards.functions",
          "options in brackets: `file.py:f(a=1)`"),
    entry("reward_model.enable reward_model.model.path", "rewards.functions", "`model:<path>`"),
    entry("reward_model.max_length", "rewards.functions", "option max_length"),
    entry("reward_model.micro_batch_size_per_gpu", "rewards.functions", "option rows"),
    entry("reward_model.reward_manager", "rewards.workers algorithm.overlong_buffer", "prime scores in processes: "
          "`rewards.workers`; dapo with reward_model.reward_kwargs is `algorithm.overlong_buffer`"),
    entry("reward_model.reward_kwargs.overlong_buffer_cfg.enable reward_model.reward_kwargs.overlong_buffer_cfg.len "
          "reward_model.overlong_buffer.enable reward_model.overlong_buffer.len", "algorithm.overlong_buffer"),
    entry("reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor reward_model.overlong_buffer.penalty_factor "
          "reward_model.reward_kwargs.* reward_model.overlong_buffer.*", note="the punishment is at most 1"),
    entry("reward_model.model.input_tokenizer", note="a reward model always reads text with its own tokenizer and "
          "chat template"),
    entry("reward_model.model.external_lib reward_model.model.trust_remote_code reward_model.model.fsdp_config.* "
          "reward_model.model.fsdp_config.min_num_params reward_model.model.fsdp_config.param_offload "
          "reward_model.strategy reward_model.use_dynamic_bsz reward_model.micro_batch_size "
          "reward_model.sandbox_fusion.* "
          "reward_model.launch_reward_fn_async reward_model.enable_resource_pool reward_model.n_gpus_per_node "
          "reward_model.nnodes reward_model.reward_loop_* reward_model.rollout.* reward_model.use_reward_loop "
          "reward_model.num_workers "
          "reward_model.model.* reward_model.profiler.* reward_manager.*",
          note="has no key here"),
)  # fmt: skip

ALGORITHM: tuple[Entry, ...] = (
    entry("algorithm.adv_estimator", "algorithm.name algorithm.advantage", "gae is ppo; grpo_passk is passk"),
    entry("algorithm.gamma algorithm.gemma algorithm.lam", "algorithm.advantage", "`ppo(gamma=1.0, lam=1.0)`; the page "
          "writes gemma once"),
    entry("algorithm.norm_adv_by_std_in_grpo", "algorithm.scale_rewards", "False is none"),
    entry("algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef", "algorithm.beta algorithm.kl_in_reward", "verl "
          "allows "
          "it beside use_kl_loss; here one of them is chosen, the loss"),
    entry("algorithm.kl_ctrl.type", "algorithm.kl_controller"),
    entry("algorithm.kl_ctrl.horizon", "algorithm.kl_horizon"),
    entry("algorithm.kl_ctrl.target_kl", "algorithm.kl_target"),
    entry("algorithm.filter_groups.enable algorithm.filter_groups.max_num_gen_batches",
          "algorithm.dynamic_sampling algorithm.max_sampling_rounds"),
    entry("algorithm.filter_groups.metric", note="groups are judged by their scores"),
    entry("algorithm.rollout_correction.rollout_is algorithm.rollout_correction.rollout_is_threshold",
          "algorithm.importance_correction algorithm.importance_max", "token_truncate, sequence_truncate"),
    entry("algorithm.use_pf_ppo algorithm.pf_ppo.* algorithm.rollout_correction.*", note="has no key here"),
    entry("critic.optim.lr", "critic.learning_rate", "", same),
    entry("critic.grad_clip critic.optim.clip_grad", "critic.max_grad_norm", "", same),
    entry("critic.cliprange_value", "critic.epsilon", "0.5 by default there, 0.2 here", same),
    entry("critic.model.path", "critic.path", "", same),
    entry("critic.optim.lr_scheduler_type critic.optim.warmup_style", "critic.schedule", "", same),
    entry("critic.*", note="the critic has the policy's batches, mesh and weight decay"),
)  # fmt: skip

TRAINER: tuple[Entry, ...] = (
    entry("trainer.total_epochs trainer.total_training_steps", "total_steps", "epochs need the number of rows, which "
          "is counted where the file is here: `--rows=N`"),
    entry("trainer.default_local_dir", "output_dir", "`checkpoints/PROJECT/EXPERIMENT` by default there"),
    entry("trainer.project_name", "logging.project output_dir", "of the trackers, and in the default folder"),
    entry("trainer.experiment_name", "logging.run_name output_dir", "of the trackers, and in the default folder"),
    entry("trainer.logger", "logging.backends", "console and jsonl (`file` there) are always written; besides them "
          "wandb, swanlab, mlflow, tensorboard and trackio"),
    entry("trainer.log_val_generations", "logging.completions_shown", "of training; 0 shows none"),
    entry("trainer.save_freq", "checkpoint.every", "-1 is 0, after the last step only"),
    entry("trainer.test_freq", "eval.every eval.at_end", "-1 there is no evaluation but the first; 0 here is before "
          "and after training, -1 none"),
    entry("trainer.val_before_train", "eval.at_start", "on by default in both"),
    entry("trainer.critic_warmup", "critic.warmup_steps", "one less: verl's N gives N - 1 steps"),
    entry("trainer.resume_mode trainer.resume_from_path", "checkpoint.resume", "auto; disable is never; a path is one "
          "of our checkpoints"),
    entry("trainer.max_actor_ckpt_to_keep trainer.max_ckpt_to_keep trainer.remove_previous_ckpt_in_save",
          "checkpoint.keep checkpoint.keep_every", "unset keeps all there: `keep_every=1`; 2 here"),
    entry("trainer.seed", "seed", "", same),
    entry("trainer.default_hdfs_dir trainer.del_local_ckpt_after_load trainer.max_critic_ckpt_to_keep",
          note="checkpoints stay in `output_dir`, policy and critic together"),
    entry("trainer.ray_wait_register_center_timeout ray_kwargs.* ray_init.* trainer.device trainer.balance_batch "
          "trainer.val_only trainer.rollout_data_dir trainer.validation_data_dir trainer.esi_redundant_time "
          "trainer.use_legacy_worker_impl global_profiler.* transfer_queue.* hydra.* hydra.searchpath defaults",
          note="there is no Ray: one command on each host"),
)  # fmt: skip

TABLE = (*DATA, *MODEL, *ACTOR, *ROLLOUT, *REWARDS, *ALGORITHM, *TRAINER)
