"""optimizer.learning_rate=auto, and advice on rates of full training for adapters."""

import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError, default, from_json, to_json, validate
from jaxrl_llm.config.flags import load_config_file, load_flags
from jaxrl_llm.training.setup.learning_rate import rule, with_learning_rate


def auto(**changes):
    config = default()
    config.optimizer.learning_rate, config.algorithm.name = "auto", "sft"
    config.update_from_flattened_dict(changes)
    return config


@pytest.mark.parametrize(
    ("model_type", "width", "adapters", "rate"),
    [
        ("llama", 4096, True, 2.857e-4),
        ("llama", 4096, False, 2.857e-5),
        ("llama", 2000, True, 5e-4),
        ("qwen3", 4096, True, 4.730e-4),
        ("qwen3_moe", 2048, False, 4.991e-5),
    ],
)
def test_the_rule(model_type, width, adapters, rate):
    assert rule(model_type, width, adapters) == pytest.approx(rate, rel=1e-3)
    config, notes = with_learning_rate(auto(), model_type, width, adapters)
    assert config.optimizer.learning_rate == rule(model_type, width, adapters)
    kind = "adapters" if adapters else "full training"
    assert notes == [
        f"optimizer.learning_rate: auto is {rule(model_type, width, adapters):.3g}, for {kind} of a {model_type} of "
        f"width {width} (docs/adapters.md)"
    ]


def test_other_families_and_losses_are_refused():
    with pytest.raises(
        ConfigError, match="auto, a rule that was fitted to llama and qwen models, but this is a gemma2"
    ):
        with_learning_rate(auto(), "gemma2", 2304, True)
    with pytest.raises(ConfigError, match=r"a rule for sft and for algorithms that sample, but algorithm.name is pref"):
        validate(auto(**{"algorithm.name": "preference", "algorithm.loss": "dpo", "algorithm.beta": 0.1}))
    with pytest.raises(ConfigError, match=r"optimizer.warmup_init is 1e-06, and learning_rate auto"):
        validate(auto(**{"optimizer.warmup_init": 1e-6, "optimizer.warmup_steps": 2}))
    config = default()
    with pytest.raises(ConfigError, match=r"optimizer.learning_rate is 'fast', but it takes a number .* or auto"):
        config.optimizer.learning_rate = "fast"
    with pytest.raises(ConfigError, match=r"critic.learning_rate is 'auto'"):
        config.critic.learning_rate = "auto"


def test_the_word_is_kept_and_gives_way_to_a_number():
    config = auto()
    validate(config)
    assert from_json(to_json(config)).optimizer.learning_rate == "auto"
    config.optimizer.learning_rate = 1
    assert isinstance(config.optimizer.learning_rate, float)
    assert load_flags(["--config.optimizer.learning_rate=auto"], "")[0].optimizer.learning_rate == "auto"


@pytest.mark.parametrize(
    ("name", "rate", "optimizer", "adapters", "told"),
    [
        ("grpo", 1e-6, "adamw", True, True),
        ("grpo", 1e-5, "adamw", True, False),
        ("grpo", 1e-6, "adamw", False, False),
        ("grpo", 1e-6, "lion", True, False),
        ("sft", 2e-5, "adamw", True, True),
        ("sft", 2e-4, "adamw", True, False),
    ],
)
def test_a_rate_of_full_training_for_adapters_is_told(name, rate, optimizer, adapters, told):
    config = default()
    config.algorithm.name, config.optimizer.learning_rate, config.optimizer.name = name, rate, optimizer
    same, notes = with_learning_rate(config, "gemma2", 512, adapters)
    assert same is config
    assert len(notes) == told
    assert all("a rate of full training: adapters learn with about ten times as much" in note for note in notes)


@pytest.mark.slow
def test_a_run_with_the_rule_and_its_resume(root, tmp_path):
    def run():
        config = load_config_file(f"{root / 'configs/sft.py'}:tiny")
        config.output_dir, config.eval.every, config.logging.backends = str(tmp_path / "run"), -1, ("jsonl",)
        config.optimizer.learning_rate, config.optimizer.schedule, config.lora.rank = "auto", "constant", 4
        config.optimizer.warmup_steps, config.checkpoint.every, config.total_steps = 0, 1, steps
        return jaxrl_llm.train(config)

    steps = 1
    first = run()
    width = first.model.net.config.width
    assert first.metrics[-1]["lr"] == pytest.approx(rule(first.model.hf_config["model_type"], width, adapters=True))
    steps = 2
    second = run()
    assert [line["step"] for line in second.metrics] == [1, 2] and second.metrics[0] == first.metrics[0]
