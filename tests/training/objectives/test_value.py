"""PPO's critic: values of the state before each token, its own update, its warm-up, and saving it."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.commands.export import export
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.adapters.lora import without_adapters
from jaxrl_llm.models.logprobs import token_values
from jaxrl_llm.models.model import load_model, save_hf
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.train import train
from jaxrl_llm.training.microbatch import BatchSpec
from jaxrl_llm.training.objectives.policy_gradient import policy_gradient
from jaxrl_llm.training.objectives.value import value_regression
from jaxrl_llm.training.optimizers import build_optimizer
from jaxrl_llm.training.setup.mesh import build_mesh
from jaxrl_llm.training.setup.models import build_critic, build_model
from jaxrl_llm.training.setup.objectives import critic_spec, objective_of, policy_spec
from jaxrl_llm.training.setup.run import CriticAlone, build
from jaxrl_llm.training.setup.specs import critic_optimizer_spec, update_spec
from jaxrl_llm.training.step import improve
from jaxrl_llm.training.update import NOTHING, State, init_state, make_critic_update, merge_frozen, optimizer_step
from tests.models.decoding import logits_of

NET = Net(
    ModelConfig(
        vocab_size=31, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=24, head="score", init_scale=0.3
    )
)
PARAMS = jax.jit(NET.init)(jax.random.key(0))


def make_batch() -> Batch:
    draw = np.random.default_rng(0)
    segments = np.array([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]], np.int32)
    mask = np.array([[0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1]], np.float32)
    values, returns = (draw.normal(size=mask.shape).astype(np.float32) * mask for _ in range(2))
    tokens = draw.integers(0, 31, mask.shape).astype(np.int32)
    return Batch(Inputs(tokens, segments, prompt_width=3), mask, values=values, returns=returns)


def test_a_value_is_of_the_state_before_the_token():
    batch = make_batch()
    scores = np.asarray(logits_of(NET, PARAMS, batch.inputs.tokens, batch.inputs.segments))
    values = np.asarray(token_values(NET, PARAMS, batch.inputs))
    np.testing.assert_allclose(values[1, 3:], scores[1, 2:-1], rtol=1e-5)
    np.testing.assert_allclose(values[0, 3:5], scores[0, 2:4], rtol=1e-5)
    assert values[0, 5] == 0
    assert (values[:, :3] == 0).all()
    changed = batch.inputs.tokens.copy()
    changed[:, 4] = (changed[:, 4] + 1) % 31  # the value of token 4 does not see token 4
    again = np.asarray(token_values(NET, PARAMS, batch.inputs.replace(tokens=changed)))
    np.testing.assert_array_equal(again[:, 4], values[:, 4])
    assert again[1, 5] != values[1, 5]


@pytest.mark.parametrize("epsilon", [0.2, None])
def test_the_loss_is_half_the_clipped_squared_error(epsilon):
    config, batch = default(), make_batch()
    config.critic.epsilon = epsilon
    objective = value_regression(critic_spec(config), NET)
    loss, metrics = jax.jit(objective.loss)(PARAMS, objective.prepare(batch))
    values = np.asarray(token_values(NET, PARAMS, batch.inputs))
    error = (values - batch.returns) ** 2
    if epsilon is not None:
        near = np.clip(values, batch.values - epsilon, batch.values + epsilon)
        error = np.maximum(error, (near - batch.returns) ** 2)
    np.testing.assert_allclose(loss, 0.5 * (error * batch.mask).sum() / batch.mask.sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["vpred_mean"], (values * batch.mask).sum() / batch.mask.sum(), rtol=1e-5)


def test_the_critic_has_its_own_optimizer_settings():
    config = default()
    config.critic.learning_rate, config.critic.max_grad_norm = 0.5, 7.0
    spec = critic_optimizer_spec(config)
    assert (spec.learning_rate, spec.max_grad_norm) == (0.5, 7.0)
    assert config.optimizer.learning_rate == 1e-6


def ppo(root, folder, steps: int, warmup: int = 0):
    config = load_config_file(f"{root / 'configs/ppo.py'}:tiny")
    config.output_dir, config.total_steps, config.critic.warmup_steps = str(folder), steps, warmup
    config.eval.every, config.checkpoint.every, config.optimizer.warmup_steps = -1, 1, 0
    config.logging.backends = ("jsonl",)
    return config


@pytest.mark.slow
def test_warm_up_moves_the_critic_only_and_a_resumed_run_equals_a_whole_one(root, tmp_path):
    start = load_model("embedded:sort").params
    first = train(ppo(root, tmp_path / "parts", 1, warmup=1))
    assert {"critic/loss", "critic/lr"} <= first.metrics[-1].keys()
    assert not {"loss", "grad_norm", "lr", "entropy", "policy_term"} & first.metrics[-1].keys()
    jax.tree.map(np.testing.assert_array_equal, first.model.params, start)
    critic = load_model(tmp_path / "parts/critic", head="score")
    assert critic.net.config.head == "score"
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), critic.params["layers"], start["layers"])
    assert all(jax.tree.leaves(moved))
    parts = train(ppo(root, tmp_path / "parts", 2, warmup=1))
    config = ppo(root, tmp_path / "whole", 2, warmup=1)
    config.checkpoint.contents = ("state", "hf")
    whole = train(config)
    beside = load_model(tmp_path / "whole/hf_steps/00001/critic", head="score")
    exported = load_model(export(tmp_path / "whole", tmp_path / "exported", step=1, critic=True), head="score")
    for other in (beside, exported):
        jax.tree.map(np.testing.assert_array_equal, other.params, critic.params)
    assert any(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), parts.model.params, start)))
    jax.tree.map(np.testing.assert_array_equal, parts.model.params, whole.model.params)
    a, b = (load_model(tmp_path / name / "critic", head="score").params for name in ("parts", "whole"))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert {"critic/loss", "critic/grad_norm", "critic/explained_variance", "kl"} <= parts.metrics[-1].keys()


def test_steps_that_warm_the_critic_up_leave_the_policy_out():
    config, mesh = default(), make_mesh(devices=jax.devices()[:1])
    config.critic.learning_rate = 1e-2
    with jax.set_mesh(mesh):
        regression = value_regression(critic_spec(config), NET)
        optimizer = build_optimizer(critic_optimizer_spec(config))
        critic = init_state(jax.tree.map(jnp.array, PARAMS), optimizer, mesh)
        policy = {"w": jnp.ones(3)}
        state = replace(init_state(policy, optimizer, mesh), critic=critic)
        warm_up = make_critic_update(optimizer_step(regression, optimizer, update_spec(config), mesh))
        state, metrics = warm_up(state, jax.tree.map(jnp.asarray, make_batch()), NOTHING)
    np.testing.assert_array_equal(state.params["w"], np.ones(3))
    names = ("loss", "vpred_mean", "vf_clipfrac", "grad_norm", "lr", "nonfinite_gradient")
    assert set(metrics) == {f"critic/{name}" for name in names}
    layers = (state.critic.params["layers"], PARAMS["layers"])
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), *layers)))


@pytest.mark.parametrize(
    ("passes", "apart", "expected"),
    [
        (0, False, ["critic", "critic", "both"]),
        (1, False, ["critic", "critic", "critic", "critic", "critic", "both"]),
        (2, True, ["critic", "critic", "critic", "critic", "critic", "critic", "both"]),
    ],
    ids=["warm-up", "and one pass more", "all passes apart"],
)
def test_what_the_critic_learns_alone(passes, apart, expected):
    """Three steps, in the first two of which it is warmed up."""
    batch, called = make_batch(), []

    def update(name):
        def update(state, minibatch, frozen):
            called.append(name)
            return state, {}

        return update

    run = SimpleNamespace(
        batch=BatchSpec(2, group_size=1, minibatches=1, microbatch_rows=0, num_iterations=1, shuffle=False, seed=0),
        pack=SimpleNamespace(of_rows=lambda rows: lambda x: x), update=update("both"), frozen=None,
        critic_alone=CriticAlone(update("critic"), 1, passes, apart, warmup_steps=2),
        mesh=None,
    )  # fmt: skip
    state = State(jnp.int32(0), {}, ())
    for _ in range(3):
        state, _ = improve(run, state, batch)
    assert called == expected


def test_a_critic_and_a_rule_that_reads_values_go_together(root, tmp_path):
    config = ppo(root, tmp_path, 1)
    config.algorithm.advantage = "reinforce_plus_plus"
    with pytest.raises(ConfigError, match=r"critic.*go together"):
        train(config)
    config = ppo(root, tmp_path, 1)
    config.algorithm.name = "grpo"
    with pytest.raises(ConfigError, match="go together"):
        train(config)


@pytest.mark.slow
def test_a_shared_critic_reads_the_hidden_states_of_the_policy_once(root, tmp_path):
    config = ppo(root, tmp_path, 1)
    config.critic.shared, config.critic.coef, config.algorithm.beta = True, 0.3, 0.0
    config.algorithm.kl_in_reward = False
    net = Net(replace(NET.config, head="lm"))
    params, draw = jax.jit(net.init)(jax.random.key(1)), np.random.default_rng(1)
    kernel = jnp.asarray(draw.normal(size=(16, 1)), jnp.float32)
    batch = make_batch()
    batch = batch.replace(
        sample_logps=-batch.mask,
        old_logps=-2.0 * batch.mask,
        advantages=batch.mask * np.array([[1.0], [-0.5]], np.float32),
    )
    joint = {**params, "score": {"kernel": kernel}}
    objective, policy = objective_of(config, net), policy_gradient(policy_spec(config), net)
    prepared = objective.prepare(batch)
    both, metrics = jax.jit(objective.loss)(joint, prepared)
    alone, _ = jax.jit(policy.loss)(params, policy.prepare(batch))
    critic_net = Net(replace(NET.config, head="score"))
    trunk = {name: x for name, x in params.items() if name != "head"}
    regression = value_regression(critic_spec(config), critic_net)
    error, measured = jax.jit(regression.loss)({**trunk, "score": {"kernel": kernel}}, regression.prepare(batch))
    np.testing.assert_allclose(both, alone + 0.3 * error, rtol=1e-5)
    np.testing.assert_allclose(metrics["critic/loss"], error, rtol=1e-5)
    np.testing.assert_allclose(metrics["critic/vpred_mean"], measured["vpred_mean"], rtol=1e-5)
    gradients = jax.jit(jax.grad(lambda p: objective.loss(p, prepared)[0]))(joint)
    assert all(float(jnp.abs(gradients[part]["kernel"]).max()) > 0 for part in ("score", "head"))


@pytest.mark.slow
def test_values_of_a_shared_critic_are_of_the_states_that_its_own_network_reads(root, tmp_path):
    """Granite divides the states that its head reads, `logit_divisor`; a critic reads them as they are."""
    config = ppo(root, tmp_path, 1)
    config.critic.shared, config.algorithm.beta, config.algorithm.kl_in_reward = True, 0.0, False
    net = Net(replace(NET.config, head="lm", logit_divisor=8.0))
    params = jax.jit(net.init)(jax.random.key(1)) | {"score": {"kernel": jnp.ones((16, 1))}}
    batch = make_batch()
    batch = batch.replace(sample_logps=-batch.mask, old_logps=-batch.mask, advantages=batch.mask)
    objective = objective_of(config, net)
    metrics = jax.jit(objective.loss)(params, objective.prepare(batch))[1]
    critic = {name: x for name, x in params.items() if name != "head"}
    values = token_values(Net(replace(net.config, head="score")), critic, batch.inputs)
    mean = (values * batch.mask).sum() / batch.mask.sum()
    np.testing.assert_allclose(metrics["critic/vpred_mean"].value, mean, rtol=1e-5)


def test_clipped_values_are_counted_as_by_trl_and_verl(root, tmp_path):
    """A value far from the old one is clipped where it is nearer to the return: there it has no gradient."""
    spec = replace(critic_spec(ppo(root, tmp_path, 1)), epsilon=0.2)
    batch = make_batch()
    values = np.asarray(token_values(NET, PARAMS, batch.inputs))
    batch = batch.replace(values=values - batch.mask, returns=values)  # nearer to the return than the clip allows
    regression = value_regression(spec, NET)

    def share(batch):
        return float(regression.loss(PARAMS, regression.prepare(batch))[1]["vf_clipfrac"].value)

    assert share(batch) == 1.0
    assert share(batch.replace(returns=values - 9.0)) == 0.0  # it moved away from the return


@pytest.mark.slow
def test_a_shared_critic_is_saved_restored_and_resumed(root, tmp_path):
    def shared(name: str, steps: int):
        config = ppo(root, tmp_path / name, steps)
        config.critic.shared, config.optimizer.schedule = True, "constant"
        return config

    train(shared("parts", 1))
    parts, whole = train(shared("parts", 2)), train(shared("whole", 2))
    jax.tree.map(np.testing.assert_array_equal, parts.model.params, whole.model.params)
    a, b = (load_model(tmp_path / name / "critic", head="score").params for name in ("parts", "whole"))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    jax.tree.map(np.testing.assert_array_equal, a["layers"], whole.model.params["layers"])
    assert {"critic/loss", "critic/explained_variance", "grad_norm"} <= parts.metrics[-1].keys()
    lines = [line["critic/loss"] for line in whole.metrics]
    assert lines[0] != lines[1]


def test_a_shared_critic_has_no_settings_of_a_network_of_its_own(root, tmp_path):
    config = ppo(root, tmp_path, 1, warmup=1)
    config.critic.shared = True
    with pytest.raises(ConfigError, match=r"critic\.warmup_steps is 1, but critic\.shared is true"):
        train(config)


def trained_names(params):
    return {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "own"),
    [(2, 0), (0, 2)],
    ids=["of the policy alone", "of the critic alone"],
)
def test_adapters_of_one_of_both(rank, own, root, tmp_path):
    """Of a critic with adapters those and its head are trained, of another all; one step moves both networks."""
    config = ppo(root, tmp_path, 1)
    config.lora.rank, config.critic.lora_rank, config.critic.warmup_steps = rank, own, 0
    config.critic.lora_targets = ("q_proj",) if own else ()
    mesh = build_mesh(config)
    with jax.set_mesh(mesh):
        run = build(config, mesh)
        start = jax.tree.map(np.array, run.state)
        batch = run.source.next(merge_frozen(run.state, run.frozen), jax.random.key(1)).batch
        state, (metrics, *_) = improve(run, run.state, batch)
    parts = ((start, state), (start.critic, state.critic))
    for (before, after), adapters in zip(parts, (rank, own), strict=True):
        names = trained_names(after.params)
        assert all("lora" in name or "score" in name for name in names) is bool(adapters)
        assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (before.params, after.params)), strict=True))
    assert ({"lora_a", "lora_b"} <= state.critic.params["layers"]["attention"]["q"].keys()) is bool(own)
    assert "v" not in state.critic.params["layers"]["attention"] or not own
    assert metrics["critic/grad_norm"].value > 0 and metrics["grad_norm"].value > 0


@pytest.mark.slow
def test_an_offloaded_critic_with_updates_of_its_own(root, tmp_path):
    """Where its parameters and moments wait changes nothing, and a resumed run is one that never stopped."""

    def run(name, steps=2, **own):
        config = ppo(root, tmp_path / name, steps)
        config.optimizer.schedule, config.critic.lora_rank, config.critic.minibatches = "constant", 2, 4
        for key, value in own.items():
            config.critic[key] = value
        return train(config)

    plain, elsewhere = run("plain"), {"offload": True, "offload_optimizer": True}
    run("parts", 1, **elsewhere)
    resumed = run("parts", 2, **elsewhere)
    for name in ("critic/loss", "critic/grad_norm", "loss", "grad_norm"):
        assert plain.metrics[-1][name] == resumed.metrics[-1][name], name
    critics = (load_model(tmp_path / name / "critic", head="score").params for name in ("plain", "parts"))
    jax.tree.map(np.testing.assert_array_equal, *critics)


def test_a_critic_from_a_model_of_its_own_with_adapters(root, tmp_path):
    """It has the parameters of critic.path, its score head among them, and adapters of its own scale."""
    start = load_model("embedded:sort", head="score", init_key=jax.random.key(3))
    save_hf(start, tmp_path / "scorer")
    config = ppo(root, tmp_path, 1)
    config.critic.path, config.critic.lora_rank, config.critic.lora_alpha = str(tmp_path / "scorer"), 2, 5.0
    mesh = build_mesh(config)
    with jax.set_mesh(mesh):
        critic = build_critic(config, build_model(config, mesh), mesh)
    jax.tree.map(np.testing.assert_array_equal, without_adapters(critic.params), start.params)
    adapters = critic.net.config.lora
    assert adapters is not None and (adapters.rank, adapters.scale) == (2, 2.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_alpha": 4.0}, r"critic\.lora_alpha is 4.0, but the critic has no adapters of its own"),
        ({"lora_targets": ("q_proj",)}, r"critic\.lora_targets is .* has no adapters of its own"),
        ({"minibatches": 5}, r"critic\.minibatches is 5, but it must divide batch\.prompts = 16: set it to a divisor"),
        ({"shared": True, "offload": False}, r"critic\.offload is False, but critic\.shared is true.* set it to none"),
        ({"shared": True, "minibatches": 2}, r"critic\.minibatches is 2, but critic\.shared is true.* set it to 0"),
    ],
)
def test_what_a_critic_cannot_have(settings, message, root, tmp_path):
    config = ppo(root, tmp_path, 1)
    config.critic.warmup_steps = 0
    for name, value in settings.items():
        config.critic[name] = value
    with pytest.raises(ConfigError, match=message):
        train(config)
