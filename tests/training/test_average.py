"""The moving average of the policy (BEMA): its formula, TRL's callback, resumed runs, adapters, and the reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.data import tasks
from jaxrl_llm.distributed.sharding import bytes_on_device, make_mesh
from jaxrl_llm.models.adapters.lora import LoraConfig, merge
from jaxrl_llm.models.model import load_model
from jaxrl_llm.tools.plan.shapes import describe
from jaxrl_llm.train import train
from jaxrl_llm.training.average import Average, AverageSpec
from jaxrl_llm.training.reference import Reference, ReferenceSpec
from jaxrl_llm.training.update import State

SPEC = AverageSpec(
    every=2, start=0, ema_power=0.5, bias_power=0.2, lag=10, multiplier=1.0, min_ema_multiplier=0.0, offload=False
)


def average_of(values, spec=SPEC, dtype=jnp.float32):
    """The averages after each step of a run whose only parameter has these values, the first before any step."""
    average = Average(spec, None, ())
    average.begin({"w": jnp.full(3, values[0], dtype)})
    found = []
    for step, value in enumerate(values[1:], start=1):
        average.update(step, {"w": jnp.full(3, value, dtype)})
        found.append(float(average.params["w"][0]))
    return found


def test_the_formula_by_hand():
    """Updates after steps 2 and 4; before the first it is what the run began with."""
    b2, a2, b4, a4 = 12**-0.5, 12**-0.2, 14**-0.5, 14**-0.2
    ema2 = (1 - b2) * 1.0 + b2 * 3.0
    ema4 = (1 - b4) * ema2 + b4 * -1.0
    found = average_of([1.0, 5.0, 3.0, 9.0, -1.0, 7.0])
    expected = [1.0, ema2 + a2 * 2.0, ema2 + a2 * 2.0, ema4 - a4 * 2.0, ema4 - a4 * 2.0]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_it_begins_with_the_policy_of_a_later_step():
    found = average_of([1.0, 5.0, 3.0, 9.0, 4.0], dataclasses.replace(SPEC, start=1))
    b3, a3 = 13**-0.5, 13**-0.2
    np.testing.assert_allclose(found, [1.0, 1.0, (1 - b3) * 5 + b3 * 9 + a3 * 4, found[2]], rtol=1e-6)


def test_the_smallest_weight_and_an_uncorrected_average():
    spec = dataclasses.replace(SPEC, every=1, min_ema_multiplier=0.5, bias_power=99.0)
    np.testing.assert_allclose(average_of([0.0, 8.0, 8.0, 8.0], spec), [4.0, 6.0, 7.0], rtol=1e-6)
    np.testing.assert_allclose(dataclasses.replace(SPEC, multiplier=2.0).weights(3), (16**-0.5, 16**-0.2))


def test_the_moving_average_of_a_policy_in_16_bits_is_float32():
    """Shares of a small difference are below the spacing of bfloat16: summed up in it they would be lost."""
    spec = dataclasses.replace(SPEC, every=1, ema_power=2.0, bias_power=99.0)
    average = Average(spec, None, ())
    average.begin({"w": jnp.ones(3, jnp.bfloat16)})
    for step in range(1, 9):
        average.update(step, {"w": jnp.full(3, 1.0625, jnp.bfloat16)})
    weights = np.prod([1 - (10 + step) ** -2.0 for step in range(1, 9)])
    assert average.ema["w"].dtype == jnp.float32 and average.params["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(average.ema["w"], 1.0625 - 0.0625 * weights, rtol=1e-6)


def test_updates_of_the_policy_may_take_its_arrays():
    """An update donates them, as soon as the average has taken them in."""
    policy = {"w": jnp.arange(3.0)}
    average = Average(SPEC, None, ())
    average.begin(policy)
    policy["w"].delete()
    second = {"w": jnp.full(3, 2.0)}
    average.update(2, second)
    second["w"].delete()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(average.arrays())))


def test_frozen_parts_and_adapters():
    average = Average(SPEC, None, ("vision",))
    params = {"vision": {"w": jnp.ones(2)}, "layers": {"w": jnp.zeros(2)}}
    average.begin(params)
    assert average.params.keys() == {"layers"}
    assert average.of_model(params)["vision"]["w"] is params["vision"]["w"]

    lora = LoraConfig(rank=1, alpha=2.0, targets=("q",))

    def adapted(scale):
        linear = {"kernel": jnp.eye(2), "lora_a": scale * jnp.ones((2, 1)), "lora_b": scale * jnp.ones((1, 2))}
        return {"q": linear}

    average = Average(dataclasses.replace(SPEC, every=1), lora, ())
    average.begin(adapted(0.0))
    average.update(1, adapted(3.0))
    start, policy = (np.asarray(merge(adapted(scale), lora)["q"]["kernel"]) for scale in (0.0, 3.0))
    b, a = 11**-0.5, 11**-0.2
    found = average.of_model(adapted(3.0))
    assert found["q"].keys() == {"kernel"}
    np.testing.assert_allclose(found["q"]["kernel"], (1 - b) * start + b * policy + a * (policy - start), rtol=1e-6)


def test_the_reference_follows_the_average():
    """From step 3 on every second step, whatever the policy is then."""
    average = Average(dataclasses.replace(SPEC, every=1), None, ())
    average.begin({"w": jnp.zeros(3)})
    spec = ReferenceSpec("base", False, ref_sync_steps=2, ref_mixup_alpha=1.0, ref_sync_after=3, seed=0)
    reference = Reference({"w": jnp.full(3, -1.0)}, spec, average=average)
    seen, expected = [], []
    for step, value in enumerate([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], start=1):
        average.update(step, {"w": jnp.full(3, value)})
        reference.sync(State(jnp.asarray(step), {"w": jnp.full(3, value)}, ()))
        seen.append(float(reference.params["w"][0]))
        expected.append(float(average.params["w"][0]))
    assert seen == [-1.0, -1.0, expected[2], expected[2], expected[4], expected[4]]
    assert average.params["w"][0] == expected[5]  # its arrays are its own


SHAPE = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "settings",
    [
        {"update_freq": 1},
        {"update_freq": 2, "update_after": 3, "multiplier": 0.5, "lag": 3, "ema_power": 0.7, "bias_power": 0.4},
        {"update_freq": 3, "min_ema_multiplier": 0.4, "bias_power": 0.0},
    ],
)
def test_ten_steps_are_those_of_trl(settings):
    """The callback's own methods on a tiny llama whose parameters are moved at random, its reference model too."""
    torch = pytest.importorskip("torch")
    bema = pytest.importorskip("trl.experimental.bema_for_ref_model")
    from types import SimpleNamespace

    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model, reference_model = (LlamaForCausalLM(LlamaConfig(**SHAPE)) for _ in range(2))
    reference_model.load_state_dict(model.state_dict())
    callback = bema.BEMACallback(**settings, update_ref_model=True, ref_model_update_freq=4, ref_model_update_after=2)

    def params(of=model):
        return {name: jnp.asarray(x.detach().numpy().copy()) for name, x in of.named_parameters()}

    names = {"update_freq": "every", "update_after": "start"}
    spec = dataclasses.replace(SPEC, **{"every": 400} | {names.get(key, key): x for key, x in settings.items()})
    average = Average(spec, None, ())
    average.begin(params())
    follows = ReferenceSpec("base", False, ref_sync_steps=4, ref_mixup_alpha=1.0, ref_sync_after=2, seed=0)
    reference = Reference(params(), follows, average=average)
    callback.on_train_begin(None, None, None, model)
    moved = False
    for step in range(1, 11):
        with torch.no_grad():
            for x in model.parameters():
                x += 0.1 * torch.randn(x.shape)
        callback.on_step_end(None, SimpleNamespace(global_step=step), None, model, ref_model=reference_model)
        average.update(step, params())
        reference.sync(State(jnp.asarray(step), params(), ()))
        for ours, theirs in ((average.params, callback.running_model), (reference.params, reference_model)):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), ours, params(theirs))
        moved = moved or bool(jnp.abs(average.params["lm_head.weight"] - average.start["lm_head.weight"]).max() > 0.1)
    assert moved


# --- runs ---


def config_of(folder, **settings):
    config = default()
    config.algorithm.name, config.algorithm.loss, config.algorithm.beta = "preference", "dpo", 0.5
    config.batch.prompts, config.total_steps, config.eval.every = 4, 6, -1
    config.optimizer.learning_rate, config.checkpoint.every = 1e-3, 3
    config.average.every, config.output_dir, config.logging.backends = 1, str(folder), ()
    for name, value in settings.items():
        section, _, key = name.partition("__")
        config[section][key] = value
    return config


FOLLOWING = {"algorithm__ref_sync_to": "average", "algorithm__ref_sync_steps": 2, "algorithm__ref_mixup_alpha": 1.0}


def leaves(folder):
    return jax.tree.leaves(jax.device_get(load_model(folder).params))


@pytest.mark.slow
def test_a_run_writes_its_average_and_a_resumed_one_the_same_bits(tmp_path):
    """DPO whose reference follows the average; evaluations are of the average, which is another model than hf/."""
    pairs = tasks.generate("sort_pairs", size=24)
    settings = FOLLOWING | {"eval__every": 6, "eval__measure": "loss", "eval__prompts": 8, "average__evaluate": True}
    whole = train(config_of(tmp_path / "whole", **settings), pairs, pairs[:8]).metrics
    resumed = config_of(tmp_path / "resumed", **settings)
    resumed.total_steps = 3
    train(resumed, pairs, pairs[:8])
    resumed.total_steps = 6
    last = train(resumed, pairs, pairs[:8]).metrics[-1]
    for name in ("loss", "rewards/chosen", "eval/loss"):
        assert last[name] == whole[-1][name], name
    averaged, again, trained = (leaves(tmp_path / name) for name in ("whole/average", "resumed/average", "whole/hf"))
    assert all((a == b).all() for a, b in zip(averaged, again, strict=True))
    assert any((a != b).any() for a, b in zip(averaged, trained, strict=True))


@pytest.mark.slow
def test_what_is_evaluated_is_the_average(tmp_path):
    """The loss on held-out rows is that of the model in average/, before training that of the start."""
    pairs = tasks.generate("sort_pairs", size=24)
    settings = {"eval__every": 0, "eval__measure": "loss", "eval__prompts": 8, "algorithm__loss": "cpo"}
    measured = {}
    for evaluate in (False, True):
        folder = tmp_path / str(evaluate)
        metrics = train(config_of(folder, **settings, average__evaluate=evaluate), pairs, pairs[:8]).metrics
        measured[evaluate] = [line["eval/loss"] for line in metrics if "eval/loss" in line]
    assert measured[True][0] == measured[False][0] and measured[True][1] != measured[False][1]
    again = config_of(tmp_path / "again", **settings, model__path=str(tmp_path / "True/average"))
    first = train(again, pairs, pairs[:8]).metrics[0]
    np.testing.assert_allclose(first["eval/loss"], measured[True][1], rtol=1e-5)


@pytest.mark.slow
def test_adapters_are_averaged_merged(tmp_path):
    pairs = tasks.generate("sort_pairs", size=24)
    adapters = {"lora__rank": 2, "lora__reference": "copy", "optimizer__learning_rate": 1e-2}
    evaluated = {"eval__every": 6, "eval__measure": "both", "eval__prompts": 4, "average__evaluate": True}
    config = config_of(tmp_path, **FOLLOWING, **adapters, **evaluated)
    config.rollout.max_prompt_length, config.rollout.max_completion_length = 16, 10
    metrics = train(config, pairs, pairs[:4]).metrics
    assert "eval/accuracy" in metrics[-1] and np.isfinite(metrics[-1]["eval/loss"])
    averaged, trained = leaves(tmp_path / "average"), leaves(tmp_path / "hf")
    assert any((a != b).any() for a, b in zip(averaged, trained, strict=True))


@pytest.mark.slow
def test_the_best_checkpoint_has_its_own_average(tmp_path):
    pairs = tasks.generate("sort_pairs", size=24)
    settings = {"checkpoint__best": "num_tokens", "checkpoint__best_mode": "min", "export__best": True}
    train(config_of(tmp_path / "best", **settings), pairs)
    three = config_of(tmp_path / "three")
    three.total_steps = 3
    train(three, pairs)
    for name in ("hf", "average"):
        best, expected = (leaves(tmp_path / run / name) for run in ("best", "three"))
        assert all((a == b).all() for a, b in zip(best, expected, strict=True)), name


def test_an_average_that_no_checkpoint_has_begins_with_the_policy():
    average = Average(SPEC, None, ())
    average.begin({"w": jnp.zeros(3)})
    average.restore({}, {"w": jnp.full(3, 2.0)})
    assert [float(x["w"][0]) for x in (average.ema, average.start, average.params)] == [2.0, 2.0, 2.0]


@pytest.mark.slow
def test_every_mesh_averages_alike(run_python, root, tmp_path):
    """On one device, and sharded over four with the average in the host's memory, where a run is interrupted, too."""
    averaging = [f"--config.{key.replace('__', '.')}={value}" for key, value in FOLLOWING.items()]
    averaging += ["--config.average.every=1", "--config.eval.every=-1", "--config.optimizer.warmup_steps=0"]
    command = ["-m", "jaxrl_llm.train", f"--config={root / 'configs/dpo.py'}:tiny", *averaging]
    command += ["--config.optimizer.eps=1e-4", "--config.optimizer.learning_rate=1e-3"]
    sharded = ["--config.mesh.fsdp=2", "--config.mesh.data=2", "--config.average.offload=true"]
    command += ["--config.optimizer.schedule=constant"]
    for folder, steps, devices, flags in (("one", 4, 1, []), ("four", 2, 4, sharded), ("four", 4, 4, sharded)):
        said = [f"--config.total_steps={steps}", f"--config.output_dir={folder}"]
        done = run_python(*command, *flags, *said, devices=devices)
        assert done.returncode == 0, done.stderr[-3000:]
    for one, four in zip(leaves(tmp_path / "one/average"), leaves(tmp_path / "four/average"), strict=True):
        np.testing.assert_allclose(four, one, atol=2e-6)


def test_the_plan_counts_the_average(tmp_path):
    """Three trees as large as the trained parameters, on the devices or in the host's memory."""
    for offload in (False, True):
        config, mesh = config_of(tmp_path, average__offload=offload), make_mesh(devices=jax.devices()[:1])
        shapes = describe(config, mesh, "float32", True)
        trained = bytes_on_device(shapes.state.params)
        assert bytes_on_device(shapes.average, host=offload) == 3 * trained
        assert bytes_on_device(shapes.average, host=not offload) == 0


# --- refusals ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"average__every": 0, "average__lag": 3.0}, r"average\.lag is 3\.0, but average\.every is 0"),
        ({"average__start": 6}, r"average\.start \+ average\.every is 7, .* but total_steps is 6"),
        (
            {"average__lag": 0.0, "average__multiplier": 0.5},
            r"average\.lag is 0 and multiplier 0\.5, .* an age of 0\.5",
        ),
        ({"average__evaluate": True}, r"average\.evaluate is true, but eval\.every is -1"),
        ({"algorithm__ref_sync_to": "average"}, r"algorithm\.ref_sync_to is 'average', but algorithm\.ref_sync_steps"),
        ({"algorithm__ref_sync_after": 5}, r"algorithm\.ref_sync_after is 5, but algorithm\.ref_sync_steps is 0"),
        (FOLLOWING | {"average__every": 0}, r"algorithm\.ref_sync_to is average, but average\.every is 0"),
        (FOLLOWING | {"lora__rank": 2, "lora__reference": "start"}, r"lora\.reference is 'start': set it to copy"),
        ({"lora__rank": 2, "model__quantize": "int8"}, r"average\.every is 1, but the matrices are quantised"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        validate(config_of(tmp_path, **settings))
