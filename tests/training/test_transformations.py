"""Optimizers that optax has not: against the code of their authors, in updates of a network, and in whole runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import jaxrl_llm
from jaxrl_llm.config import ConfigError, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.training.optimizers import OPTIMIZERS, learning_rate_schedule
from jaxrl_llm.training.setup.objectives import objective_of
from jaxrl_llm.training.setup.run import make_optimizer
from jaxrl_llm.training.setup.specs import old_logps_of, optimizer_spec, update_spec
from jaxrl_llm.training.transformations import GaLore, Prodigy, ScheduleFree, state_of
from tests.training.objectives.test_policy_gradient import NET, make_batch
from tests.training.test_optimizers import LAYERS, config_of, gradients, parameters
from tests.training.test_update import config_with, run_update

UPDATES, WARMUP = 50, 4
COMMON = {"b2": 0.99, "weight_decay": 0.1, "warmup_steps": WARMUP, "schedule": "linear", "min_lr_ratio": 0.5}
BETAS = (0.9, 0.99)
THEIRS = {  # the learning rate, the module of the authors' code, and their optimizer of groups of parameters
    "schedule_free_adamw": (0.03, "schedulefree", lambda code, groups: code.AdamWScheduleFree(groups, betas=BETAS)),
    "prodigy": (1.0, "prodigyopt", lambda code, groups: code.Prodigy(groups, betas=BETAS, d_coef=0.5)),
    "came": (0.01, "came_pytorch.CAME", lambda code, groups: code.CAME(groups, lr=1.0, betas=(*BETAS, 0.999))),
}


def layer_of(config, layers=1):
    """`layers` networks of one layer, and what their outputs shall be: parameters, and the loss of them."""
    random = np.random.default_rng(0)
    inputs, wanted = random.normal(size=(8, 12)), random.normal(size=(layers, 8, 5))
    kernel = random.normal(size=(layers, 12, 5))
    params = {"layers": {"q": {"kernel": jnp.array(kernel), "bias": jnp.full((layers, 5), 0.1)}}}

    def loss(params):
        q = params["layers"]["q"]
        return jnp.sum((jnp.tanh(inputs @ q["kernel"] + q["bias"][:, None]) - wanted) ** 2) / 40

    return params, loss, (inputs, wanted)


def improved(config, layers=1):
    """The parameters and the optimizer's state after UPDATES updates, with gradients where the run takes them; in
    double precision, which the storage of moments would end."""
    params, loss, _ = layer_of(config, layers)
    spec, point = optimizer_spec(config), update_spec(config).gradient_point or (lambda params, _: params)
    optimizer = OPTIMIZERS[spec.name](spec, learning_rate_schedule(spec))

    def step(carry, _):
        params, state = carry
        changes, state = optimizer.update(jax.grad(loss)(point(params, state)), state, params)
        return (optax.apply_updates(params, changes), state), None

    return jax.jit(lambda start: jax.lax.scan(step, start, length=UPDATES)[0])((params, optimizer.init(params)))


def improved_by_torch(config, layer=0, layers=1):
    """The same of one of the layers, with the authors' optimizer, whose rates are those of the schedule."""
    params, _, (inputs, wanted) = layer_of(config, layers)
    found = params["layers"]["q"]
    kernel, bias = (torch.nn.Parameter(torch.tensor(np.array(found[name][layer]))) for name in ("kernel", "bias"))
    decay = config.optimizer.weight_decay
    _, module, make = THEIRS[config.optimizer.name]
    groups = [{"params": [kernel], "weight_decay": decay}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = make(pytest.importorskip(module), groups)
    rate = learning_rate_schedule(optimizer_spec(config))
    if hasattr(optimizer, "train"):
        optimizer.train()
    for step in range(UPDATES):
        for group in optimizer.param_groups:
            group["lr"] = float(rate(step))
        optimizer.zero_grad()
        outputs = torch.tanh(torch.tensor(inputs) @ kernel + bias)
        (((outputs - torch.tensor(wanted[layer])) ** 2).sum() / 40).backward()
        optimizer.step()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return kernel.detach().numpy(), bias.detach().numpy(), optimizer


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", THEIRS)
def test_fifty_updates_are_those_of_the_authors_code(name):
    """With weight decay, a warm-up from 0 and a rate that falls; in double precision, as single ones drift apart."""
    config = config_of(name=name, learning_rate=THEIRS[name][0], b3=0.999, d_coef=0.5, **COMMON)
    config.total_steps = UPDATES
    params, state = improved(config)
    kernel, bias, theirs = improved_by_torch(config)
    np.testing.assert_allclose(params["layers"]["q"]["kernel"][0], kernel, atol=2e-6)
    np.testing.assert_allclose(params["layers"]["q"]["bias"][0], bias, atol=2e-6)
    assert np.abs(kernel - layer_of(config)[0]["layers"]["q"]["kernel"][0]).max() > 0.1
    if name == "prodigy":
        np.testing.assert_allclose(state_of(state, Prodigy).d, theirs.param_groups[0]["d"], rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_came_updates_each_layer_by_itself():
    config = config_of(name="came", b3=0.999, **COMMON)
    config.total_steps = UPDATES
    params, _ = improved(config, layers=2)
    for layer in range(2):
        kernel, bias, _ = improved_by_torch(config, layer, layers=2)
        np.testing.assert_allclose(params["layers"]["q"]["kernel"][layer], kernel, atol=2e-6)
        np.testing.assert_allclose(params["layers"]["q"]["bias"][layer], bias, atol=2e-6)


@pytest.mark.parametrize("name", THEIRS)
def test_an_update_of_rate_zero_or_of_no_gradient_changes_nothing(name):
    """A warm-up from 0 begins so; a mean of no weights, and a distance of no gradients, are 0 / 0."""
    params = jax.tree.map(jnp.asarray, parameters())
    for config, given in (
        (config_of(name=name, learning_rate=1.0, warmup_steps=2), gradients(0)),
        (config_of(name=name, learning_rate=1.0), jax.tree.map(np.zeros_like, gradients(0))),
    ):
        optimizer = make_optimizer(config)
        changes, state = optimizer.update(given, optimizer.init(params), params)
        assert not any(np.abs(x).max() > 0 for x in jax.tree.leaves(changes))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


@pytest.mark.parametrize("shape", [pytest.param((2, 6, 9), marks=pytest.mark.slow), (2, 9, 6), (2, 3, 6, 6)])
def test_galore_by_hand(shape):
    """Two layers, one with experts; the subspace of the third update is another, with the moments as they were."""
    random = np.random.default_rng(0)
    start = random.normal(size=shape)
    given = [random.normal(size=shape) for _ in range(4)]
    config = config_of(name="galore_adamw", galore_rank=2, galore_every=2, galore_scale=0.5, weight_decay=0.1)
    optimizer, params = make_optimizer(config), {"layers": {"q": {"kernel": jnp.asarray(start, jnp.float32)}}}
    state, bases = optimizer.init(params), []
    for gradient in given:
        changes, state = optimizer.update({"layers": {"q": {"kernel": jnp.asarray(gradient)}}}, state, params)
        params = optax.apply_updates(params, changes)
        bases.append(np.asarray(state_of(state, GaLore).basis["layers"]["q"]["kernel"]))
    rows = shape[-2] <= shape[-1]
    for place in np.ndindex(*shape[:-2]):
        matrix, m, v = start[place], 0.0, 0.0
        for t, gradient in enumerate(given, 1):
            g = gradient[place] if rows else gradient[place].T
            if t % 2 == 1:
                q, found = np.linalg.svd(g)[0][:, :2], bases[t - 1][place]
                signs = (q * found).sum(0)  # which a decomposition leaves open
                np.testing.assert_allclose(np.abs(signs), 1.0, atol=1e-5)
                q *= np.sign(signs)
            m, v = 0.9 * m + 0.1 * q.T @ g, 0.999 * v + 0.001 * (q.T @ g) ** 2
            step = q @ (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8))
            matrix = matrix - 0.01 * (0.5 * (step if rows else step.T) + 0.1 * matrix)
        np.testing.assert_allclose(params["layers"]["q"]["kernel"][place], matrix, atol=2e-5)


def test_what_galore_leaves_to_adamw_and_what_its_moments_take():
    """Vectors, what is in no layer, and matrices with no more dimensions than it keeps."""
    shapes = {"embed": {"weight": (40, 32)}, "layers": {"q": {"kernel": (2, 32, 64), "bias": (2, 64)}}}
    shapes["layers"]["small"] = {"kernel": (2, 32, 4)}
    params = jax.tree.map(lambda shape: jnp.full(shape, 0.1), shapes, is_leaf=lambda x: isinstance(x, tuple))
    grown = jax.tree.map(lambda x: x + jnp.arange(x.shape[-1]) ** 2, params)
    changes, sizes = {}, {}
    for name in ("adamw", "galore_adamw"):
        optimizer = make_optimizer(config_of(name=name, galore_rank=4))
        state = optimizer.init(params)
        changes[name], _ = optimizer.update(grown, state, params)
        sizes[name] = sum(x.size for x in jax.tree.leaves(state) if x.ndim)
    assert sizes["adamw"] - sizes["galore_adamw"] == 2 * (2 * 32 * 64) - 2 * 2 * (4 * 64) - 2 * 32 * 4
    theirs, ours = changes["adamw"], changes["galore_adamw"]
    assert np.abs(theirs["layers"]["q"].pop("kernel") - ours["layers"]["q"].pop("kernel")).max() > 1e-3
    jax.tree.map(np.testing.assert_array_equal, theirs, ours)


def test_lisa_by_hand():
    """Two of three layers for two updates each, by torch's AdamW that begins with them; what is in no layer goes on."""
    config = config_of(lisa_layers=2, lisa_every=2, max_grad_norm=1.0, weight_decay=0.1, no_decay=("bias",), b2=0.95)
    config.seed = 1
    optimizer, params = make_optimizer(config), jax.tree.map(jnp.asarray, parameters())
    state, options = optimizer.init(params), {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    assert sum(x.size for x in jax.tree.leaves(state)) < 2 * sum(x.size for x in jax.tree.leaves(params))
    embedding = torch.nn.Parameter(torch.tensor(parameters()["embed"]["weight"]))
    of_others, drawn = torch.optim.AdamW([embedding], **options), []
    for step in range(8):
        given, before = gradients(step), params
        changes, state = jax.jit(optimizer.update)(given, state, params)
        params = optax.apply_updates(params, changes)
        kernels = [x["layers"]["q"]["kernel"] for x in (before, params, given)]
        active = [layer for layer in range(LAYERS) if np.any(kernels[0][layer] != kernels[1][layer])]
        if step % 2 == 0:
            drawn.append(active)
            layers = [torch.nn.Parameter(torch.tensor(np.asarray(kernels[0][layer]))) for layer in active]
            of_layers = torch.optim.AdamW(layers, **options)
        assert active == drawn[-1] and len(active) == 2
        for tensor, gradient in ((embedding, given["embed"]["weight"]), *zip(layers, kernels[2][active], strict=True)):
            tensor.grad = torch.tensor(gradient)
        seen = [*(x[active] for x in jax.tree.leaves(given["layers"])), given["embed"]["weight"]]
        norm = np.sqrt(sum(np.sum(x**2) for x in seen))  # of what is updated alone
        for tensor in (embedding, *layers):
            tensor.grad *= min(1.0, 1.0 / norm)
        of_layers.step()
        of_others.step()
        np.testing.assert_allclose(params["embed"]["weight"], embedding.detach(), atol=1e-6)
        for layer, tensor in zip(active, layers, strict=True):
            np.testing.assert_allclose(kernels[1][layer], tensor.detach(), atol=1e-6)
    assert len({tuple(active) for active in drawn}) > 1


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"layers": {"q": np.zeros((3, 2, 2))}}, "lisa_layers is 4, but the model has 3 layers: set it to fewer"),
        ({"layers": {"q": np.zeros((4, 2))}, "dense_layers": {"q": np.zeros((4, 2))}}, "layers of 2 shapes .layers, d"),
        ({"score": {"kernel": np.zeros((2, 2))}}, "this model has no layers that are trained: set it to 0"),
    ],
)
def test_models_without_so_many_layers_alike(params, words):
    with pytest.raises(ConfigError, match=words):
        make_optimizer(config_of(lisa_layers=4)).init(params)


@pytest.mark.slow
def test_gradients_of_an_update_are_taken_between_the_average_and_what_it_averages():
    """The first update begins with one policy; from then on those of a run's update are at y, and its metrics too."""
    config, batch = config_with(optimizer__name="schedule_free_adamw", optimizer__b1=0.5), make_batch(rows=8)
    before, _ = run_update(config, batch, 2)
    state = state_of(before.opt_state, ScheduleFree)
    y = jax.tree.map(lambda x, z: 0.5 * x + 0.5 * z, before.params, state.z)
    objective, optimizer = objective_of(config, NET), make_optimizer(config)

    @jax.jit
    def updated(point):
        loss, gradient = jax.value_and_grad(lambda p: objective.loss(p, objective.prepare(batch))[0])(point)
        changes, _ = optimizer.update(gradient, before.opt_state, before.params)
        return loss, optax.apply_updates(before.params, changes)

    after, metrics = run_update(config, batch, 3)
    (loss, expected), (other, otherwise) = updated(y), updated(before.params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert abs(other - loss) > 1e-4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), after.params, expected)
    apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), after.params, otherwise)
    assert max(jax.tree.leaves(apart)) > 1e-5


def test_samples_of_the_average_are_weighed():
    """One update of each batch would need no log-probs before it, were they those that its gradient is of."""
    config = config_with()
    assert old_logps_of(config) == "policy"
    config.optimizer.name = "schedule_free_adamw"
    assert old_logps_of(config) == "trainer"
    config.algorithm.loss = "reinforce"
    with pytest.raises(ConfigError, match=r"reinforce.* has no ratio that weighs them: take one that has, ppo_clip"):
        old_logps_of(config)
    config.algorithm.old_logps, config.algorithm.importance_correction = "sampler", "token_truncate"
    assert old_logps_of(config) == "sampler"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "prodigy", "learning_rate": 1e-4}, "optimizer.learning_rate is 0.0001, but prodigy .* set it to 1"),
        ({"name": "prodigy", "learning_rate": "auto"}, "learning_rate is auto, but prodigy finds the rate itself"),
        ({"name": "prodigy", "learning_rate": 1.0, "rate_factors": ("lora_B=16",)}, "estimates one rate for all"),
        ({"name": "schedule_free_adamw", "rate_factors": ("norm=2",)}, "averages with weights of one rate"),
        ({"name": "came", "b1": 0.0}, "optimizer.b1 is 0, but came divides by how far .* set it to 0.9"),
        ({"name": "schedule_free_adamw", "lisa_layers": 2}, "change while schedule_free_adamw follows all of them"),
    ],
)
def test_contradictions_are_named(settings, words):
    config = config_of(**settings)
    config.algorithm.name = "sft"
    with pytest.raises(ConfigError, match=words):
        validate(config)


def test_an_average_in_16_bits_is_refused():
    config = config_of(name="schedule_free_adamw")
    config.model.param_dtype = "bfloat16"
    with pytest.raises(ConfigError, match=r"param_dtype is bfloat16, but the average .* set it to float32, or"):
        validate(config)
    config.lora.rank = 8  # whose adapters are float32
    validate(config)
    config = config_of(name="prodigy", learning_rate=1.0)
    config.algorithm.name = "ppo"
    with pytest.raises(ConfigError, match=r"critic.learning_rate is 1e-05, but prodigy"):
        validate(config)


SETTINGS = {name: {"name": name, "learning_rate": 1e-4} for name in (*THEIRS, "galore_adamw")}
SETTINGS["prodigy"]["learning_rate"] = 1.0
SETTINGS["galore_adamw"] |= {"galore_rank": 4, "galore_every": 3}
SETTINGS["lisa"] = {"lisa_layers": 1, "lisa_every": 3, "learning_rate": 1e-4}


@pytest.mark.slow
@pytest.mark.parametrize("case", SETTINGS)
def test_states_in_the_hosts_memory_change_nothing(case):
    settings, batch = {f"optimizer__{key}": value for key, value in SETTINGS[case].items()}, make_batch()
    plain, _ = run_update(config_with(**settings), batch, 2)
    state, _ = run_update(config_with(**settings, optimizer__offload=True), batch, 2)
    jax.tree.map(np.testing.assert_array_equal, state.params, plain.params)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim} == {"pinned_host"}


@pytest.mark.slow
@pytest.mark.parametrize("case", SETTINGS)
def test_a_resumed_run_equals_a_whole_one(case, root, tmp_path):
    def run(name, steps):
        config = load_config_file(f"{root / 'configs' / 'sft.py'}:tiny")
        config.output_dir, config.total_steps, config.checkpoint.every = str(tmp_path / name), steps, 1
        config.optimizer.schedule, config.optimizer.warmup_steps = "constant", 0
        for key, value in SETTINGS[case].items():
            config.optimizer[key] = value
        config.eval.every, config.logging.backends = -1, ("jsonl",)
        return jaxrl_llm.train(config)

    run("parts", 2)
    parts, whole = run("parts", 6), run("whole", 6)
    jax.tree.map(np.testing.assert_array_equal, parts.model.params, whole.model.params)
    if case == "prodigy":  # which the first update leaves at what it begins with
        rates = [record["lr"] for record in whole.metrics]
        assert rates[0] == pytest.approx(1e-6, rel=1e-5) and rates == sorted(rates)


@pytest.mark.slow
def test_rollouts_of_the_average_and_updates_beside_it(root, tmp_path):
    """GRPO: from the third step on the ratio of what is updated and what has sampled is not 1."""
    config = load_config_file(f"{root / 'configs' / 'grpo.py'}:tiny")
    config.output_dir, config.total_steps = str(tmp_path / "run"), 4
    config.optimizer.name, config.optimizer.schedule = "schedule_free_adamw", "constant"
    config.optimizer.learning_rate, config.optimizer.warmup_steps = 3e-4, 0
    config.eval.every, config.logging.backends = -1, ("jsonl",)
    metrics = jaxrl_llm.train(config).metrics
    apart = [record["ratio/squared"] for record in metrics]
    assert apart[0] < 1e-8 < apart[2]
