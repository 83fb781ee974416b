"""A run of TRL's trainers: one batch a step, nothing recomputed."""

import os

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from benchmarks.race.contests import HELD_OUT, Row, Settings
from benchmarks.race.record import Record


def run(method: str, folder: str, rows: list[Row], record: Record, s: Settings, seed: int, output: str) -> None:
    """Trains until the level is reached, or for all steps."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))

    class Ends(TrainerCallback):
        """Keeps losses, and ends the run at the level."""

        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = control.should_training_stop or record.done()
            return control

        def on_evaluate(self, args, state, control, metrics=None, **_):
            record.loss(state.global_step, metrics["eval_loss"])
            return self.on_step_end(args, state, control)

    def load():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    common = {
        "output_dir": output, "max_steps": s.steps, "seed": seed, "per_device_train_batch_size": s.prompts * s.group,
        "learning_rate": s.learning_rate, "adam_beta2": 0.99, "warmup_steps": 5,
        "lr_scheduler_type": "constant_with_warmup", "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "save_strategy": "no", "report_to": "none", "logging_steps": s.steps, "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    parts = {"model": load(), "processing_class": AutoTokenizer.from_pretrained(folder), "callbacks": [Ends()]}
    if method == "grpo":
        args = GRPOConfig(
            **common, num_generations=s.group, max_completion_length=s.tokens, temperature=1.0, num_iterations=1,
            beta=0.0, epsilon=0.2, epsilon_high=0.28, loss_type="dapo",
        )  # fmt: skip
        GRPOTrainer(**parts, reward_funcs=record, train_dataset=Dataset.from_list(rows), args=args).train()
        return
    parts |= {"train_dataset": Dataset.from_list(rows[HELD_OUT:]), "eval_dataset": Dataset.from_list(rows[:HELD_OUT])}
    # All held-out rows are one batch, as the loss that TRL reports is the mean of its batches'.
    common |= {
        "eval_strategy": "steps", "eval_steps": s.every, "eval_on_start": True, "per_device_eval_batch_size": HELD_OUT,
        "max_length": s.prompt_tokens + s.tokens,
    }  # fmt: skip
    if method == "dpo":
        DPOTrainer(**parts, ref_model=load(), args=DPOConfig(**common, beta=0.1)).train()
    else:
        SFTTrainer(**parts, args=SFTConfig(**common)).train()
