"""Online preferences: pairs of samples, the loss that is learned, settings that do not go with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.config import ConfigError, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.config.unread import unread
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.model import describe
from jaxrl_llm.models.net import Net
from jaxrl_llm.training.learner import _paired
from jaxrl_llm.training.objectives.preference import preference
from jaxrl_llm.training.setup.objectives import preference_spec


def tiny(root, folder, **changes):
    config = load_config_file(f"{root / 'configs/online_dpo.py'}:tiny")
    config.output_dir, config.eval.every, config.logging.backends = str(folder), -1, ("jsonl",)
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    return config


def test_rows_in_pairs():
    """Rows of no pair, and of one that scores alike, have no tokens; everything else of a row moves with it."""
    tokens = jnp.arange(32).reshape(8, 4)
    batch = Batch(Inputs(tokens, jnp.ones_like(tokens)), mask=jnp.ones((8, 4)), ref_logps=-tokens.astype(float))
    scores = jnp.array([1.0, 3.0, 2.0, 0.0, 5.0, 5.0, 5.0, 5.0])
    found, metrics = _paired(batch, scores, 4, 1, make_mesh())
    np.testing.assert_array_equal(found.inputs.tokens[:4, 0] // 4, [1, 3, 2, 0])
    np.testing.assert_array_equal(found.ref_logps, -found.inputs.tokens)
    for rows in (found.mask, found.inputs.segments):
        np.testing.assert_array_equal(rows, np.repeat([1, 1, 0, 0, 0, 0, 0, 0], 4).reshape(8, 4))
    assert {name: float(x) for name, x in metrics.items()} == {"pairs/count": 1.0, "pairs/score_margin": 3.0}
    _, metrics = _paired(batch, jnp.zeros(8), 4, 2, make_mesh())
    assert metrics["pairs/count"] == 0 and np.isnan(metrics["pairs/score_margin"])


def test_means_over_no_pairs_are_no_numbers(root, tmp_path):
    config = tiny(root, tmp_path)
    objective = preference(preference_spec(config), Net(describe("embedded:sort").net.config))
    tokens = jnp.ones((4, 3), jnp.int32)
    batch = objective.prepare(Batch(Inputs(tokens, tokens * 0), mask=jnp.zeros((4, 3))))
    assert np.isnan(batch.prepared.row_weights).all() and np.isnan(batch.prepared.token_share).all()
    batch = objective.prepare(Batch(Inputs(tokens, tokens), mask=jnp.ones((4, 3)).at[3].set(0)))
    np.testing.assert_array_equal(batch.prepared.row_weights, [1, 1, 0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["true", "false"])
def test_a_step_is_one_of_dpo_on_the_pairs_that_were_sampled(root, tmp_path, packing):
    """The parameters after a step are those of an offline step of the same pairs, in micro-batches or not."""
    asked = {}

    def reward(prompts, completions, **_):
        asked["rows"] = list(zip(prompts, completions, strict=True))
        places = [sum(n * ord(letter) for n, letter in enumerate(text, 1)) for text in completions]
        # One that was cut off has no end, which given rows have, and others than digits may have other tokens there.
        return [
            None if len(x) >= 10 or not x.isdigit() else float(n % 7) for x, n in zip(completions, places, strict=True)
        ]

    changes = {"total_steps": 1, "rollout__group_size": 4, "batch__prompts": 4, "batch__packing": packing}
    changes |= {"algorithm__loss": "ipo", "rollout__temperature": 1.1}
    changes |= {"batch__microbatch_rows": 4, "optimizer__warmup_steps": 0, "algorithm__beta": 0.5}
    online = jaxrl_llm.train(tiny(root, tmp_path / "online", **changes), rewards=reward)
    scores = np.array(reward(*zip(*asked["rows"], strict=True)), float).reshape(4, 4)
    rows = np.array(asked["rows"], object).reshape(4, 4, 2)
    pairs = [  # of equal scores the first is better, and the last is worse
        {"prompt": own[0][0], "chosen": own[np.nanargmax(best)][1], "rejected": own[3 - np.nanargmin(best[::-1])][1]}
        for own, best in zip(rows, scores, strict=True)
        if np.nanmax(best) > np.nanmin(best)
    ]
    assert online.metrics[0]["pairs/count"] == len(pairs) > 1
    settings = tiny(root, tmp_path / "offline", **changes)
    settings.algorithm.name = "preference"
    settings.batch.prompts, settings.batch.microbatch_rows, settings.rollout.group_size = len(pairs), 0, 1
    given = jaxrl_llm.train(settings, train_dataset=pairs)
    for name in ("loss", "logps/chosen", "logps/rejected", "grad_norm", "entropy"):
        np.testing.assert_allclose(online.metrics[0][name], given.metrics[0][name], rtol=2e-4, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), online.model.params, given.model.params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout__group_size": 3}, r"rollout.group_size is 3, .* in pairs: set it to 2, or another even number"),
        ({"algorithm__pairs": 2}, "algorithm.pairs is 2, but rollout.group_size = 2 makes 1 pair of"),
        ({"batch__microbatch_rows": 1}, r"batch.microbatch_rows is 1, but the rows of a pair stay together"),
        ({"algorithm__beta": 0.0}, r"algorithm.beta is 0, but preference losses need one above 0"),
        ({"algorithm__loss_weights": (1.0, 2.0)}, r"loss_weights has 2 numbers for the 1 losses"),
        ({"algorithm__entropy_coef": 0.1}, r"algorithm.entropy_coef is 0.1, but .* 'online_preference' learns which"),
        ({"algorithm__kl_in_reward": True}, r"algorithm.kl_in_reward is True, but .* has no such term"),
        ({"algorithm__advantage": "rloo"}, r"algorithm.advantage is 'rloo', but .* has no such term"),
        ({"optimizer__learning_rate": "auto"}, r"learning_rate is auto, .* online_preference: set a number"),
    ],
)
def test_settings_that_do_not_go_with_pairs(root, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        validate(tiny(root, tmp_path, **changes))


@pytest.mark.parametrize("loss", ["kto", "tpo", "bco_pair(running_mean=True)", "ppo_clip"])
def test_losses_of_other_rows(root, tmp_path, loss):
    match = (
        "unknown|no loss|there is no|closest" if loss == "ppo_clip" else r"reads .*, which online_preference has not"
    )
    with pytest.raises(ConfigError, match=match):
        jaxrl_llm.train(tiny(root, tmp_path, algorithm__loss=loss))


def test_settings_without_effect(root, tmp_path):
    config = tiny(root, tmp_path, algorithm__epsilon_high=0.3, algorithm__scale_rewards="none")
    (told,) = unread(config, adapted=False, plays=False)
    assert "reads the ranks of completions and no advantages: " in told
    assert "algorithm.epsilon_high" in told and "algorithm.scale_rewards" in told
    assert not unread(tiny(root, tmp_path), adapted=False, plays=False)
    config.algorithm.name, config.algorithm.loss, config.algorithm.pairs = "grpo", "auto", 2
    assert "which makes no pairs: algorithm.pairs has no effect" in " ".join(unread(config, False, False))
