"""The recipes: what their tables say of them, their configurations, and the shapes of the models that they train."""

import math
import re

import jax
import pytest

from benchmarks import recipes
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file, shipped_configs
from jaxrl_llm.config.resolve import import_file
from jaxrl_llm.config.tree import validate
from jaxrl_llm.models.files.hf import load_net
from jaxrl_llm.rewards.runner import load_rewards

# Parameters as the models' makers count them, embeddings once.
PARAMETERS = {
    "HuggingFaceTB/SmolLM2-135M": 134.5e6,
    "HuggingFaceTB/SmolLM2-1.7B": 1.711e9,
    "Qwen/Qwen3-0.6B": 0.596e9,
    "Qwen/Qwen3-1.7B": 1.721e9,
    "Qwen/Qwen3-8B": 8.191e9,
    "Qwen/Qwen3-32B": 32.76e9,
    "meta-llama/Llama-3.2-1B": 1.236e9,
    "google/gemma-3-1b": 1.000e9,
}
ROWS = [(path, row) for path in recipes.recipes() for row in recipes.rows(path)]
MODELS = import_file(recipes.FOLDER / "_models.py").MODELS


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    recipes.write_shapes(folder)
    return folder


def test_the_shapes_are_those_of_the_models(shapes):
    assert PARAMETERS.keys() == recipes.SHAPES.keys()
    for name, count in PARAMETERS.items():
        abstract = jax.tree.leaves(jax.eval_shape(load_net(shapes / name).init, jax.random.key(0)))
        assert sum(math.prod(x.shape) for x in abstract) == pytest.approx(count, rel=2e-3), name


@pytest.mark.parametrize(("path", "row"), ROWS, ids=[f"{path.stem}:{row[0]}" for path, row in ROWS])
def test_a_row_of_a_recipe_is_a_configuration(path, row, shapes):
    argument, devices, memory, status, published = row
    config = load_config_file(f"{path}:{argument}")
    validate(config)
    assert (shapes / config.model.path / "config.json").is_file()
    assert not config.teacher.path or (shapes / config.teacher.path / "config.json").is_file()
    assert argument.replace(",", "-") in config.output_dir and path.stem in config.output_dir
    assert bool(config.lora.rank) == (argument == "qwen3-8b")
    assert (config.mesh.fsdp == -1) == (int(devices) > 1)
    least, most = map(int, re.fullmatch(r"(\d+) to (\d+)", memory).groups())
    assert least <= most and least <= 72  # GB that an H100 has free
    assert status in ("planned", "measured") and published


def test_adapters_and_all_of_a_model_are_arguments():
    for path in recipes.recipes():
        lora, full = (load_config_file(f"{path}:qwen3-0.6b,{way}") for way in ("lora", "full"))
        assert (lora.lora.rank, full.lora.rank) == (32, 0)
        assert lora.optimizer.learning_rate > full.optimizer.learning_rate
        assert len({lora.output_dir, full.output_dir, load_config_file(f"{path}:qwen3-0.6b").output_dir}) == 3


def test_other_arguments_are_refused_by_name():
    for path in recipes.recipes():
        for argument in ("qwen3-0.7b", "qwen3-0.6b,qlora", ""):
            with pytest.raises(ConfigError, match=rf"{path.stem}.py has no argument '{argument}'.*qwen3-1.7b"):
                load_config_file(f"{path}:{argument}")
    assert {name for name in shipped_configs() if "/" in name} == {f"recipes/{path.stem}" for path in recipes.recipes()}


def test_recipes_cover_the_models():
    for path in recipes.recipes():
        named = {row[0].partition(",")[0] for row in recipes.rows(path)}
        assert named <= MODELS.keys() and (
            named == MODELS.keys() or path.stem in ("grpo_countdown", "distill_gsm8k", "async_gsm8k")
        )


def test_problems_of_gsm8k_have_prompts_and_answers():
    gsm8k = import_file(recipes.FOLDER / "grpo_gsm8k.py")
    row = gsm8k.problem({"question": "2 apples and 1,998?", "answer": "2 + 1998 = <<2+1998=2000>>2000\n#### 2,000"})
    assert row["answer"] == "2,000" and row["prompt"][0]["content"].startswith("2 apples and 1,998?\n")
    rewards = load_rewards(gsm8k.get_config().rewards.functions)
    given = rewards(["p"] * 2, ["So it is\n#### 2000", "1998"], [[1], [1]], {"answer": [row["answer"]] * 2})
    assert given.tolist() == [[1.0], [0.0]]


def test_the_page_has_the_recipes():
    assert recipes.page() in recipes.PAGE.read_text()
