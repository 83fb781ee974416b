"""Runs of TRL's GRPO and RLOO from a script on: `migrate` reads it, `train` is given the same completions, and the
rewards, advantages, corrections, updates and final parameters are the same."""

import itertools
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm.data import tasks
from jaxrl_llm.models.files.hf import EMBEDDED
from jaxrl_llm.tools.migrate import migrate
from jaxrl_llm.train import train

torch = pytest.importorskip("torch")
trl = pytest.importorskip("trl", minversion="1.16")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LONGEST = 10
PROMPTS = [{"prompt": row["prompt"]} for row in tasks.generate("sort", size=32)]
SETTINGS = {  # of a TRL script
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": LONGEST,
    "max_steps": 4,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "adam_beta2": 0.99,
    "adam_epsilon": 1e-4,
    "weight_decay": 0.1,
    "shuffle_dataset": False,
    "reward_weights": [1.0, 0.5],
    "save_strategy": "no",
    "bf16": False,
}
HERE = {"use_cpu": True, "gradient_checkpointing": False, "logging_steps": 1, "report_to": [], "disable_tqdm": True}
METRICS = (
    "reward", "reward_std", "frac_reward_zero_std", "loss", "grad_norm", "entropy", "completions/mean_length",
    "completions/clipped_ratio", "completions/max_terminated_length", "clip_ratio/region_mean",
    "sampling/sampling_logp_difference/mean",
)  # fmt: skip
FUNCTIONS = """
import json
from pathlib import Path

CALLS = iter(json.loads(Path(__file__).with_suffix(".json").read_text()))


def sampled(prompts, trainer):
    ids = [row for row in trainer.tokenize(prompts) for _ in range(trainer.num_generations)]
    return {"prompt_ids": ids, **next(CALLS)}
"""


def in_order(completions, **_):
    return [sum(a <= b for a, b in itertools.pairwise(text)) / 8 for text in completions]


def short(completions, **_):
    return [None if len(text) > 7 else 1.0 - 0.1 * len(text) for text in completions]


def rare(completions, **_):
    return [None if len(text) % 3 == 0 else 0.1 * len(text) for text in completions]


def run_trl(name, settings, rewards, noise, tmp_path):
    """TRL's trainer after its run on completions of random digits; `noise` is on the log-probs that "vLLM" has."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, draw = AutoTokenizer.from_pretrained(EMBEDDED / "sort"), np.random.default_rng(0)
    digits = [token for text, token in tokenizer.get_vocab().items() if text.isdigit()]

    class Recording(getattr(trl, f"{name}Trainer")):
        def __init__(self, *args, **kwargs):
            self.losses, self.calls = [], []
            super().__init__(*args, **kwargs)

        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            ids, logprobs = [], []
            for prompt in prompt_ids:
                row = draw.choice(digits, size=draw.integers(1, LONGEST + 1)).tolist()
                ids.append(row if len(row) == LONGEST else [*row, tokenizer.eos_token_id])
                with torch.no_grad():
                    logits = self.model(torch.tensor([[*prompt, *ids[-1]]])).logits[0, len(prompt) - 1 : -1]
                own = logits.log_softmax(-1)[torch.arange(len(ids[-1])), ids[-1]].numpy()
                logprobs.append((own + noise * draw.normal(size=len(own))).tolist())
            self.calls.append({"completion_ids": ids, "logprobs": logprobs})
            return ids if name == "RLOO" else (ids, logprobs if self.use_vllm else None)

        def _compute_loss(self, *args, **kwargs):
            loss = super()._compute_loss(*args, **kwargs)
            self.losses.append(float(loss.detach()))
            return loss

    settings = {key: value for key, value in settings.items() if key != "use_vllm"}
    trainer = Recording(
        model=AutoModelForCausalLM.from_pretrained(EMBEDDED / "sort", dtype=torch.float32),
        reward_funcs=rewards,
        args=getattr(trl, f"{name}Config")(output_dir=str(tmp_path / "trl"), **settings, **HERE),
        train_dataset=Dataset.from_list(PROMPTS),
        processing_class=tokenizer,
    )
    trainer.use_vllm = noise > 0  # as if it had sampled
    trainer.train()
    return trainer


def run_ours(name, settings, rewards, calls, tmp_path):
    """The metrics and the Hugging Face tensors of a run of the configuration that the script becomes."""
    script, functions = tmp_path / "script.py", tmp_path / "rollouts.py"
    named = [f"rewards.py:{reward.__name__}" for reward in rewards]
    written = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    script.write_text(
        f"from trl import {name}Config, {name}Trainer\n\nargs = {name}Config(output_dir='o', {written})\n"
        f"{name}Trainer('embedded:sort', {named}, args=args, train_dataset='task:sort')\n"
    )
    config, _ = migrate(script, devices=1)
    functions.write_text(FUNCTIONS)
    functions.with_suffix(".json").write_text(json.dumps(calls))
    config.output_dir, config.logging.backends, config.rollout.max_prompt_length = str(tmp_path / "ours"), (), 16
    config.environment.rollout_func = f"{functions}:sampled"
    if config.algorithm.importance_correction == "none":  # the ratio of the policy's own samples is 1
        config.algorithm.importance_correction = "token_truncate"
    result = train(config, train_dataset=PROMPTS, rewards=rewards)
    updates = config.batch.minibatches * config.algorithm.num_iterations
    return result.metrics, load_file(tmp_path / "ours/hf/model.safetensors"), updates


CASES = [
    pytest.param(
        "GRPO",
        {"loss_type": "grpo", "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}
        | {"ref_model_mixup_alpha": 0.7, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        [short, rare],  # of some completions neither says anything
        0.0,
        id="a reference that follows",
    ),
    pytest.param(
        "GRPO",
        {"loss_type": "dapo", "scale_rewards": "batch", "steps_per_generation": 2, "num_iterations": 2}
        | {"epsilon_high": 0.28, "mask_truncated_completions": True, "max_steps": 8, "warmup_steps": 4},
        [in_order, rare],
        0.0,
        id="two minibatches, twice",
    ),
    pytest.param(
        "GRPO",
        {"loss_type": "dr_grpo", "scale_rewards": "none", "use_vllm": True}
        | {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 1.5}
        | {"vllm_importance_sampling_clip_min": 0.5},
        [in_order, short],
        0.1,
        id="another sampler",
    ),
    pytest.param(
        "RLOO",
        {"beta": 0.05, "normalize_advantages": True, "reward_clip_range": (0.2, 0.7), "num_iterations": 2}
        | {"warmup_steps": 2},
        [in_order, rare],
        0.0,
        id="rloo",
    ),
]


@pytest.mark.parametrize(("name", "settings", "rewards", "noise"), CASES)
def test_a_script(name, settings, rewards, noise, tmp_path, monkeypatch):
    monkeypatch.setattr(f"trl.trainer.{name.lower()}_trainer.shuffle_sequence_dict", lambda rows: rows)
    settings = SETTINGS | settings
    trainer = run_trl(name, settings, rewards, noise, tmp_path)
    metrics, tensors, updates = run_ours(name, settings, rewards, trainer.calls, tmp_path)
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    losses = np.reshape(trainer.losses, (len(logged), -1)).sum(axis=1)
    for entry, loss in zip(logged, losses, strict=True):
        entry["loss"] = loss
    assert len(metrics) * updates == len(logged)
    # TRL's deviation of a group with one reward is NaN, so that it does not count among those that teach nothing.
    uncounted = {"frac_reward_zero_std"} if short in rewards and rare in rewards else set()
    if "gradient_accumulation_steps" in settings:  # it averages those of micro-batches, whatever their tokens
        uncounted |= {"entropy", "clip_ratio/region_mean"}
    for metric in set(METRICS) & set(logged[0]) - uncounted:  # a step here is of several updates there
        theirs = [
            np.mean([entry[metric] for entry in logged[start : start + updates] if entry.get(metric) is not None])
            for start in range(0, len(logged), updates)
        ]
        ours = [line[metric] for line in metrics]
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5, err_msg=metric)
    start = load_file(EMBEDDED / "sort/model.safetensors")
    theirs = {key: x.detach().numpy() for key, x in trainer.model.state_dict().items()}
    assert max(np.abs(theirs[key] - start[key]).max() for key in start) > 1e-3
    for key, tensor in tensors.items():
        np.testing.assert_allclose(tensor, theirs[key], rtol=1e-4, atol=2e-5, err_msg=key)
