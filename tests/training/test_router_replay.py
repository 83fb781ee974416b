"""Training with the sampler's experts: a sampler in 8 bits is nearer to the trainer; refused without a record."""

import json
import shutil

import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.models.files import hf

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return write_mixture(tmp_path_factory.mktemp("mixture"), **EXPERTS, initializer_range=0.3)


def write_mixture(folder, **entries):
    """The folder with the shape of a mixture of experts, and the tokenizer of the embedded model."""
    own = hf.locate("embedded:sort")
    for path in own.glob("tokenizer*"):
        shutil.copy(path, folder)
    kind = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(hf.read_config(own) | kind | entries))
    return folder


def config_of(root, folder, model, **options):
    config = load_config_file(f"{root / 'configs' / 'grpo.py'}:tiny")
    config.output_dir, config.eval.every, config.logging.backends = str(folder), -1, ("jsonl",)
    config.model.path, config.model.random_init = str(model), True
    for name, value in options.items():
        config.rollout[name] = value
    return config


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["true", "false"])
def test_log_probs_are_nearer(root, tmp_path, mixture, packing):
    found = []
    for replay in (False, True):
        config = config_of(root, tmp_path / str(replay), mixture, router_replay=replay, weights_dtype="int8")
        config.algorithm.importance_correction, config.batch.packing = "token_truncate", packing
        found.append(jaxrl_llm.train(config).metrics)
    for alone, replayed in zip(*found, strict=True):
        name = "sampling/sampling_logp_difference/mean"
        assert 0 < replayed[name] < 0.9 * alone[name]


def test_a_dense_model_has_nothing_to_replay(root, tmp_path):
    config = config_of(root, tmp_path, "embedded:sort", router_replay=True)
    config.model.random_init = False
    with pytest.raises(ConfigError, match=r"router_replay is true, but .* has no experts"):
        jaxrl_llm.train(config)
    config.algorithm.replay_groups = 4
    with pytest.raises(ConfigError, match=r"router_replay is true, but algorithm\.replay_groups is 4"):
        validate(config)
