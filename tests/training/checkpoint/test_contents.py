"""What a checkpoint holds, and which one becomes the exported model."""

import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxrl_llm
from jaxrl_llm.config import ConfigError

ROWS = [{"prompt": f"sort:{n}=", "completion": "".join(sorted(str(n)))} for n in range(100, 108)]


@pytest.fixture
def config(tmp_path):
    config = jaxrl_llm.default_config()
    config.algorithm.name, config.optimizer.learning_rate, config.total_steps = "sft", 1e-2, 3
    config.output_dir, config.batch.prompts, config.logging.backends = str(tmp_path / "run"), 8, ("jsonl",)
    config.checkpoint.every, config.data.shuffle = 1, False
    return config


def tensors(folder):
    return load_file(folder / "model.safetensors")


def same(one, other):
    return all(np.array_equal(tensor, other[name]) for name, tensor in one.items())


def test_models_beside_states_and_the_best_of_them(config):
    config.checkpoint.contents, config.checkpoint.keep = ("state", "hf"), 5
    config.checkpoint.best, config.checkpoint.best_mode, config.export.best = "loss", "max", True
    result = jaxrl_llm.train(config, ROWS)
    losses = [record["loss"] for record in result.metrics]
    best = int(np.argmax(losses)) + 1
    assert best < 3, losses
    steps = result.output_dir / "hf_steps"
    assert sorted(path.name for path in steps.iterdir()) == ["00001", "00002"]
    exported = tensors(result.output_dir / "hf")
    assert same(exported, tensors(steps / f"{best:05d}"))
    assert not same(exported, tensors(steps / f"{3 - best:05d}"))


def test_the_model_only(config):
    config.checkpoint.contents, config.checkpoint.keep = ("hf",), 1
    result = jaxrl_llm.train(config, ROWS)
    assert [path.name for path in (result.output_dir / "hf_steps").iterdir()] == ["00002"]
    assert not [path for path in (result.output_dir / "checkpoints").iterdir() if path.name.isdigit()]
    assert (result.output_dir / "hf" / "config.json").is_file()
    for settings, words in (
        ({"checkpoint.best": "loss"}, "checkpoint.contents is hf, and the best"),
        ({"checkpoint.contents": ()}, "checkpoint.contents is empty"),
        ({"checkpoint.contents": ("state",), "export.best": True}, "set checkpoint.best"),
    ):
        changed = config.copy_and_resolve_references()
        changed.update_from_flattened_dict(settings)
        with pytest.raises(ConfigError, match=words):
            jaxrl_llm.train(changed, ROWS)
