"""Optimizers and learning rates against torch's and transformers' own, and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers

import jaxrl_llm
from jaxrl_llm.config import ConfigError, default, from_json, to_json, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.distributed.sharding import parameter_spec
from jaxrl_llm.training.optimizers import (
    build_optimizer,
    decayed,
    learning_rate_schedule,
    weight_decay_of,
)
from jaxrl_llm.training.setup.run import make_optimizer
from jaxrl_llm.training.setup.specs import critic_optimizer_spec, optimizer_spec
from jaxrl_llm.training.transformations import clip_by_global_norm

LAYERS, STEPS = 3, 4


def config_of(**optimizer):
    config = default()
    config.total_steps = 20
    config.optimizer.learning_rate = 0.01
    config.optimizer.max_grad_norm = 0.0
    for name, value in optimizer.items():
        config.optimizer[name] = value
    return config


def parameters(dtype=np.float32):
    random = np.random.default_rng(0)
    return {
        "embed": {"weight": random.normal(size=(7, 4)).astype(dtype)},
        "layers": {
            "norm": {"scale": random.normal(size=(LAYERS, 4)).astype(dtype)},
            "q": {
                "kernel": random.normal(size=(LAYERS, 4, 6)).astype(dtype),
                "bias": random.normal(size=(LAYERS, 6)).astype(dtype),
            },
        },
    }


def gradients(step: int):
    return jax.tree.map(lambda x: np.cos(x * (3 + step)).astype(np.float32), parameters())


def improve(config, params=None):
    """The parameters and the optimizer's state after STEPS updates."""
    optimizer = make_optimizer(config)
    params = jax.tree.map(jnp.asarray, parameters() if params is None else params)
    state = optimizer.init(params)
    for step in range(STEPS):
        changes, state = optimizer.update(gradients(step), state, params)
        params = optax.apply_updates(params, changes)
    return params, state


def torchimprove(make):
    """The same with a torch optimizer of `make(decayed, others)`, each layer's parameter by itself."""
    leaves = jax.tree_util.tree_leaves_with_path(parameters())

    def layers(path, x):
        return list(x) if "layers" in str(path) else [x]

    tensors = [[torch.nn.Parameter(torch.tensor(part)) for part in layers(path, x)] for path, x in leaves]
    is_decayed = ["bias" not in str(path) and "scale" not in str(path) for path, _ in leaves]
    optimizer = make(
        [t for parts, yes in zip(tensors, is_decayed, strict=True) if yes for t in parts],
        [t for parts, yes in zip(tensors, is_decayed, strict=True) if not yes for t in parts],
    )
    for step in range(STEPS):
        for parts, (path, g) in zip(tensors, jax.tree_util.tree_leaves_with_path(gradients(step)), strict=True):
            for tensor, part in zip(parts, layers(path, g), strict=True):
                tensor.grad = torch.tensor(part)
        optimizer.step()
    values = [np.stack([t.detach().numpy() for t in parts]) for parts in tensors]
    return [v if "layers" in str(path) else v[0] for v, (path, _) in zip(values, leaves, strict=True)]


def groups(decayed, others, weight_decay):
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


TORCH = {
    "adamw": lambda a, b: torch.optim.AdamW(groups(a, b, 0.1), lr=0.01, betas=(0.9, 0.95), eps=1e-8),
    "adafactor": lambda a, b: transformers.Adafactor(
        groups(a, b, 0.0), lr=0.01, scale_parameter=False, relative_step=False, eps=(1e-30, 1e-3), decay_rate=-0.8
    ),
    "sgd": lambda a, b: torch.optim.SGD([*a, *b], lr=0.01, momentum=0.9),
}


@pytest.mark.parametrize("name", TORCH)
def test_optimizers_agree_with_torch(name):
    own = {"adamw": {"weight_decay": 0.1, "b2": 0.95}}.get(name, {})
    params, _ = improve(config_of(name=name, **own))
    for ours, theirs in zip(jax.tree.leaves(params), torchimprove(TORCH[name]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_gradients_are_clipped_as_by_torch(limit):
    """To the norm of all of them together; those within the limit stay as they are, bit for bit."""
    given = gradients(0)
    tensors = [torch.nn.Parameter(torch.tensor(x)) for x in jax.tree.leaves(given)]
    for tensor in tensors:
        tensor.grad = tensor.detach().clone()
    torch.nn.utils.clip_grad_norm_(tensors, limit)
    clipped, _ = clip_by_global_norm(limit).update(given, optax.EmptyState())
    for x, tensor in zip(jax.tree.leaves(clipped), tensors, strict=True):
        np.testing.assert_allclose(x, tensor.grad, rtol=3e-6)
    assert limit < 100 or all(map(np.array_equal, jax.tree.leaves(clipped), jax.tree.leaves(given)))


def test_lion_by_hand():
    params, moments = parameters(), jax.tree.map(np.zeros_like, parameters())
    for step in range(STEPS):
        g = gradients(step)
        signs = jax.tree.map(lambda m, g: np.sign(0.9 * m + 0.1 * g), moments, g)
        moments = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g, moments, g)
        params = jax.tree.map(lambda p, s: p - 0.01 * s, params, signs)
    ours, _ = improve(config_of(name="lion", b2=0.99))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, params)


@pytest.mark.parametrize("steps", [0, 3])
def test_ademamix_by_hand(steps):
    """As its authors' code has it: half lives that rise linearly, the slow moment without bias correction."""

    def slow_decay(t):  # the half life of b is log(0.5) / log(b)
        if t >= steps:
            return 0.99
        lives = [np.log(0.5) / np.log(b) for b in (0.9, 0.99)]
        return 0.5 ** (1 / (lives[0] + t / steps * (lives[1] - lives[0])))

    params = parameters(np.float64)
    fast, slow, squares = (jax.tree.map(np.zeros_like, params) for _ in range(3))
    for t in range(1, STEPS + 1):
        g = gradients(t - 1)
        mixing = 4.0 * min(t / steps, 1.0) if steps else 4.0
        decay = slow_decay(t)
        fast = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, fast, g)
        slow = jax.tree.map(lambda m, g, b=decay: b * m + (1 - b) * g, slow, g)
        squares = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g.astype(np.float64) ** 2, squares, g)

        def changed(p, m1, m2, v, t=t, mixing=mixing):
            return p - 0.01 * (m1 / (1 - 0.9**t) + mixing * m2) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)

        params = jax.tree.map(changed, params, fast, slow, squares)
    ours, _ = improve(config_of(name="ademamix", b2=0.95, b3=0.99, mixing=4.0, mixing_steps=steps))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), ours, params)


def test_adopt_by_hand():
    """The first gradient begins the second moment; later ones are divided by the root of that of those before."""
    params = parameters(np.float64)
    moments, squares = jax.tree.map(np.zeros_like, params), jax.tree.map(lambda g: g**2, gradients(0))
    for t in range(1, STEPS):
        g = gradients(t)

        def scaled(g, v, t=t):
            return np.clip(g / np.maximum(np.sqrt(v), 1e-6), -(t**0.25), t**0.25)

        moments = jax.tree.map(lambda m, g, v, f=scaled: 0.9 * m + 0.1 * f(g, v), moments, g, squares)
        squares = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g**2, squares, g)
        params = jax.tree.map(lambda p, m: p - 0.01 * m, params, moments)
    ours, _ = improve(config_of(name="adopt", b2=0.99, eps=1e-6))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), ours, params)


def orthogonal(x):
    """Five Newton-Schulz steps of Muon on one matrix."""
    a, b, c = 3.4445, -4.775, 2.0315
    x = x / np.linalg.norm(x)
    for _ in range(5):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x


def test_muon_orthogonalises_each_layer():
    """By hand, and as torch's, which computes in bfloat16; of the rest adamw."""
    ours, _ = improve(config_of(name="muon", weight_decay=0.1))
    kernel, momentum = parameters()["layers"]["q"]["kernel"], np.zeros((LAYERS, 4, 6))
    theirs = [torch.nn.Parameter(torch.tensor(x)) for x in kernel]
    muon = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(STEPS):
        g = gradients(step)["layers"]["q"]["kernel"]
        momentum = 0.95 * momentum + g
        update = np.stack([orthogonal(x) for x in g + 0.95 * momentum])
        kernel = 0.999 * kernel - 0.01 * update * 0.2 * np.sqrt(max(4, 6))
        for tensor, x in zip(theirs, g, strict=True):
            tensor.grad = torch.tensor(x)
        muon.step()
    np.testing.assert_allclose(ours["layers"]["q"]["kernel"], kernel, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(kernel, [x.detach() for x in theirs], atol=5e-4)
    adamw, _ = improve(config_of(name="adamw", weight_decay=0.1))
    for path in (("embed", "weight"), ("layers", "norm")):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            ours[path[0]][path[1]],
            adamw[path[0]][path[1]],
        )


def test_muon_is_for_matrices_alone():
    """Biases of experts and filters of convolutions have as many dimensions as stacked matrices."""
    random = np.random.default_rng(0)
    layers = {
        "experts": {"kernel": random.normal(size=(2, 3, 4, 6)), "bias": random.normal(size=(2, 3, 6))},
        "delta": {"conv": random.normal(size=(2, 8, 1, 4))},
    }
    params = {"layers": jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), layers)}
    changes = {}
    for name in ("muon", "adamw"):
        optimizer = make_optimizer(config_of(name=name))
        changes[name], _ = optimizer.update(params, optimizer.init(params), params)
    muon, adamw = (changes[name]["layers"] for name in ("muon", "adamw"))
    np.testing.assert_allclose(muon["experts"]["bias"], adamw["experts"]["bias"], rtol=1e-6)
    np.testing.assert_allclose(muon["delta"]["conv"], adamw["delta"]["conv"], rtol=1e-6)
    assert not np.allclose(muon["experts"]["kernel"], adamw["experts"]["kernel"], rtol=0.1)


@pytest.mark.parametrize(
    "stack",
    ["dense_latent_layers", *(pytest.param(x, marks=pytest.mark.slow) for x in ("delta_layers", "full_layers"))],
)
def test_adafactor_updates_each_layer_by_itself(stack):
    """Layers of another kind are a stack of another length: what a layer gets does not depend on the others."""
    kernels = jax.tree.map(jnp.asarray, parameters()["layers"]["q"]["kernel"])
    params = {"layers": {"q": {"kernel": kernels}}, stack: {"q": {"kernel": kernels[:1] + 1.0}}}
    optimizer = make_optimizer(config_of(name="adafactor"))
    changes, _ = optimizer.update(params, optimizer.init(params), params)
    for name, layers in params.items():
        for index, kernel in enumerate(layers["q"]["kernel"]):
            alone = {"head": {"kernel": kernel}}
            change, _ = optimizer.update(alone, optimizer.init(alone), alone)
            found = changes[name]["q"]["kernel"][index]
            np.testing.assert_allclose(found, change["head"]["kernel"], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "name", ["adamw", pytest.param("adafactor", marks=pytest.mark.slow), "lion", "sgd", "muon", "ademamix", "adopt"]
)
def test_moments_in_fp32_stored_as_set(name):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), jax.tree.map(jnp.asarray, parameters()))
    params, state = improve(config_of(name=name), half)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    kinds = {x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)}
    assert kinds == {jnp.dtype(jnp.float32)}
    _, state = improve(config_of(name=name, moment_dtype="bfloat16"))
    kinds = {x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)}
    assert kinds == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("name", ["adamw", pytest.param("lion", marks=pytest.mark.slow)])
def test_moments_in_bfloat16_follow_those_in_fp32(name):
    """Gradients ten times smaller after a while: the second moment has to fall, by 0.1 % a step."""

    def sizes(dtype):
        optimizer = make_optimizer(config_of(name=name, moment_dtype=dtype, b2=0.999, learning_rate=1.0))
        params = jnp.zeros(500)

        def step(state, number):
            gradient = jax.random.normal(jax.random.key(number), params.shape) + 0.2
            change, state = optimizer.update(jnp.where(number < 200, 1.0, 0.1) * gradient, state, params)
            return state, jnp.stack([jnp.sqrt(jnp.mean(change**2)), change.mean()])

        return np.asarray(jax.jit(lambda s: jax.lax.scan(step, s, jnp.arange(3000))[1])(optimizer.init(params)))

    exact, rounded = sizes("float32"), sizes("bfloat16")
    for start in (200, 1000, 2900):
        np.testing.assert_allclose(rounded[start : start + 100].mean(0), exact[start : start + 100].mean(0), rtol=0.03)


def test_the_rounding_of_moments_comes_from_the_seed_and_the_number_of_updates():
    config = config_of(moment_dtype="bfloat16")
    (_, one), (_, again) = improve(config), improve(config)
    config.seed = 1
    _, other = improve(config)
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert any(bool((a != b).any()) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("narrow", "moments"), [("bfloat16", "bfloat16"), ("float32", "float8")])
def test_training_in_narrow_types_follows_fp32(root, tmp_path, narrow, moments):
    def losses(dtype, moments):
        config = load_config_file(f"{root / 'configs' / 'sft.py'}")
        config.output_dir, config.total_steps, config.batch.prompts = str(tmp_path / moments), 30, 16
        config.optimizer.learning_rate, config.optimizer.schedule, config.optimizer.warmup_steps = 1e-5, "constant", 0
        config.model.param_dtype, config.optimizer.moment_dtype = dtype, moments
        config.eval.every, config.logging.backends = 0, ("jsonl",)
        return np.array([r["eval/loss"] for r in jaxrl_llm.train(config).metrics if "eval/loss" in r])

    exact, rounded = losses("float32", "float32"), losses(narrow, moments)
    np.testing.assert_allclose(rounded, exact, atol=1e-3)
    assert exact[0] - exact[-1] > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moments", "offload", "optimizer"),
    [
        ("bfloat16", False, "adamw"),
        ("float8", False, "ademamix"),
        ("float8", True, "adamw"),
        ("float8", False, "adopt"),
    ],
)
def test_a_resumed_run_in_bfloat16_equals_a_whole_one(root, tmp_path, capsys, moments, offload, optimizer):
    """At a rate at which rounding is noise, of which it warns."""

    def run(name, steps):
        config = load_config_file(f"{root / 'configs' / 'sft.py'}:tiny")
        config.output_dir, config.total_steps = str(tmp_path / name), steps
        config.optimizer.schedule, config.optimizer.warmup_steps = "constant", 0
        config.model.dtype = config.model.param_dtype = "bfloat16"
        config.optimizer.moment_dtype, config.optimizer.offload = moments, offload
        config.optimizer.name, config.optimizer.mixing_steps = optimizer, 3 if optimizer == "ademamix" else 0
        config.optimizer.learning_rate = 1e-6
        config.eval.every, config.checkpoint.every, config.logging.backends = -1, 1, ("console", "jsonl")
        return jaxrl_llm.train(config).model.params

    run("parts", 2)
    parts, whole = run("parts", 4), run("whole", 4)
    assert "param_dtype is bfloat16 and optimizer.learning_rate 1e-06: an update is far smaller" in " ".join(
        capsys.readouterr().out.split()
    )
    jax.tree.map(np.testing.assert_array_equal, parts, whole)
    assert {str(x.dtype) for x in jax.tree.leaves(whole)} == {"bfloat16"}


def test_norms_and_biases_do_not_decay():
    """As in transformers; a norm with a bias, as encoders of images have them, calls it `shift`."""
    layer = {"norm": {"scale": 0, "shift": 0}, "q": {"kernel": 1, "bias": 0}}
    params = {"embed": {"weight": 1}, "layers": layer, "vision": {"layers": layer}}
    assert decayed(optimizer_spec(config_of()))(params) == jax.tree.map(bool, params)


def test_no_decay_names_what_is_not_decayed():
    plain, _ = improve(config_of())
    without, _ = improve(config_of(weight_decay=0.1, no_decay=("bias", "scale", "embed/weight")))
    np.testing.assert_array_equal(plain["embed"]["weight"], without["embed"]["weight"])
    np.testing.assert_array_equal(plain["layers"]["q"]["bias"], without["layers"]["q"]["bias"])
    assert not np.allclose(plain["layers"]["q"]["kernel"], without["layers"]["q"]["kernel"])


def test_a_frozen_router_does_not_decay():
    """Nor what else the router has, in the families where it has more than a matrix."""
    ones, config = jnp.ones((2, 4)), config_of(weight_decay=0.1, no_decay=())
    config.model.freeze_router = True
    router = {"router": {"kernel": ones, "bias": ones}, "router_scale": ones, "weight_scale": ones}
    params, optimizer = {"layers": {"mlp": {**router, "gate": {"kernel": ones}}}}, make_optimizer(config)
    changes, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    moved = changes["layers"]["mlp"]
    assert moved.pop("gate")["kernel"].all() and not any(x.any() for x in jax.tree.leaves(moved))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, "linear") for name in ("adafactor", "lion", "sgd", "muon", "ademamix", "adopt", "came")),
        *(("adamw", shape) for shape in ("linear", "cosine")),
    ],
)
def test_weight_decay_moves_to_its_end(name, shape):
    """Without gradients each update multiplies by 1 - rate x decay, whatever the optimizer."""
    config = config_of(name=name, weight_decay=0.2, weight_decay_end=1.0, weight_decay_shape=shape)
    config.batch.minibatches = 2  # 40 updates
    optimizer, params = make_optimizer(config), jax.tree.map(jnp.asarray, parameters())
    still, state, before = jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
    expected = 1.0
    for count in range(3):
        changes, state = optimizer.update(still, state, params)
        params = optax.apply_updates(params, changes)
        p = count / 40
        expected *= 1 - 0.01 * (0.2 + 0.8 * (p if shape == "linear" else 0.5 * (1 - np.cos(np.pi * p))))
    kernel = before["layers"]["q"]["kernel"] * expected
    np.testing.assert_allclose(params["layers"]["q"]["kernel"], kernel, rtol=1e-6)
    np.testing.assert_array_equal(params["layers"]["q"]["bias"], before["layers"]["q"]["bias"])
    decay = weight_decay_of(optimizer_spec(config))
    np.testing.assert_allclose([float(decay(count)) for count in (0, 20, 40, 90)], [0.2, 0.6, 1.0, 1.0], rtol=1e-6)


SCHEDULES = {
    "linear": ({"schedule": "linear"}, ("linear", {})),
    "cosine": ({"schedule": "cosine"}, ("cosine", {})),
    "cosine twice": ({"schedule": "cosine", "cycles": 1.5}, ("cosine", {"num_cycles": 1.5})),
    "cosine to a tenth": ({"schedule": "cosine", "min_lr_ratio": 0.1}, ("cosine_with_min_lr", {"min_lr_rate": 0.1})),
    "cosine with restarts": (
        {"schedule": "cosine_with_restarts", "cycles": 2.0},
        ("cosine_with_restarts", {"num_cycles": 2}),
    ),
    "polynomial": (
        {"schedule": "polynomial", "power": 2.0, "min_lr_ratio": 0.1},
        ("polynomial", {"power": 2.0, "lr_end": 0.001}),
    ),
    "constant": ({"schedule": "constant"}, ("constant_with_warmup", {})),
    "inverse square root": ({"schedule": "inverse_sqrt"}, ("inverse_sqrt", {})),
    "wsd": (
        {"schedule": "wsd", "decay_steps": 6},
        ("warmup_stable_decay", {"num_decay_steps": 6, "decay_type": "linear"}),
    ),
    "wsd cosine": (
        {"schedule": "wsd", "decay_steps": 6, "decay_shape": "cosine", "min_lr_ratio": 0.2},
        ("warmup_stable_decay", {"num_decay_steps": 6, "decay_type": "cosine", "min_lr_ratio": 0.2}),
    ),
    "wsd 1-sqrt": (
        {"schedule": "wsd", "decay_steps": 6, "decay_shape": "1-sqrt"},
        ("warmup_stable_decay", {"num_decay_steps": 6, "decay_type": "1-sqrt"}),
    ),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_learning_rates_agree_with_transformers(case):
    own, (name, options) = SCHEDULES[case]
    schedule = learning_rate_schedule(optimizer_spec(config_of(warmup_steps=4, **own)))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    theirs = transformers.get_scheduler(name, optimizer, 4, 20, scheduler_specific_kwargs=options)
    for step in range(20):
        if step >= 4 or "min_lr_ratio" not in options:  # there the warm-up starts from the lowest rate, here from 0
            np.testing.assert_allclose(float(schedule(step)), theirs.get_last_lr()[0], rtol=1e-5, atol=1e-9)
        optimizer.step()
        theirs.step()


def test_rex_is_that_of_axolotl():
    """Its formula, z / (0.1 + 0.9 z) of the share z of steps that are left, after a warm-up and down to a tenth."""
    schedule = learning_rate_schedule(optimizer_spec(config_of(schedule="rex", warmup_steps=4, min_lr_ratio=0.1)))
    left = np.array([1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    expected = 0.01 * (0.1 + 0.9 * left / (0.1 + 0.9 * left))
    np.testing.assert_allclose([float(schedule(step)) for step in (4, 8, 12, 16, 20, 30)], expected, rtol=1e-5)
    np.testing.assert_allclose([float(schedule(step)) for step in (0, 1, 2)], [0.0, 0.0025, 0.005], rtol=1e-5)


def test_wsd_falls_exponentially():
    schedule = learning_rate_schedule(
        optimizer_spec(config_of(schedule="wsd", decay_steps=4, decay_shape="exponential"))
    )
    rates = [float(schedule(step)) for step in (0, 16, 18, 20, 30)]
    np.testing.assert_allclose(rates, [0.01, 0.01, 0.01 * (2 * 0.5**0.5 - 1), 0.0, 0.0], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("case", [case for case in SCHEDULES if case not in ("constant", "inverse square root")])
def test_a_schedule_that_ends_before_the_run_stays_where_it_ended(case):
    """Up to its end it is transformers' schedule of so many steps, and then its least."""
    own, (name, options) = SCHEDULES[case]
    schedule = learning_rate_schedule(optimizer_spec(config_of(warmup_steps=4, schedule_steps=12, **own)))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    theirs = transformers.get_scheduler(name, optimizer, 4, 12, scheduler_specific_kwargs=options)
    for step in range(12):
        if step >= 4:
            np.testing.assert_allclose(float(schedule(step)), theirs.get_last_lr()[0], rtol=1e-5, atol=1e-9)
        optimizer.step()
        theirs.step()
    least = own.get("min_lr_ratio", 0.0) * 0.01
    np.testing.assert_allclose([float(schedule(step)) for step in (12, 13, 40)], [least] * 3, rtol=1e-5, atol=1e-9)


def test_a_constant_decay_of_wsd_stays_at_the_peak_up_to_the_end():
    settings = {"schedule": "wsd", "decay_steps": 4, "decay_shape": "constant", "min_lr_ratio": 0.1}
    schedule = learning_rate_schedule(optimizer_spec(config_of(schedule_steps=10, **settings)))
    rates = [float(schedule(step)) for step in (0, 7, 9, 10, 15)]
    np.testing.assert_allclose(rates, [0.01, 0.01, 0.01, 0.001, 0.001], rtol=1e-6)


def test_the_end_of_a_schedule_counts_updates():
    config = config_of(schedule="linear", schedule_steps=10)
    config.batch.minibatches = 2
    schedule = learning_rate_schedule(optimizer_spec(config))
    np.testing.assert_allclose([float(schedule(i)) for i in (0, 10, 20, 30)], [0.01, 0.005, 0, 0], rtol=1e-6)


def test_a_critic_has_a_schedule_and_decays_of_its_own():
    """What it leaves out is the policy's; the steps of its decay are those of `optimizer`, in its own updates."""
    config = config_of(schedule="cosine", min_lr_ratio=0.5, b1=0.8, b2=0.99, decay_steps=5)
    config.algorithm.name, config.critic.schedule, config.critic.learning_rate = "ppo", "wsd", 0.02
    config.critic.num_iterations = 2
    validate(config)
    critic = critic_optimizer_spec(config)
    assert (critic.b1, critic.b2, critic.min_lr_ratio) == (0.8, 0.99, 0.5)
    config.critic.b1, config.critic.b2, config.critic.min_lr_ratio = 0.7, 0.95, 0.0
    critic = critic_optimizer_spec(config)
    assert (critic.b1, critic.b2) == (0.7, 0.95)
    rates = [float(learning_rate_schedule(critic)(count)) for count in (0, 30, 35, 40)]
    np.testing.assert_allclose(rates, [0.02, 0.02, 0.01, 0.0], rtol=1e-6, atol=1e-9)


def test_the_policys_schedule_is_over_the_steps_in_which_it_is_trained():
    """Of 20 steps the first 8 are the critic's alone: the policy's rate falls in the last 4 of its own 12."""
    config = config_of(schedule="wsd", decay_steps=4)
    config.algorithm.name, config.critic.warmup_steps, config.critic.learning_rate = "ppo", 8, 0.02
    config.critic.schedule = "linear"
    policy, critic = map(learning_rate_schedule, (optimizer_spec(config), critic_optimizer_spec(config)))
    np.testing.assert_allclose([float(policy(i)) for i in (0, 8, 10, 12)], [0.01, 0.01, 0.005, 0], atol=1e-9)
    np.testing.assert_allclose([float(critic(i)) for i in (0, 10, 20)], [0.02, 0.01, 0], atol=1e-9)
    config.optimizer.schedule_steps, config.critic.schedule = 16, "constant"  # of the run: 8 of the policy's
    ended = learning_rate_schedule(optimizer_spec(config))
    np.testing.assert_allclose([float(ended(i)) for i in (4, 6, 8, 12)], [0.01, 0.005, 0, 0], atol=1e-9)


def test_warm_up_starts_where_it_is_told():
    schedule = learning_rate_schedule(optimizer_spec(config_of(warmup_steps=4, warmup_init=0.002)))
    rates = [float(schedule(step)) for step in (0, 1, 2, 4, 9)]
    np.testing.assert_allclose(rates, [0.002, 0.004, 0.006, 0.01, 0.01], rtol=1e-6)


def test_warmup_ratio_counts_updates():
    config = config_of(warmup_ratio=0.12)  # 2.4 of 20 steps: 3
    config.batch.minibatches = 2
    schedule = learning_rate_schedule(optimizer_spec(config))
    np.testing.assert_allclose([float(schedule(i)) for i in (0, 3, 6, 7)], [0, 0.005, 0.01, 0.01], rtol=1e-6)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"warmup_steps": 2, "warmup_ratio": 0.1}, "set one"),
        ({"warmup_init": 0.001}, "there is no warm-up"),
        ({"warmup_init": 0.1, "warmup_steps": 2}, "give a smaller one"),
        ({"schedule": "wsd"}, "optimizer.decay_steps is 0"),
        ({"decay_steps": 3}, "schedule constant"),
        ({"schedule": "wsd", "decay_steps": 21}, "total_steps = 20"),
        ({"schedule": "wsd", "decay_steps": 11, "schedule_steps": 10}, "schedule_steps = 10"),
        ({"schedule_steps": 10}, "schedule_steps is 10, but optimizer.schedule constant has no end: set it to 0"),
        ({"schedule": "linear", "schedule_steps": 10, "warmup_ratio": 0.5}, "warm-up alone takes 10 steps"),
        ({"schedule": "linear", "power": 2.0}, "power is 2, but it is that of polynomial"),
        ({"name": "adafactor", "moment_dtype": "float8"}, "adafactor has statistics .* set float32, or"),
        ({"schedule": "cosine_with_restarts"}, "cycles is 0.5 .* a whole number of decays"),
        ({"schedule": "cosine_with_restarts", "cycles": 1.5}, "cycles is 1.5 .* a whole number of decays"),
    ],
)
def test_contradictions_are_named(keys, words):
    with pytest.raises(ConfigError, match=words):
        validate(config_of(**keys))


def test_the_warm_up_of_a_short_run_is_all_of_it():
    """`--config.total_steps=3` starts with any config; the rate rises to its peak after the last step."""
    spec = optimizer_spec(config_of(warmup_steps=50))
    assert (spec.warmup_steps, spec.total_steps) == (20, 20)
    schedule = learning_rate_schedule(spec)
    np.testing.assert_allclose([float(schedule(i)) for i in (0, 10, 20)], np.array([0, 0.5, 1]) * spec.learning_rate)


def test_adafactor_statistics_are_replicated():
    class Mesh:
        shape = {"data": 1, "fsdp": 2, "tensor": 2, "context": 1, "expert": 1}  # noqa: RUF012

    assert tuple(parameter_spec("0/layers/attention/v/kernel", (2, 4, 8), Mesh)) == (None, "fsdp", "tensor")
    assert tuple(parameter_spec("0/nu/layers/attention/v/kernel/codes", (2, 4, 6), Mesh)) == (None, "fsdp", "tensor")
    assert tuple(parameter_spec("0/nu/layers/attention/v/kernel/scales", (2, 4, 1), Mesh)) == (None, "fsdp", None)
    assert tuple(parameter_spec("0/v_row/layers/attention/v/kernel", (2, 4), Mesh)) == ()
    assert tuple(parameter_spec("0/v/embed/weight", (1,), Mesh)) == ()


OWN = """
import optax

def make(rate, momentum=0.9):
    return optax.sgd(rate, momentum)

def broken(rate):
    return 1 / 0

def nothing(rate):
    return rate
"""


def test_an_optimizer_of_ones_own_by_name(tmp_path):
    """It is called with the schedule and its options, clipped and counted as the others; the critic has it too."""
    (tmp_path / "mine.py").write_text(OWN)
    common = {"max_grad_norm": 0.3, "schedule": "linear", "weight_decay": 0.0}
    own = config_of(name=f"{tmp_path}/mine.py:make(momentum=0.5)", **common)
    validate(own)
    (made, _), (other, _) = improve(own), improve(config_of(name="sgd", b1=0.5, **common))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), made, other)
    own.critic.learning_rate = 0.25
    grad, start = {"x": jnp.ones(2)}, {"x": jnp.zeros(2)}
    critic = build_optimizer(critic_optimizer_spec(own))
    np.testing.assert_allclose(critic.update(grad, critic.init(start), start)[0]["x"], -0.25 / np.sqrt(2), rtol=1e-6)
    plain = config_of(name="optax:sgd", max_grad_norm=0.0)
    validate(plain)
    of_optax = make_optimizer(plain)
    np.testing.assert_allclose(of_optax.update(grad, of_optax.init(start), start)[0]["x"], -0.01, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adam", r"optimizer.name is 'adam': it takes adamw, .* your own function"),
        ("adamw(b1=0.5)", r"optimizer.name is 'adamw\(b1=0.5\)': it takes adamw"),
        ("mine.py:make(b3)", "optimizer.name is .*cannot read the options"),
    ],
)
def test_names_of_no_optimizer(name, words):
    with pytest.raises(ConfigError, match=words):
        validate(config_of(name=name))


def test_the_function_is_found_when_a_run_starts(tmp_path, monkeypatch):
    """A run's record can be read where its file is not; the run itself ends before its data and weights are read."""
    monkeypatch.chdir(tmp_path)
    config = config_of(name="mine.py:make")
    assert from_json(to_json(config)).optimizer.name == "mine.py:make"
    config.output_dir, config.model.path, config.data.path = str(tmp_path / "run"), "nowhere", "nowhere.jsonl"
    with pytest.raises(ConfigError, match=r"optimizer.name is 'mine.py:make': there is no file mine.py"):
        jaxrl_llm.train(config)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken", r"mine.py:broken raised ZeroDivisionError.*mine.py:8"),
        ("mak", "optimizer.name is '.*mine.py:mak': .*the closest is make"),
        ("make(b3=1)", "optimizer.name is .*has no option 'b3'; it takes rate, momentum"),
        ("make(rate=1)", "raised TypeError: .*multiple values"),
        ("nothing", "mine.py:nothing returned function, but it must return an optimizer of optax"),
    ],
)
def test_functions_that_make_no_optimizer(name, words, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    with pytest.raises(ConfigError, match=words):
        make_optimizer(config_of(name=f"{tmp_path}/mine.py:{name}"))


@pytest.mark.slow
def test_a_run_with_an_optimizer_of_ones_own(root, tmp_path):
    """PPO, whose critic has it with its own schedule: the run is that of the optimizer here which is the same."""
    (tmp_path / "mine.py").write_text(OWN)
    ended = []
    for name in ("sgd", f"{tmp_path}/mine.py:make(momentum=0.5)"):
        config = load_config_file(f"{root / 'configs' / 'ppo.py'}:tiny")
        config.output_dir, config.total_steps, config.eval.every = str(tmp_path / f"run{len(ended)}"), 2, -1
        config.optimizer.name, config.optimizer.b1, config.logging.backends = name, 0.5, ("jsonl",)
        if ended:  # a setting that the function does not read, which the run would name
            config.optimizer.b1 = default().optimizer.b1
        ended.append(jaxrl_llm.train(config))
    for name in ("lr", "critic/lr", "loss", "critic/loss", "grad_norm"):
        np.testing.assert_allclose(*(run.metrics[-1][name] for run in ended), rtol=1e-5, err_msg=name)
    assert ended[1].metrics[-1]["lr"] != ended[1].metrics[-1]["critic/lr"]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), *(run.model.params for run in ended))


@pytest.mark.slow
def test_too_many_skipped_steps_stop_a_run(root, tmp_path, capsys):
    loss = tmp_path / "broken.py"
    loss.write_text(
        "import jax.numpy as jnp\n"
        "def broken(logps, old_logps, advantages, epsilon_low, epsilon_high, mask):\n"
        "    return logps * jnp.nan\n"
    )
    config = load_config_file(f"{root / 'configs' / 'grpo.py'}:tiny")
    config.output_dir, config.total_steps = str(tmp_path / "run"), 9
    config.algorithm.loss = f"{loss}:broken"
    config.optimizer.name, config.optimizer.max_skipped_steps = "adafactor", 1
    config.eval.every = -1
    config.logging.backends = ("jsonl",)
    with pytest.raises(ConfigError, match=r"step 2: the gradient is not finite .* 2 steps in a row"):
        jaxrl_llm.train(config)
    assert "and changed nothing" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "lion", "sgd", "muon"])
@pytest.mark.usefixtures("whole_tasks")
def test_each_optimizer_lowers_the_sft_loss(name, root, tmp_path):
    config = load_config_file(f"{root / 'configs' / 'sft.py'}:tiny")
    config.output_dir, config.total_steps = str(tmp_path / "run"), 20
    config.optimizer.name = name
    config.optimizer.learning_rate = {"adafactor": 1e-4, "lion": 1e-5, "sgd": 0.01, "muon": 1e-4}[name]
    config.eval.every = 0
    config.logging.backends = ("jsonl",)
    records = [r for r in jaxrl_llm.train(config).metrics if "eval/loss" in r]
    assert records[-1]["eval/loss"] < records[0]["eval/loss"] - 0.005
