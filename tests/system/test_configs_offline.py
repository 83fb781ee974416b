"""Every config of an offline algorithm runs its two `:tiny` steps, and leaves a model that can be loaded again."""

import math

import jax
import pytest

from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.models.model import load_model
from jaxrl_llm.train import train

PAIR_METRICS = {
    "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected",
    "logits/chosen", "logits/rejected",
}  # fmt: skip
METRICS = {
    "sft": {"mean_token_accuracy"},
    "dpo": PAIR_METRICS,
    "ipo": PAIR_METRICS,
    "kto": PAIR_METRICS | {"kl"},
    "orpo": PAIR_METRICS | {"nll_loss", "log_odds_ratio", "log_odds_chosen"},
    "cpo": PAIR_METRICS | {"nll_loss"},
    "simpo": PAIR_METRICS | {"nll_loss"},
    "alphapo": PAIR_METRICS | {"nll_loss"},
    "tpo": PAIR_METRICS | {"nll_loss"},
    "reward_model": {"accuracy", "margin", "min_reward", "mean_reward", "max_reward"},
    "prm": {"accuracy", "accuracy_wrong", "accuracy_right", "margin", "mean_reward"},
}
HEADS = {"reward_model": ("score", "LlamaForSequenceClassification"), "prm": ("step", "LlamaForTokenClassification")}


# Of the others sft is that of tests/training/runtime/test_callbacks.py, and all but prm have objectives of dpo's kind.
QUICK = ("dpo", "reward_model")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in METRICS])
def test_config_runs(name, root, tmp_path):
    config = load_config_file(f"{root / 'configs' / name}.py:tiny")
    config.output_dir, config.logging.backends = str(tmp_path / "run"), ("jsonl",)
    config.checkpoint.every, config.eval.every = 0, 0
    if name != "dpo":
        config.eval.measure = "auto"  # that samples can be measured too is shown once
    result = train(config)
    assert [line["step"] for line in result.metrics] == [0, 1, 2]
    expected = METRICS[name] | (set() if name in HEADS else {"entropy"})
    assert result.metrics[1].keys() >= expected | {"loss", "grad_norm", "num_tokens", "step_time"}
    assert result.metrics[0].keys() >= {f"eval/{metric}" for metric in expected | {"loss"}}
    assert ("eval/greedy_accuracy" in result.metrics[0]) == (name == "dpo")
    assert all(math.isfinite(value) for line in result.metrics for value in line.values())
    assert result.metrics[0]["eval/loss"] != result.metrics[2]["eval/loss"]
    head, architecture = HEADS.get(name, ("lm", "LlamaForCausalLM"))
    again = load_model(tmp_path / "run/hf", head=head)
    assert jax.tree.map(lambda x: x.shape, again.params) == jax.tree.map(lambda x: x.shape, result.model.params)
    assert again.hf_config["architectures"] == [architecture]
