"""Packed rows, with shared prompts and micro-batches of tokens, give the update of rows computed one by one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.adapters.lora import LoraConfig
from jaxrl_llm.models.mixers.attention import Attention
from jaxrl_llm.models.mixers.delta_net import GatedDeltaNet
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.rope import Rope
from jaxrl_llm.training.microbatch import microbatches_of
from jaxrl_llm.training.objectives.objective import Positions
from jaxrl_llm.training.objectives.value import value_regression
from jaxrl_llm.training.packing import planner
from jaxrl_llm.training.packing.planner import Packer, TypicalRows, make_packer, typical_rollouts
from jaxrl_llm.training.passes import scored_logps
from jaxrl_llm.training.setup.objectives import critic_spec, objective_of
from jaxrl_llm.training.setup.run import make_optimizer
from jaxrl_llm.training.setup.specs import packing_spec, update_spec
from jaxrl_llm.training.update import init_state, make_update

SHAPE = ModelConfig(
    vocab_size=31, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=24, init_scale=0.3, scan_layers=False
)
WINDOWED = dataclasses.replace(SHAPE, sliding_window=3, sliding_layers=(1,))
CHUNKED = dataclasses.replace(WINDOWED, sliding_chunks=True)
YARN = dataclasses.replace(SHAPE, rope=Rope(kind="yarn", factor=4.0, original_max_positions=4))
SPARSE = dataclasses.replace(
    SHAPE, experts=4, experts_per_token=2, expert_ffn=8, normalize_top_k=True, router_aux_loss_coef=0.1
)
SCORING = dataclasses.replace(SHAPE, head="score")
GROUP, PROMPT, COMPLETION, ROWS = 4, 4, 5, 12


def full_rollouts(rows: int, group_size: int, prompt_width: int, completion: int) -> TypicalRows:
    """Those of `typical_rollouts`, with completions that are all full."""
    sample = typical_rollouts(rows, group_size, prompt_width, completion)
    segments = np.ones_like(sample.segments)
    return sample._replace(segments=segments, mask=(segments.cumsum(axis=1) > prompt_width).astype(np.float32))


def online_batch(**changes) -> Batch:
    """Three groups of four: prompts of 2 to 4 tokens padded on the left, completions of 0 to 5 tokens."""
    draw = np.random.default_rng(3)
    lengths = np.array([5, 1, 0, 3, 2, 2, 5, 4, 0, 1, 3, 5])
    starts = np.repeat([0, 2, 1], GROUP)
    column = np.arange(PROMPT + COMPLETION)
    mask = ((column >= PROMPT) & (column < PROMPT + lengths[:, None])).astype(np.float32)
    segments = ((column >= starts[:, None]) & (column < PROMPT + lengths[:, None])).astype(np.int32)
    tokens = draw.integers(0, 31, mask.shape)
    tokens[:, :PROMPT] = np.repeat(tokens[::GROUP, :PROMPT], GROUP, axis=0)

    def numbers(mean, spread):
        return jnp.asarray((draw.normal(mean, spread, mask.shape) * mask).astype(np.float32))

    tokens = jnp.asarray((tokens * (segments > 0)).astype(np.int32))
    batch = Batch(
        Inputs(tokens, jnp.asarray(segments), prompt_width=PROMPT),
        mask=jnp.asarray(mask),
        sample_logps=numbers(-3, 0.3),
        old_logps=numbers(-3, 0.3),
        ref_logps=numbers(-3, 0.3),
        advantages=jnp.asarray((draw.normal(size=(ROWS, 1)) * mask).astype(np.float32)),
        values=numbers(0, 1),
        returns=numbers(0, 1),
    )
    return batch.replace(**changes)


def pairs(**changes) -> Batch:
    """Six rows of three pairs, padded on the right; the rejected completion of one pair is empty."""
    draw = np.random.default_rng(4)
    prompts, lengths = np.repeat([4, 2, 3], 2), np.array([5, 3, 2, 0, 1, 4])
    column = np.arange(PROMPT + COMPLETION)
    segments = (column < (prompts + lengths)[:, None]).astype(np.int32)
    mask = segments * (column >= prompts[:, None])
    tokens = draw.integers(0, 31, mask.shape)
    tokens[1::2] = np.where(column < prompts[1::2, None], tokens[::2], tokens[1::2])
    batch = Batch(
        Inputs(jnp.asarray((tokens * segments).astype(np.int32)), jnp.asarray(segments)),
        mask=jnp.asarray(mask.astype(np.float32)),
        ref_logps=jnp.asarray((draw.normal(-3, 0.3, mask.shape) * mask).astype(np.float32)),
    )
    return batch.replace(**changes)


def config_of(algorithm: str, **changes):
    config = default()
    config.algorithm.name = algorithm
    config.rollout.group_size, config.rollout.max_completion_length = GROUP, COMPLETION
    config.batch.packing, config.batch.prompts = "true", 3
    config.batch.microbatch_tokens = config.batch.pack_length = 20 if algorithm in ("grpo", "ppo") else 9
    config.optimizer.name, config.optimizer.b1, config.optimizer.learning_rate = "sgd", 0.0, 1.0
    config.optimizer.max_grad_norm = 0.0
    if algorithm in ("preference", "reward_model"):
        config.algorithm.beta = 0.3
    for name, setting in changes.items():
        section, leaf = name.split("__")
        config[section][leaf] = setting
    return config


def sample_of(batch: Batch) -> TypicalRows:
    inputs = batch.inputs
    return TypicalRows(*(np.asarray(x) for x in (inputs.tokens, inputs.segments, batch.mask)), inputs.prompt_width)


def packer_of(config, shape: ModelConfig, mesh, objective, sample: TypicalRows | None, backend=None) -> Packer:
    return make_packer(packing_spec(config), shape, mesh, objective.positions, sample, backend)


def both_updates(config, batch: Batch, shape: ModelConfig = SHAPE, make=objective_of, backend=None):
    """Parameters and metrics after the update of the rows and of their packed form, and the packed batch."""
    net, mesh = Net(shape), make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        optimizer, objective = make_optimizer(config), make(config, net)
        if config.algorithm.name == "ppo":
            params = {**Net(SHAPE).init(jax.random.key(0)), "score": {"kernel": jnp.ones((16, 1)) / 16}}
        else:
            params = jax.jit(net.init)(jax.random.key(0))
        packed = packer_of(config, shape, mesh, objective, sample_of(batch), backend)(batch)
        update = make_update(objective, optimizer, update_spec(config), mesh)
        found = [update(init_state(jax.tree.map(jnp.copy, params), optimizer, mesh), rows) for rows in (batch, packed)]
    return params, *found, packed


def check_same(config, batch: Batch, shape: ModelConfig = SHAPE, make=objective_of, backend=None) -> Batch:
    """Compares both updates, and returns the batch with the layout of packed rows."""
    params, (rows, metrics), (packed, packed_metrics), laid_out = both_updates(config, batch, shape, make, backend)
    assert (laid_out.inputs.layout.num_microbatches[0] > 1) == (config.batch.microbatch_tokens < 100)
    moved = max(jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), rows.params, params)))
    assert moved > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * max(moved, 1.0)), packed.params, rows.params)
    assert metrics.keys() == packed_metrics.keys()
    for name in metrics:
        values = packed_metrics[name].value, metrics[name].value
        np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-5, err_msg=name)
    return laid_out


slow = pytest.mark.slow
ON_POLICY = {"old_logps": None}
POLICY_CASES = {
    "grpo on-policy, with a reference": ({"algorithm__aggregation": "token"}, ON_POLICY),
    "grpo of an older policy": ({}, {}),
    "gspo": ({"algorithm__loss": "gspo"}, {}),
    "rloo on-policy": ({"algorithm__loss": "rloo", "algorithm__beta": 0.0}, ON_POLICY | {"ref_logps": None}),
    "an entropy bonus": ({"algorithm__entropy_coef": 0.1}, ON_POLICY),
    "top entropy": ({"algorithm__top_entropy_quantile": 0.5, "rollout__temperature": 0.7}, {}),
    "tokens chosen in the whole batch": ({"algorithm__loss": "clip_cov(fraction=0.3)"}, {"seeds": 3}),
    "weights by their mean": (
        {"algorithm__importance_correction": "token_truncate", "algorithm__importance_normalize": True}, {},
    ),
    "one micro-batch": ({"batch__microbatch_tokens": 400}, {}),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=slow if n else ()) for n, case in enumerate(POLICY_CASES)], ids=str
)
def test_policy_gradients(case):
    settings, fields = POLICY_CASES[case]
    if "seeds" in fields:
        fields = fields | {"seeds": jnp.full(ROWS, 3, jnp.uint32)}
    config = config_of("grpo", **({"algorithm__beta": 0.1} | settings))
    check_same(config, online_batch(**fields))


def test_a_batch_without_a_token_has_no_means():
    """Packed rows leave rows out of which nothing is read; where that are all, shares of a mean are no numbers yet."""
    net, mesh, batch = Net(SHAPE), make_mesh(devices=jax.devices()[:1]), online_batch(mask=jnp.zeros((ROWS, 9)))
    config = config_of("grpo")
    with jax.set_mesh(mesh):
        objective = objective_of(config, net)
        layout = packer_of(config, SHAPE, mesh, objective, sample_of(online_batch()))(batch).inputs.layout
        micro = microbatches_of(objective.prepare(batch).with_layout(layout), 1, 1)
        rows = micro.take(0)
    assert micro.count == 1 and jnp.isnan(rows.prepared.token_share.sum()) and rows.prepared.weights.sum() == 0


PREFERENCES = {
    "dpo+sft": {},
    "aot": {},
    "orpo(nll_on_prompt=True)": {},
    "dpo": {"algorithm__use_weighting": True},
}


@slow
@pytest.mark.parametrize("loss", PREFERENCES)
def test_pairs(loss):
    check_same(config_of("preference", algorithm__loss=loss, **PREFERENCES[loss]), pairs())


@slow
@pytest.mark.parametrize("loss", ["tpo", "aot+gold_sft"])
def test_triples(loss):
    """Gold completions are the chosen ones with another last token, so that packed rows share nearly all of them."""
    rows = pairs().take(jnp.asarray([0, 1, 0, 4, 5, 4]))
    last = (rows.inputs.segments.sum(axis=1) - 1)[2::3]
    gold = jnp.arange(2, 6, 3)
    tokens = rows.inputs.tokens.at[gold, last].set((rows.inputs.tokens[gold, last] + 1) % 31)
    config = config_of("preference", algorithm__loss=loss, batch__prompts=2)
    check_same(config, rows.replace(inputs=rows.inputs.replace(tokens=tokens)))


@slow
@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_labelled_rows(loss):
    rows = pairs(labels=jnp.asarray([1, 1, 0, 0, 1, 1], jnp.float32))
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), rows)
    check_same(config_of("preference", algorithm__loss=loss), twice)


@slow
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sft(smoothing):
    check_same(config_of("sft", algorithm__label_smoothing=smoothing), pairs())


@slow
def test_reward_model():
    check_same(config_of("reward_model"), pairs(margins=jnp.ones(6)), SCORING)


@slow
def test_policy_and_values_of_one_network():
    config = config_of("ppo", critic__shared=True)
    check_same(config, online_batch(), dataclasses.replace(SHAPE, head="lm"))


@pytest.mark.slow
def test_rows_that_share_no_prefix(monkeypatch):
    """As long rows are packed on accelerators: segments alone say what a token sees, so that no mask is read."""
    monkeypatch.setattr(planner, "MASKED_LENGTH", 0)
    packed = check_same(config_of("grpo", algorithm__beta=0.1), online_batch(), backend="tpu")
    assert packed.inputs.layout.prefix_segments is None


def test_long_rows_of_accelerators_share_no_prefix():
    """But where their attention reads a mask anyway; and flash reads none of short rows either."""
    config, mesh = config_of("grpo", batch__microbatch_tokens=0, batch__pack_length=0), make_mesh()
    half, windowed = (dataclasses.replace(shape, dtype="bfloat16") for shape in (SHAPE, WINDOWED))

    def shares(length: int, attention: str = "auto", backend: str = "gpu", shape: ModelConfig = half) -> bool:
        net, sample = dataclasses.replace(shape, attention=attention), typical_rollouts(8, GROUP, 256, length - 256)
        packer = make_packer(packing_spec(config), net, mesh, Positions(), sample, backend)
        assert packer.sizes is not None and packer.sizes.length >= length
        return packer.sizes.shares

    assert shares(512) and shares(512, "splash", "tpu") and not shares(512, "flash")
    assert not shares(8192) and not shares(8192, "splash", "tpu") and not shares(8192, "flash")
    assert shares(8192, "xla") and shares(8192, "cudnn") and shares(8192, backend="cpu")
    assert shares(8192, shape=windowed) and not shares(8192, "auto", "tpu", windowed)
    assert shares(8192, shape=SHAPE) and not shares(8192, "auto", "tpu", SHAPE)  # GPUs have no such kernel of fp32


@slow
def test_a_critic():
    def make(config, net):
        return value_regression(critic_spec(config), net)

    check_same(config_of("grpo"), online_batch(), SCORING, make)


@slow
@pytest.mark.parametrize(
    "shape", [WINDOWED, CHUNKED, YARN, dataclasses.replace(WINDOWED, scan_layers=True, remat="block")]
)
def test_windows_and_stretched_positions(shape):
    check_same(config_of("grpo"), online_batch(), shape)


@slow
def test_experts_balance_over_the_same_tokens():
    """In one micro-batch; a row without a completion is left out, and counts in no routing."""
    lengths = (np.asarray(online_batch().mask) > 0).any(1)
    batch = online_batch()
    segments = jnp.where(lengths[:, None], batch.inputs.segments, 0)
    full = batch.replace(inputs=batch.inputs.replace(segments=segments))

    check_same(config_of("grpo", batch__microbatch_tokens=400), full, SPARSE)


def test_auto_packs_where_rows_share_or_waste():
    mesh = make_mesh(devices=jax.devices()[:1])
    config = config_of("grpo", batch__packing="auto", batch__microbatch_tokens=0, batch__pack_length=0)

    def packer(config, sample, shape=SHAPE):
        return packer_of(config, shape, mesh, objective_of(config, Net(shape)), sample)

    shared = packer(config, full_rollouts(64, GROUP, 256, 16))
    assert shared.sizes is not None and shared.sizes.length == 256 + GROUP * 16
    assert packer(config, full_rollouts(64, 1, 8, 64)).sizes is None  # nothing is shared or shorter
    assert packer(config, typical_rollouts(64, GROUP, 256, 16), SPARSE).sizes is None  # balanced in each micro-batch
    assert packer(config, None).sizes is None
    axes = ("data", "fsdp", "context", "expert", "tensor")
    for sizes in ((2, 4, 1, 1, 1), (2, 1, 12, 1, 1)):
        local = full_rollouts(64 // sizes[0] // sizes[1], GROUP, 256, 16)  # those of one row shard
        mesh = jax.sharding.AbstractMesh(sizes, axes)
        found = packer_of(config, SHAPE, mesh, objective_of(config, Net(SHAPE)), local).sizes
        assert found is not None and found.length % sizes[2] == 0 and found.length >= 256 + GROUP * 16
    config.batch.packing = "false"
    assert packer(config, typical_rollouts(64, GROUP, 256, 16)).sizes is None


@pytest.mark.parametrize(
    ("changes", "shape", "message"),
    [
        ({"data__packing": True}, SHAPE, "batch.packing is true, but data.packing packs the rows already"),
        ({"algorithm__neftune_alpha": 5.0}, SHAPE, "neftune_alpha draws the noise of each row apart"),
        ({}, dataclasses.replace(SHAPE, lora=LoraConfig(2, dropout=0.1)), "lora.dropout drops the tokens"),
        ({}, dataclasses.replace(SHAPE, rope=Rope(kind="dynamic", factor=2.0, original_max_positions=4)),
         "rope_type dynamic rotates a prompt by the length of its row"),
        ({}, dataclasses.replace(SHAPE, mixers=(GatedDeltaNet, Attention)),
         "the layers of this model cannot read a prefix that rows share"),
        ({"batch__pack_length": 8}, SHAPE, "batch.pack_length is 8, but rows have up to 9 tokens"),
        ({"batch__microbatch_tokens": 8}, SHAPE, "set it to 9 x mesh.data x mesh.fsdp"),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_says_so(changes, shape, message):
    config, mesh = config_of("sft", **changes), make_mesh(devices=jax.devices()[:1])
    with pytest.raises(ConfigError, match=message):
        packer_of(config, shape, mesh, objective_of(config, Net(shape)), typical_rollouts(8, 1, PROMPT, COMPLETION))


def test_micro_batches_leave_little_room():
    """16 pairs of 128 tokens, each in a packed row of 192: four micro-batches of four, none of which is part empty."""
    mesh = make_mesh(devices=jax.devices()[:1])
    config = config_of("preference", batch__microbatch_tokens=0, batch__pack_length=192)
    spec, sample = packing_spec(config), full_rollouts(32, 2, 64, 64)
    sizes, _ = planner.packed_sizes(spec, SHAPE, mesh, Positions(), sample, "cpu", 1024)
    assert (sizes.length, sizes.packed_rows) == (192, 4)


def test_micro_batches_are_as_large_as_memory_allows():
    """By the bytes that are free on a device: from the fewest tokens to a third of the batch."""
    config = config_of("grpo", batch__microbatch_tokens=0, batch__pack_length=0, batch__packing="auto")
    sample, mesh = typical_rollouts(1024, 8, 64, 192), make_mesh(devices=jax.devices()[:1])

    def made(room, shape=SHAPE) -> Packer:
        spec = dataclasses.replace(packing_spec(config), group_size=8)
        return make_packer(spec, shape, mesh, Positions(), sample, "accelerator", room)

    def tokens(packer: Packer) -> int:
        assert packer.sizes is not None
        return packer.sizes.packed_rows * packer.sizes.length

    least, unknown = made(0.0), made(None)
    assert tokens(least) <= planner.FEWEST_TOKENS_ACCELERATOR * 1.5
    one = planner.tokens_in(1e9, SHAPE, gradients=True)
    assert one == 2 ** int(np.log2(one)) == 2 * planner.tokens_in(0.5e9, SHAPE, gradients=True)
    kept = [dataclasses.replace(SHAPE, layers=40, remat=remat) for remat in ("none", "dots", "block", "offload")]
    assert [planner.tokens_in(1e9, shape, gradients=True) for shape in kept] == sorted(
        planner.tokens_in(1e9, shape, gradients=True) for shape in kept
    )
    assert planner.tokens_in(1e9, SHAPE, gradients=False) > one
    # Of a mixture as wide as the dense one, with a copy of each token and a result for each of its experts.
    split = dataclasses.replace(SHAPE, experts=16, experts_per_token=8, expert_ffn=SHAPE.ffn // 8, ffn=0)
    assert all(planner.tokens_in(1e9, split, x) < planner.tokens_in(1e9, SHAPE, x) for x in (True, False))
    room = next(2.0**n for n in range(50) if planner.tokens_in(2.0**n, SHAPE, gradients=True) == 16384)
    most, between = made(1e12), made(room)
    assert 3 <= most.used <= 4 and tokens(most) > tokens(between) > tokens(least) and tokens(most) > tokens(unknown)
    # Passes keep less: several micro-batches at once, but a third of the batch at most.
    assert least.at_once == most.at_once == 1 < between.at_once <= between.used // 3


@pytest.mark.slow
def test_passes_of_several_micro_batches_give_the_same_log_probs():
    """`batch.logps_microbatch_tokens` joins micro-batches of the update, evenly, where nothing is differentiated.

    They are those of whole rows on scored tokens, and 0 elsewhere.
    """
    mesh, batch = make_mesh(devices=jax.devices()[:1]), online_batch()
    net = Net(SHAPE)
    params, found = jax.jit(net.init)(jax.random.key(0)), {}
    for size in (0, 30, 1000):
        config = config_of(
            "grpo", batch__logps_microbatch_tokens=size, batch__microbatch_tokens=10, batch__pack_length=10
        )
        pack = packer_of(config, SHAPE, mesh, objective_of(config, net), sample_of(batch))
        layout = pack.passing(batch.inputs.tokens, batch.inputs.segments, batch.mask)
        inputs = batch.inputs.replace(layout=layout)
        found[size] = int(layout.num_microbatches[0]), scored_logps(net, params, inputs, 0.7, ROWS, 1)
    counts = [count for count, _ in found.values()]
    assert counts[0] > counts[1] > counts[2] == 1
    of_rows = scored_logps(net, params, batch.inputs, 0.7, ROWS, 1)
    for _, logps in found.values():
        np.testing.assert_allclose(logps, of_rows * batch.mask, atol=1e-5)


@pytest.mark.slow
def test_packed_update_memory_without_vocabulary(monkeypatch):
    """Temporary memory grows with the hidden states of one micro-batch, not with rows times vocabulary."""
    shape = dataclasses.replace(SHAPE, vocab_size=4096, tie_embeddings=True)
    config, mesh = config_of("grpo", batch__microbatch_tokens=64, batch__pack_length=32), make_mesh()
    monkeypatch.setattr(planner, "FEWEST_TOKENS", {"cpu": 64})
    monkeypatch.setattr("jaxrl_llm.models.chunked_softmax.LOGITS_IN_FLIGHT", 8 * 4096)
    sizes = []
    with jax.set_mesh(mesh):
        optimizer, objective = make_optimizer(config), objective_of(config, Net(shape))
        state = init_state(jax.jit(Net(shape).init)(jax.random.key(0)), optimizer, mesh)
        update = make_update(objective, optimizer, update_spec(config), mesh)
        for groups in (2, 8):
            sample = full_rollouts(groups * GROUP, GROUP, 8, 24)
            zeros = jnp.zeros(sample.mask.shape)
            tokens, segments, mask = map(jnp.asarray, sample[:3])
            inputs = Inputs(tokens, segments, prompt_width=8)
            batch = Batch(inputs, mask, sample_logps=zeros, advantages=zeros)
            packed = packer_of(config, shape, mesh, objective, sample)(batch)
            memory = update.lower(state, packed).compile().memory_analysis()
            sizes.append(memory.temp_size_in_bytes)
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(state))
    tokens = 6 * GROUP * 24  # scored, more in the second batch than in the first
    assert sizes[1] - sizes[0] < tokens * 4096 * 4 / 10
