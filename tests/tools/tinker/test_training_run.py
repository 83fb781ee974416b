"""Gradients and steps of a training run on the embedded model: whatever is computed together, they are the same."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_llm.models.adapters import lora
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.tools.tinker.checkpoints import Place, Store
from jaxrl_llm.tools.tinker.messages import Datum, GradientRequest
from jaxrl_llm.tools.tinker.service import adam_settings
from jaxrl_llm.tools.tinker.training_run import (
    TrainingRun,
    checked_data,
    checked_options,
    lora_config,
    microbatches,
)

VOCABULARY = 320
AT_ONCE = 64  # tokens of a micro-batch: four rows of 16


def moved(sorter, rank: int = 4, seed: int = 0) -> TrainingRun:
    """A run whose adapters are others than at the start, where B is 0 and A has no gradient."""
    run, draw = TrainingRun(sorter, lora_config(rank), seed), np.random.default_rng(seed)
    run.weights = jax.tree.map(lambda x: x + 0.05 * draw.normal(size=x.shape).astype(np.float32), run.weights)
    return run


@pytest.fixture
def run(sorter):
    """Such a run."""
    return moved(sorter)


def drawn(length: int, seed: int = 0, **others) -> Datum:
    """A row of random tokens and weights."""
    draw = np.random.default_rng(100 * seed + length)
    tokens, targets = draw.integers(0, VOCABULARY, (2, length))
    weights = draw.normal(size=length).astype(np.float32)
    return Datum(tokens.astype(np.int32), {"target_tokens": targets, **(others or {"weights": weights})})


ROWS = [drawn(length) for length in (9, 20, 16, 1, 5, 12)]


def request(rows, loss_fn: str = "cross_entropy", forward_only: bool = False, **options) -> GradientRequest:
    return GradientRequest(rows, loss_fn, options, forward_only)


def computed(run, rows, loss_fn: str = "cross_entropy", at_once: int = AT_ONCE, forward_only: bool = False, **options):
    """The answer to a request, computed as the service does."""
    work = run.forward_backward(request(rows, loss_fn, forward_only, **options), at_once)
    for micro in work.microbatches:
        work.compute(micro)
    return work.finish()


def taken(run):
    """The gradients that a run has, which has none then."""
    gradients, run.gradients = run.gradients, None
    assert gradients is not None
    return jax.tree.map(np.asarray, gradients)


def same(a, b):
    """True when two trees are equal bit for bit."""
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in leaves
    )


def close(a, b, tolerance: float = 1e-6):
    """Asserts that two trees of gradients are equal up to rounding."""
    leaves, others = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (a, b))
    assert np.linalg.norm(others) > 0.1
    assert np.linalg.norm(leaves - others) <= tolerance * np.linalg.norm(others)


def copied(tree):
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)


# Gradients.


def test_log_probs_are_those_of_the_model(run):
    tokens, segments = np.zeros((2, len(ROWS), 20), np.int32)
    for place, row in enumerate(ROWS):
        tokens[place, : len(row.tokens)], segments[place, : len(row.tokens)] = row.tokens, 1
    logps = np.asarray(jax.nn.log_softmax(run.whole()(tokens, segments), axis=-1))
    answer, total = computed(run, ROWS, forward_only=True), 0.0
    assert len(answer.outputs) == len(ROWS)
    for place, (row, output) in enumerate(zip(ROWS, answer.outputs, strict=True)):
        expected = logps[place, np.arange(len(row.tokens)), row.inputs["target_tokens"]]
        np.testing.assert_allclose(output["logprobs"], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(output["elementwise_loss"], -row.inputs["weights"] * output["logprobs"], rtol=1e-6)
        total += output["elementwise_loss"].sum(dtype=np.float64)
    assert answer.metrics == {"loss:sum": pytest.approx(total)}


@pytest.mark.slow
def test_micro_batches_and_the_order_of_rows_change_nothing(run):
    whole, order = computed(run, ROWS), np.random.default_rng(1).permutation(len(ROWS))
    gradients = taken(run)
    for at_once, places in ((1, range(len(ROWS))), (AT_ONCE, order), (1, order)):
        answer = computed(run, [ROWS[place] for place in places], at_once=at_once)
        close(taken(run), gradients)
        assert answer.metrics["loss:sum"] == pytest.approx(whole.metrics["loss:sum"], rel=1e-6)
        for place, output in zip(places, answer.outputs, strict=True):
            for name, x in output.items():
                np.testing.assert_allclose(x, whole.outputs[place][name], rtol=1e-5, atol=1e-5)


def test_requests_add_up(run):
    computed(run, ROWS)
    whole = taken(run)
    computed(run, ROWS[:2])
    computed(run, ROWS[2:])
    close(taken(run), whole)
    computed(run, ROWS)
    computed(run, ROWS)
    close(taken(run), jax.tree.map(lambda x: 2 * x, whole))


@pytest.mark.slow
def test_many_targets_of_a_token_are_as_many_requests(run):
    draw, lengths = np.random.default_rng(2), (9, 16)
    targets = [draw.integers(0, VOCABULARY, (length, 3)) for length in lengths]
    weights = [draw.uniform(size=(length, 3)).astype(np.float32) for length in lengths]

    def rows(*which):
        return [
            dataclasses.replace(drawn(length), inputs={"target_tokens": x[(..., *which)], "weights": w[(..., *which)]})
            for length, x, w in zip(lengths, targets, weights, strict=True)
        ]

    together = computed(run, rows())
    gradients = taken(run)
    apart = [computed(run, rows(k)) for k in range(3)]
    close(taken(run), gradients)
    assert together.metrics["loss:sum"] == pytest.approx(sum(each.metrics["loss:sum"] for each in apart))
    for place in range(len(lengths)):
        for name in ("logprobs", "elementwise_loss"):
            expected = np.stack([each.outputs[place][name] for each in apart], axis=-1)
            np.testing.assert_allclose(together.outputs[place][name], expected, rtol=1e-5, atol=1e-5)


def test_rows_of_other_numbers_of_targets_are_one_request(run):
    wide = drawn(9, target_tokens=np.full((9, 3), 7))  # weights are 1 where there are none
    answer = computed(run, [wide, drawn(9, target_tokens=np.full(9, 7))], forward_only=True)
    np.testing.assert_allclose(answer.outputs[0]["logprobs"], answer.outputs[1]["logprobs"][:, None] @ np.ones((1, 3)))
    assert answer.metrics["loss:sum"] == pytest.approx(-4 * answer.outputs[1]["logprobs"].sum())


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", ["dro", "gspo"])
def test_on_policy_gradients_are_those_of_weighted_log_probs(run, loss_fn):
    """At a ratio of 1, where nothing is clipped, and no penalty pulls."""
    rows = [row for row in ROWS if len(row.tokens) <= 16]
    answer = computed(run, rows)
    logps, weighted, gradients = [output["logprobs"] for output in answer.outputs], answer.metrics, taken(run)
    sampled = []
    for row, own in zip(rows, logps, strict=True):
        inputs = {"target_tokens": row.inputs["target_tokens"], "logprobs": own, "advantages": row.inputs["weights"]}
        if loss_fn == "gspo":
            inputs["sequence_ratio_mask"] = np.ones(len(own), np.int64)
        sampled.append(dataclasses.replace(row, inputs=inputs))
    answer = computed(run, sampled, loss_fn)
    close(taken(run), gradients, 1e-5)
    expected = -sum(row.inputs["weights"].sum() for row in rows) if loss_fn == "gspo" else weighted["loss:sum"]
    assert answer.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
    assert {name for output in answer.outputs for name in output} == {"logprobs"}


def test_forward_alone_leaves_no_gradient(run):
    computed(run, ROWS, forward_only=True)
    assert run.gradients is None
    with pytest.raises(BadRequestError, match="no gradients since the last step"):
        run.step({})
    computed(run, ROWS)
    before = run.gradients
    computed(run, ROWS, forward_only=True)
    assert run.gradients is before


def test_a_request_that_fails_midway_leaves_earlier_gradients(run):
    computed(run, ROWS[:1])
    gradients, adapters = copied(run.gradients), run.weights
    work = run.forward_backward(request(ROWS), 16)
    work.compute(work.microbatches[0])
    run.weights = jax.tree.map(lambda x: x * np.inf, adapters)
    with pytest.raises(ArithmeticError, match="log-probs or losses of datum 0 are not finite"):
        work.compute(next(micro for micro in work.microbatches if micro.rows == [0]))
    run.weights = adapters
    assert same(run.gradients, gradients)
    computed(run, ROWS[1:])
    computed_apart = taken(run)
    computed(run, ROWS)
    close(computed_apart, taken(run))


def test_micro_batches_hold_every_row_once():
    lengths = [1, 16, 17, 33, 300, 5, 9, 31, 2, 16, 16]
    rows = checked_data(request([drawn(length, seed) for seed, length in enumerate(lengths)]), VOCABULARY)
    for tokens in (1, 16, 48, 100, 10**6):
        found = microbatches(rows, tokens)
        assert sorted(row for micro in found for row in micro.rows) == list(range(len(rows)))
        for micro in found:
            count, width = micro.arrays["tokens"].shape
            assert count.bit_count() == width.bit_count() == 1
            assert count * width <= max(tokens, width)
            for place, row in enumerate(micro.rows):
                length = lengths[row]
                assert micro.lengths[place] == length
                np.testing.assert_array_equal(micro.arrays["segments"][place], np.arange(width) < length)
                for name, x in {"tokens": rows[row].tokens, **rows[row].inputs}.items():
                    np.testing.assert_array_equal(micro.arrays[name][place, :length], x)
                    assert not micro.arrays[name][place, length:].any()
            assert not any(x[len(micro.rows) :].any() for x in micro.arrays.values())


# Steps.


def any_gradients(run, seed: int, scale: float = 1.0):
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jax.numpy.asarray(scale * draw.normal(size=x.shape), np.float32), run.weights)


def test_steps_are_those_of_torch(run):
    torch = pytest.importorskip("torch")
    parameters = [torch.tensor(np.asarray(x)).requires_grad_() for x in jax.tree.leaves(run.weights)]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), eps=1e-12)
    kinds = [(1e-3, 0.0, 0.0), (1e-2, 0.1, 1.0), (3e-3, 0.0, 1e4), (0.0, 0.3, 0.5), (2e-2, 0.5, 2.0)]
    for number, (learning_rate, decay, limit) in enumerate(kinds):
        run.gradients = any_gradients(run, number, scale=0.1)
        for parameter, x in zip(parameters, jax.tree.leaves(run.gradients), strict=True):
            parameter.grad = torch.tensor(np.asarray(x))
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit or torch.inf).item()  # which divides by it + 1e-6
        assert not 0 < limit < 1e3 or norm > 2 * limit
        optimizer.param_groups[0].update(lr=learning_rate, weight_decay=decay)
        optimizer.step()
        metrics = run.step({"learning_rate": learning_rate, "weight_decay": decay, "grad_clip_norm": limit})
        assert metrics["grad_norm:mean"] == pytest.approx(norm, rel=1e-5)
        assert metrics["learning_rate:mean"] == pytest.approx(learning_rate)
        for parameter, x in zip(parameters, jax.tree.leaves(run.weights), strict=True):
            np.testing.assert_allclose(x, parameter.detach(), rtol=1e-5, atol=1e-6, err_msg=f"step {number}")
    assert int(run.adam.count) == len(kinds)


def test_betas_and_eps_are_those_of_a_step(run):
    torch = pytest.importorskip("torch")
    parameters = [torch.tensor(np.asarray(x)).requires_grad_() for x in jax.tree.leaves(run.weights)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)
    for number, (beta1, beta2, eps) in enumerate([(0.5, 0.8, 1e-2), (0.95, 0.99, 1.0)]):
        run.gradients = any_gradients(run, number)
        for parameter, x in zip(parameters, jax.tree.leaves(run.gradients), strict=True):
            parameter.grad = torch.tensor(np.asarray(x))
        optimizer.param_groups[0].update(betas=(beta1, beta2), eps=eps)
        optimizer.step()
        run.step({"learning_rate": 1e-2, "beta1": beta1, "beta2": beta2, "eps": eps})
    for parameter, x in zip(parameters, jax.tree.leaves(run.weights), strict=True):
        np.testing.assert_allclose(x, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_a_snapshot_stays_as_it_was(run):
    snapshot, before = run.snapshot(), copied(run.weights)
    for number in range(2):
        run.gradients = any_gradients(run, number)
        run.step({"learning_rate": 1e-2})
    assert same(snapshot, before)
    assert not same(run.weights, before)


def test_the_base_stays_as_it_is_and_runs_apart(sorter):
    base, one, other = copied(sorter.params), moved(sorter), moved(sorter)
    kept = copied(other.weights)
    computed(one, ROWS)
    one.step({"learning_rate": 1e-2})
    assert same(sorter.params, base)
    assert same(other.weights, kept)
    assert other.gradients is None


def test_gradients_that_are_not_finite_make_no_step(run):
    for _ in range(2):
        computed(run, ROWS)
        run.step({})
    kept = copied((run.weights, run.adam))
    huge = [drawn(9, target_tokens=row.inputs["target_tokens"], weights=np.full(9, 1e36)) for row in ROWS[:1]]
    computed(run, huge)
    with pytest.raises(ArithmeticError, match="no step was made"):
        run.step({"grad_clip_norm": 1.0})
    assert same((run.weights, run.adam), kept)
    assert run.gradients is None
    computed(run, ROWS)
    assert np.isfinite(run.step({})["grad_norm:mean"])


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([1], r"adam_params is \[1\]; it takes an object"),
        ({"eps": 0}, r"eps is 0; it takes 1.2e-38 or more, as weights without gradients would become 0 / 0"),
        ({"beta1": 1 - 1e-12}, "beta1 and beta2 are below 1"),  # 1 in fp32
        ({"learning_rate": 1e39}, r"'learning_rate' = 1e\+39; it takes numbers from 0 on"),
        ({"learning_rate": 10**400}, "'learning_rate' = 1000"),
        ({"learning_rate": float("nan")}, "'learning_rate' = nan"),
        ({"learning_rate": True}, "'learning_rate' = True"),
        ({"momentum": 0.9}, "'momentum' = 0.9; it takes .*learning_rate, beta1"),
    ],
)
def test_numbers_of_a_step_that_would_spoil_the_weights_are_named(given, error):
    with pytest.raises(BadRequestError, match=error):
        adam_settings(given)
    assert adam_settings({"type": "adamw", "eps": 1e-12}) == {"eps": pytest.approx(1e-12)}


# Saved runs.


def test_a_saved_run_goes_on_as_if_it_had_not_been(run, sorter, tmp_path):
    for rows in (ROWS[:3], ROWS[3:]):
        computed(run, rows)
        run.step({"learning_rate": 1e-2, "weight_decay": 0.1})
    store, place = Store(tmp_path), Place("run", "weights", "two")
    store.save(place, run, {})
    config, adapters, adam = store.load(place.path, sorter, moments=True)
    assert same(adapters, run.weights)
    assert same(adam, run.adam)
    again, other = moved(sorter, seed=1), TrainingRun(sorter, config, 2)
    other.restore(config, adapters, adam)
    computed(again, ROWS)
    again.restore(*store.load(place.path, sorter, moments=True))  # its gradients are those of other adapters
    assert again.gradients is None
    for each in (run, again, other):
        computed(each, ROWS[2:])
        each.step({"learning_rate": 1e-2})
    assert same((again.weights, again.adam), (run.weights, run.adam))
    assert same((other.weights, other.adam), (run.weights, run.adam))
    again.restore(*store.load(place.path, sorter))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(again.adam))


def test_adapters_of_another_shape_are_no_run_s(run, sorter):
    other = moved(sorter, rank=2)
    adapters = copied(run.weights)
    with pytest.raises(BadRequestError, match=r"of rank 2 .* of rank 4"):
        run.restore(other.config, other.weights, other.adam)
    attention = TrainingRun(sorter, lora_config(4, train_mlp=False), 0)
    with pytest.raises(BadRequestError, match="create a run from the weights"):
        run.restore(attention.config, attention.weights, attention.adam)
    assert same(run.weights, adapters)


def test_peft_reads_what_was_saved(run, tmp_path):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from jaxrl_llm.models.files.hf import locate

    Store(tmp_path).save(Place("run", "sampler_weights", "a"), run, {})
    oracle = AutoModelForCausalLM.from_pretrained(locate("embedded:sort"))
    tokens = np.stack([np.resize(row.tokens, 20) for row in ROWS])
    plain = oracle(torch.tensor(tokens)).logits.detach().numpy()
    oracle = peft.PeftModel.from_pretrained(oracle, tmp_path / "run" / "sampler_weights" / "a").eval()
    own = np.asarray(run.whole()(tokens, np.ones_like(tokens)))
    np.testing.assert_allclose(own, oracle(torch.tensor(tokens)).logits.detach().numpy(), atol=2e-4)
    assert np.abs(own - plain).max() > 0.1


def test_a_seed_draws_the_adapters(sorter):
    one, again, other = (TrainingRun(sorter, lora_config(2), seed).weights for seed in (3, 3, 4))
    assert same(one, again)
    assert not same(one, other)
    q = one["layers"]["attention"]["q"]
    assert np.asarray(q["lora_a"]).any()
    assert not np.asarray(q["lora_b"]).any()


# What is refused.


@pytest.mark.parametrize(
    ("loss_fn", "options", "error"),
    [
        ("crossentropy", {}, "loss_fn is 'crossentropy'; .* the closest is cross_entropy"),
        ("", {}, "loss_fn is ''"),
        ("cross_entropy", {"beta": 1.0}, "loss_fn_config has 'beta'; cross_entropy takes none"),
        ("ppo", {"clip_low": 1.0}, "'clip_low'; ppo takes clip_low_threshold, clip_high_threshold"),
        ("dro", {"beta": -1.0}, r"loss_fn_config.beta is -1\.0; it takes a number from 0 on"),
        ("dro", {"beta": float("nan")}, "loss_fn_config.beta is nan"),
        ("dro", {"beta": float("inf")}, "loss_fn_config.beta is inf"),
        ("dro", {"beta": 10**400}, "loss_fn_config.beta is 1000"),
        ("dro", {"beta": "0.1"}, "loss_fn_config.beta is '0.1'"),
        ("dro", {"beta": None}, "loss_fn_config.beta is None"),
        ("cispo", {"clip_low_threshold": 5}, r"clip_low_threshold is 5, above clip_high_threshold, 4"),
        ("gspo", {"clip_high_threshold": 0.5}, r"clip_low_threshold is 0\.8, above clip_high_threshold, 0\.5"),
    ],
)
def test_options_that_a_loss_has_not_are_named(loss_fn, options, error):
    with pytest.raises(BadRequestError, match=error):
        checked_options(request(ROWS, loss_fn, **options))


def test_options_have_defaults():
    assert checked_options(request([], "ppo", clip_low_threshold=0.5)) == {
        "clip_low_threshold": np.float32(0.5), "clip_high_threshold": np.float32(1.2)
    }  # fmt: skip
    assert checked_options(request([], "cross_entropy")) == {}


def three(**inputs) -> Datum:
    """A row of three tokens."""
    return Datum(np.arange(3), {name: np.asarray(x) for name, x in inputs.items() if x is not None})


SAMPLED = {"target_tokens": [1, 2, 3], "logprobs": [-1.0] * 3, "advantages": [1.0] * 3}


@pytest.mark.parametrize(
    ("row", "loss_fn", "error"),
    [
        (three(**SAMPLED | {"advantages": None}), "ppo", "datum 1 has no advantages in loss_fn_inputs, which"),
        (three(**SAMPLED), "gspo", "datum 0 has no sequence_ratio_mask"),
        (three(**SAMPLED, mask=[1, 1, 1]), "ppo", "datum 1 has 'mask' in loss_fn_inputs; ppo takes .*clip_high"),
        (three(**SAMPLED, clip_low_threshold=[0.5] * 3), "ppo", "datum 1 or datum 0 has clip_low_threshold"),
        (Datum(np.arange(2), three(**SAMPLED).inputs), "ppo", "datum 1 has 2 tokens and 3 target_tokens"),
        (Datum(np.arange(0), {name: np.zeros(0) for name in SAMPLED}), "ppo", "datum 1 has 0 tokens"),
        (Datum(np.array([0, 1, 320]), three(**SAMPLED).inputs), "ppo", "^tokens of datum 1 are no ids below 320"),
        (Datum(np.array([0, -1, 3]), three(**SAMPLED).inputs), "ppo", "^tokens of datum 1 are no ids below 320"),
        (three(**SAMPLED | {"target_tokens": [1, 2, 2**33]}), "ppo", "^target_tokens of datum 1 are no ids below 320"),
        (three(**SAMPLED | {"target_tokens": [1, 2, -1]}), "ppo", "^target_tokens of datum 1 are no ids below 320"),
        (three(**SAMPLED | {"target_tokens": [1.0, 2, 3]}), "ppo", "^target_tokens of datum 1 are no ids below 320"),
        (three(**SAMPLED | {"target_tokens": [[1], [2], [3]]}), "ppo", r"^target_tokens of datum 1 have the shape"),
        (three(**SAMPLED | {"logprobs": [-1.0] * 2}), "ppo", r"^logprobs of datum 1 has the shape \[2\]"),
        (three(**SAMPLED | {"logprobs": [-1.0, np.nan, -1.0]}), "ppo", "^logprobs of datum 1 .* not finite"),
        (three(**SAMPLED | {"advantages": [np.inf, 0.0, 0.0]}), "ppo", "^advantages of datum 1 .* not finite"),
        (three(target_tokens=[1, 2, 3], weights=[[1.0]] * 3), "cross_entropy", r"^weights of datum 1 has the shape"),
        (three(target_tokens=np.zeros((3, 0), int)), "cross_entropy", r"datum 1 have the shape \[3, 0\]"),
        (three(target_tokens=np.zeros((3, 1, 1), int)), "cross_entropy", r"the shape \[3, 1, 1\]; .* or K"),
    ],
)  # fmt: skip
def test_a_row_that_a_loss_cannot_read_is_named(row, loss_fn, error):
    first = three(**SAMPLED) if loss_fn != "cross_entropy" else three(target_tokens=[1, 2, 3])
    with pytest.raises(BadRequestError, match=error):
        checked_data(request([first, row], loss_fn), VOCABULARY)


def test_a_row_beyond_the_positions_that_a_model_has_learned_is_refused():
    checked_data(request([three(target_tokens=[1, 2, 3])]), VOCABULARY, 3)
    with pytest.raises(BadRequestError, match="datum 0 has 3 tokens, but the model has 2 positions"):
        checked_data(request([three(target_tokens=[1, 2, 3])]), VOCABULARY, 2)


def test_a_request_without_rows_is_refused():
    with pytest.raises(BadRequestError, match="data has no rows"):
        checked_data(request([]), VOCABULARY)


def test_weights_are_one_where_there_are_none():
    (row,) = checked_data(request([three(target_tokens=[1, 2, 3])]), VOCABULARY)
    assert row.inputs["weights"].tolist() == [1.0, 1.0, 1.0]
    assert {x.dtype.name for x in row.inputs.values()} == {"int32", "float32"}


def test_adapters_are_of_attention_or_of_the_mlp():
    mlp = lora_config(8, train_attn=False)
    attention = lora_config(8, train_mlp=False)
    assert {"gate", "up", "down"} <= set(mlp.targets)
    assert {"q", "k", "v", "o"} <= set(attention.targets)
    assert sorted(mlp.targets + attention.targets) == sorted(lora.TARGETS)
    assert (mlp.rank, mlp.scale) == (8, 4.0)
    for arguments in ((8, False, False), (0,)):
        with pytest.raises(BadRequestError, match="takes a rank from 1 on, and train_attn or train_mlp"):
            lora_config(*arguments)
