"""Python scripts of Tunix, read from their syntax tree under the keys of its command line: a script is not run."""

import ast
import re
from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate.draft import Source
from jaxrl_llm.tools.migrate.scripts import Script
from jaxrl_llm.tools.migrate.table import rules
from jaxrl_llm.tools.migrate.values import Unknown, call_name

OPTIMIZER = "rl_training_config.actor_optimizer_config"
# Classes -> the section of their arguments, and the trainer that they tell.
CLASSES = {
    "GRPOConfig": ("grpo_config", "grpo"),
    "GrpoConfig": ("grpo_config", "grpo"),
    "DAPOConfig": ("grpo_config", "dapo"),
    "DrGRPOConfig": ("grpo_config", "drgrpo"),
    "PPOConfig": ("ppo_config", "ppo"),
    "PpoConfig": ("ppo_config", "ppo"),
    "DPOTrainingConfig": ("dpo_config", "dpo"),
    "RLTrainingConfig": ("rl_training_config", ""),
    "TrainingConfig": ("training_config", ""),
    "RolloutConfig": ("rollout_config", ""),
    "ClusterConfig": ("", ""),
    "LoraProvider": ("actor_model_config.lora_config", ""),
    "MetricsLoggerOptions": ("TRAINING.metrics_logging_options", ""),
    "CheckpointManagerOptions": ("TRAINING.checkpointing_options", ""),
}
OF_DPO = (  # arguments of DPOTrainingConfig that are not those of TrainingConfig
    "algorithm", "beta", "lambda_orpo", "label_smoothing", "enable_prompt_loss_orpo", "average_log_prob_orpo",
    "max_prompt_length", "max_response_length",
)  # fmt: skip
OBJECTS = (  # arguments that are objects which other calls make
    "role_to_mesh", "training_config", "rollout_config", "actor_optimizer", "critic_optimizer", "data_type",
    "metrics_logging_options", "checkpointing_options", "profiler_options", "perf_metrics_options",
    "rollout_mapping_config",
)  # fmt: skip
MODEL = re.compile(r"[\w.-]+/[\w.-]+")


def read_tunix(text: str, path: str, trainer: str, companion: str) -> Source:
    """Return the keys that a script of Tunix sets, under the names of its command line, and its reward functions.

    Raises ConfigError when it configures no trainer that is known.
    """
    script = Script(text, path, companion, {})
    # The first of each: a second RolloutConfig is that of evaluations.
    calls = {call_name(node): node for node in reversed(script.calls)}
    told = [CLASSES[name][1] for name in CLASSES if name in calls and CLASSES[name][1]]
    trainer = trainer or next(iter(told), "sft" if "PeftTrainer" in calls else "")
    if not trainer:
        known = ", ".join(name for name, (_, told) in CLASSES.items() if told)
        raise ConfigError(f"{path} has no call of {known} or PeftTrainer, and so it configures no trainer of Tunix")
    online = trainer in ("grpo", "dapo", "drgrpo", "ppo")
    training, optimizer = ("rl_training_config", OPTIMIZER) if online else ("training_config", "optimizer_config")
    settings: dict[str, Any] = {}

    def add(section: str, given: dict[str, Any]) -> None:
        for key, value in given.items():
            if key not in OBJECTS and value is not ...:
                settings[f"{section}.{key}".lstrip(".")] = value

    for name, (section, _) in CLASSES.items():
        if name in calls and not (name == "TrainingConfig" and online):
            add(section.replace("TRAINING", training), script.arguments(calls[name], []))
    for key in [key for key in settings if key.startswith("dpo_config.")]:
        if key.partition(".")[2] not in OF_DPO:
            settings[f"training_config.{key.partition('.')[2]}"] = settings.pop(key)
    if not online:
        settings = {key.replace("actor_model_config.", "model_config."): value for key, value in settings.items()}
    known = rules("tunix")["calls"]["optimizers"]
    for name in (name for name in known if name in calls):  # optax.adamw(schedule), and the schedule
        given = script.arguments(calls[name], known[name].split())
        if not name.endswith("schedule"):
            settings[f"{optimizer}.opt_type"] = name
            if isinstance(given.get("learning_rate"), Unknown):
                del given["learning_rate"]
        else:
            settings[f"{optimizer}.schedule_type"] = name
        add(optimizer, given)
    if "clip_by_global_norm" in calls and calls["clip_by_global_norm"].args:
        settings[f"{optimizer}.clip_by_global_norm"] = script.value(calls["clip_by_global_norm"].args[0])
    learner = next((node for name, node in calls.items() if name.endswith("Learner")), None)
    for keyword in learner.keywords if learner else ():
        if keyword.arg == "reward_fns" and (named := script.named("reward_funcs", keyword.value)) is not ...:
            names = [named] if isinstance(named, str) else named
            parts = [name.partition(".") for name in names]  # function, or module.function
            settings["reward_functions"] = [
                f"{script.imported[head].replace(':', '.')}:{tail}"
                if head in script.imported and tail
                else f"{head}{dot}{tail}"
                for head, dot, tail in parts
            ]
        elif keyword.arg in ("env_class", "agent_class", "env_kwargs", "agent_kwargs"):
            settings[keyword.arg] = ast.unparse(keyword.value)
    for node in script.calls:
        if call_name(node) == "batch" and node.args and isinstance(size := script.value(node.args[0]), int):
            settings.setdefault("batch_size", size)
        elif call_name(node) in ("from_pretrained", "snapshot_download", "hf_pipeline"):
            given = [script.value(part) for part in (*node.args, *(keyword.value for keyword in node.keywords))]
            name = next((one for one in given if isinstance(one, str) and MODEL.fullmatch(one)), None)
            if name:
                settings.setdefault("model_config.model_id", name)
    return script.source("tunix", trainer, settings, path)
