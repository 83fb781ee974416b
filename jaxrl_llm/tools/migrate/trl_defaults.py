"""What TRL's trainers do with a key that is not set: those of version 1.16, and of 0.16 for GRPO (the older pages)."""

from typing import Any

NEWEST = "1.16"

ONLINE: dict[str, Any] = {
    "learning_rate": 1e-6,
    "max_completion_length": 512,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "num_iterations": 1,
    "epsilon": 0.2,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "mask_truncated_completions": False,
    "shuffle_dataset": True,
}
GRPO = {
    "num_generations": 8,
    "beta": 0.0,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "importance_sampling_level": "token",
    "multi_objective_aggregation": "sum_then_normalize",
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "use_bias_correction_kl": True,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
}
# TRL 0.16: the loss is the token mean of each device's micro-batch, which is called bnpo since.
GRPO_0 = {
    "num_generations": 8,
    "beta": 0.04,
    "loss_type": "bnpo",
    "scale_rewards": True,
    "max_prompt_length": 512,
    "max_completion_length": 256,
    "temperature": 0.9,
    "top_k": 50,
}
PREFERENCE: dict[str, Any] = {"learning_rate": 1e-6, "beta": 0.1, "max_length": 1024, "truncation_mode": "keep_start"}
TRAINERS: dict[str, dict[str, Any]] = {
    "grpo": {**ONLINE, **GRPO},
    "rloo": {**ONLINE, "num_generations": 2, "beta": 0.05, "normalize_advantages": False},
    "ppo": {
        "learning_rate": 3e-6,
        "num_ppo_epochs": 4,
        "num_mini_batches": 1,
        "kl_coef": 0.05,
        "kl_estimator": "k1",
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "gamma": 1.0,
        "lam": 0.95,
        "whiten_rewards": False,
        "temperature": 0.7,
        "response_length": 53,
        "num_generations": 1,
    },
    "sft": {"learning_rate": 2e-5, "max_length": 1024, "truncation_mode": "keep_start", "loss_type": "nll"},
    "dpo": {**PREFERENCE, "loss_type": ["sigmoid"], "f_divergence_type": "reverse_kl"},
    "kto": {**PREFERENCE, "loss_type": "kto", "train_sampling_strategy": "sequential"},
    "orpo": PREFERENCE,
    "cpo": {**PREFERENCE, "loss_type": "sigmoid", "cpo_alpha": 1.0, "simpo_gamma": 0.5, "alpha": 0.0},
    "reward": {"learning_rate": 1e-4, "max_length": 1024, "truncation_mode": "keep_start"},
}  # fmt: skip
COMMON: dict[str, Any] = {
    "output_dir": "trainer_output",
    "seed": 42,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "optim": "adamw_torch",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "save_strategy": "steps",
    "save_steps": 500,
    "eval_strategy": "no",
    "report_to": "none",
    "log_completions": False,
    "logging_steps": 10,
    "gradient_checkpointing": True,
    "dtype": "float32",
}
VERSIONS = {NEWEST: COMMON, "0.16": {**COMMON, "gradient_checkpointing": False, "logging_steps": 500, "bf16": False}}


def defaults(trainer: str, version: str = "") -> dict[str, Any]:
    """The defaults of a trainer of a version of TRL; empty is the newest."""
    found = {**VERSIONS[version or NEWEST], **TRAINERS[trainer]}
    if version == "0.16" and trainer == "grpo":
        found = {key: value for key, value in found.items() if key not in GRPO} | GRPO_0
    return found
