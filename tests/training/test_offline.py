"""Batches of given rows: pairs, labelled rows and their mismatches, references, running means, held-out rows."""

import json

import jax
import numpy as np
import pytest

from jaxrl_llm.config import ConfigError, batch_rows, default, validate
from jaxrl_llm.data import loading, opening, tasks
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.model import load_model
from jaxrl_llm.train import train
from jaxrl_llm.training import offline
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.run import build
from jaxrl_llm.training.setup.specs import data_spec, mismatches, offline_spec


def config_of(name: str, loss: str = "dpo", task: str = "sort_pairs", **algorithm):
    config = default()
    config.algorithm.name, config.algorithm.loss, config.algorithm.beta = name, loss, 0.1
    config.data.path, config.data.eval_split = f"task:{task}", "validation"
    config.batch.prompts, config.total_steps, config.eval.every, config.eval.prompts = 4, 2, -1, 6
    config.optimizer.learning_rate, config.optimizer.eps = 1e-3, 1e-4
    config.logging.backends = ()
    for key, value in algorithm.items():
        config.algorithm[key] = value
    return config


def built(config, rows=None):
    """The run on a few rows of its task, which are also its held-out rows."""
    mesh = make_mesh(devices=jax.devices()[:1])
    rows = tasks.generate(config.data.path.removeprefix("task:"), size=24) if rows is None else rows
    with jax.set_mesh(mesh):
        return build(config, mesh, Given(train_dataset=rows, eval_dataset=None if config.data.eval_path else rows))


def examples_of(config, rows, tokenizer):
    spec = data_spec(config)
    sources = opening.open_sources(spec, tokenizer, rows)
    return offline.as_examples(loading.tokenized(spec, sources, spec.kind, tokenizer).rows)


@pytest.fixture(scope="module")
def tokenizer():
    return load_model("embedded:sort").tokenizer


# --- rows ---


def test_pairs_are_adjacent_rows_chosen_first(tokenizer):
    rows = [{"prompt": "sort:21=", "chosen": "12", "rejected": "21", "margin": 0.5},
            {"prompt": "sort:43=", "chosen": "34", "rejected": "43"}]  # fmt: skip
    config = config_of("reward_model")
    examples = examples_of(config, rows, tokenizer)
    batch = offline.pad_examples(offline.with_mismatches(offline_spec(config, 16), examples), 16)
    texts = [
        tokenizer.decode(row[segments > 0])
        for row, segments in zip(batch.inputs.tokens, batch.inputs.segments, strict=True)
    ]
    eos = tokenizer.eos_token
    assert texts == [f"sort:21=12{eos}", f"sort:21=21{eos}", f"sort:43=34{eos}", f"sort:43=43{eos}"]
    np.testing.assert_array_equal(batch.margins, [0.5, 0.5, 0.0, 0.0])
    assert batch.labels is None
    assert batch.ref_logps is None


def test_mismatch_has_the_completion_before():
    rows = [
        {"ids": [1, 2, 7, 7], "mask": [0, 0, 1, 1], "label": True},
        {"ids": [3, 8], "mask": [0, 1], "label": False},
        {"ids": [4, 5, 6, 9], "mask": [0, 0, 0, 1], "label": True},
    ]
    config = config_of("preference", "kto")
    examples = [[row] for row in rows]
    pairs = offline.with_mismatches(offline_spec(config, 4), examples)
    assert [example[0] for example in pairs] == rows
    others = [example[1] for example in pairs]
    assert [row["ids"] for row in others] == [[1, 2, 9], [3, 7, 7], [4, 5, 6, 8]]
    assert [row["mask"] for row in others] == [[0, 0, 1], [0, 1, 1], [0, 0, 0, 1]]
    assert [row["label"] for row in others] == [True, False, True]
    assert offline.longest(examples, mismatches(config)) == 5
    shorter = offline.with_mismatches(offline_spec(config, 3), examples)
    assert shorter[2][1]["mask"] == [0, 0, 0]  # nothing of it fits
    without = config_of("preference", "apo_zero_unpaired")
    assert offline.with_mismatches(offline_spec(without, 4), examples[:1]) == examples[:1]


def test_pairs_become_labelled_rows():
    from datasets import Dataset

    pairs = Dataset.from_list([{"prompt": "sort:21=", "chosen": "12", "rejected": "21"}])
    config = config_of("preference", "kto")
    examples = examples_of(config, pairs, load_model("embedded:sort").tokenizer)
    assert [row["label"] for (row,) in examples] == [True, False]
    assert examples[0][0]["ids"] != examples[1][0]["ids"]


def test_kto_warns_of_unbalanced_labels(caplog):
    examples = [[{"label": label}] for label in (True, True, True, False)]
    offline.check_balance(examples, desirable_weight=1.0, undesirable_weight=1.0)
    assert "3 desirable and 1 undesirable" in caplog.text
    caplog.clear()
    offline.check_balance(examples, desirable_weight=1.0, undesirable_weight=3.0)
    assert not caplog.text


def test_rows_of_a_batch():
    labels = {"kto": 8, "apo_zero_unpaired": 4, "kto(desirable_weight=2.0)": 8}
    for loss, rows in ({"dpo": 8, "tpo": 12, "dpo+gold_sft": 12} | labels).items():
        assert batch_rows(config_of("preference", loss)) == rows
    assert batch_rows(config_of("reward_model")) == 8
    assert batch_rows(config_of("sft")) == 4


@pytest.mark.slow
def test_batches_of_rows_of_like_length_are_as_wide_as_their_own(tmp_path):
    """`data.group_by_length`: the loss of a batch is that of its rows in full width, and there are few widths."""
    rows = [{"prompt": f"sort:{'3' * n}=", "completion": "3" * n} for n in range(1, 25)] * 4
    config = config_of("sft", "nll", task="sort_demos")
    config.data.eval_split, config.data.group_by_length, config.batch.prompts = None, True, 8
    run = built(config, rows)
    assert run.pack.sizes is None and 3 <= len(run.source.spec.widths) <= 6
    seen = []
    for _ in range(12):  # an epoch
        batch = run.source.next(run.state, jax.random.key(0)).batch
        used, width = int((batch.inputs.segments > 0).sum(1).max()), batch.inputs.tokens.shape[1]
        assert width == min(x for x in run.source.spec.widths if x >= used)
        seen.append(width)
    assert len(set(seen)) > 1 and seen == sorted(seen, reverse=True)
    with jax.set_mesh(run.mesh):
        pad = run.source.spec.width - batch.inputs.tokens.shape[1]
        wide = jax.tree.map(lambda x: np.pad(x, ((0, 0), (0, pad))) if np.ndim(x) == 2 else x, batch)
        losses = [run.update(jax.tree.map(jax.numpy.copy, run.state), x, run.frozen)[1]["loss"].value
                  for x in (batch, wide)]  # fmt: skip
    assert pad > 0
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("data", "packing", True, "data.packing is true"),
        ("data", "streaming", True, "data.group_by_length needs all rows before training"),
        ("batch", "packing", "true", "batch.packing is true"),
        ("algorithm", "name", "grpo", "algorithm.name is grpo, which samples its rows"),
    ],
)
def test_rows_of_like_length_where_that_saves_nothing(section, key, value, message):
    config = config_of("sft", loss="auto")
    config.data.group_by_length = True
    config[section][key] = value
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_data_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match="chosen"):
        built(config_of("preference", "dpo", task="sort_demos"))
    with pytest.raises(ConfigError, match="label"):
        built(config_of("preference", "kto", task="sort_demos"))


# --- references ---


@pytest.mark.slow
def test_precomputed_reference_is_the_same(tmp_path):
    """Also the held-out rows, which are more than one part, and with micro-batches."""
    found = []
    for precompute in (False, True):
        config = config_of("preference", "dpo+sft")
        config.output_dir, config.data.precompute_reference = str(tmp_path / str(precompute)), precompute
        config.eval.every, config.eval.prompts, config.batch.microbatch_rows = 0, 5, 4
        found.append(
            train(config, tasks.generate("sort_pairs", size=24), tasks.generate("sort_pairs", "test", 5)).metrics
        )
    for step, precomputed in zip(*found, strict=True):
        for name in step.keys() - {"tokens_per_second", "mfu", "step_time"}:
            if not name.startswith(("time/", "machine/")):
                np.testing.assert_allclose(precomputed[name], step[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert found[0][-1]["eval/rewards/margins"] != 0


@pytest.mark.slow
def test_the_reference_follows_the_policy(tmp_path):
    """TR-DPO: from the third step on the reference is the policy after the second, for held-out rows too."""
    config = config_of("preference", "dpo")
    config.algorithm.ref_sync_steps, config.algorithm.ref_mixup_alpha = 2, 1.0
    config.data.shuffle, config.eval.every, config.eval.prompts, config.eval.measure = False, 1, 8, "loss"
    config.total_steps, config.output_dir = 3, str(tmp_path / "goes on")
    pairs = tasks.generate("sort_pairs", size=config.batch.prompts)  # the same in each step
    metrics = train(config, pairs, pairs[:8]).metrics

    # Rewards of a step are measured before its update, those of held-out rows behind it.
    rewards = [row["rewards/chosen"] for row in metrics if "rewards/chosen" in row]
    assert [abs(reward) > 1e-3 for reward in rewards] == [False, True, False]
    held_out = [row for row in metrics if "eval/logps/chosen" in row]
    moved = [row["eval/rewards/chosen"] / config.algorithm.beta for row in held_out]
    start, _, second, third = (row["eval/logps/chosen"] for row in held_out)
    np.testing.assert_allclose(moved[2:], [second - start, third - second], atol=1e-4)
    # A run that goes on has the reference that it left.
    config.total_steps = 4
    resumed = train(config, pairs, pairs[:8]).metrics[-1]
    config.output_dir = str(tmp_path / "at once")
    at_once = train(config, pairs, pairs[:8]).metrics[-1]
    for name in ("loss", "rewards/chosen", "eval/rewards/chosen"):
        assert resumed[name] == at_once[name], name


@pytest.mark.parametrize(
    ("algorithm", "loss", "precompute", "message"),
    [
        ("sft", "nll", False, "ref_sync_steps is 8, but algorithm.name = 'sft' has no reference"),
        ("preference", "simpo", False, "ref_sync_steps is 8, but algorithm.loss = 'simpo' reads no reference"),
        ("preference", "dpo", True, "ref_sync_steps is 8, but data.precompute_reference reads the reference once"),
    ],
)
def test_a_reference_that_cannot_move(algorithm, loss, precompute, message):
    config = config_of(algorithm, loss, **({"task": "sort_demos"} if algorithm == "sft" else {}))
    config.algorithm.ref_sync_steps, config.data.precompute_reference = 8, precompute

    def start():
        validate(config)
        built(config)

    with pytest.raises(ConfigError, match=message):
        start()


def test_a_reference_is_kept_only_when_it_is_read():
    for config, kept in (
        (config_of("preference", "dpo"), True),
        (config_of("preference", "simpo"), False),
        (config_of("preference", "dpo", reference_free=True), False),
        (config_of("sft", "nll", task="sort_demos"), False),
    ):
        source = built(config).source
        assert (source.reference is not None) == kept, config.algorithm.loss
    config = config_of("preference", "dpo")
    config.data.precompute_reference = True
    rows = [{"prompt": f"sort:{a}1=", "chosen": f"1{a}", "rejected": f"{a}1"} for a in range(2, 8)]
    source = built(config, rows).source
    assert source.reference is None
    assert "ref" in source.pipeline.example(0)[0]


# --- running mean ---


def test_bco_subtracts_the_running_mean():
    config = config_of("preference", "bco_pair(running_mean=True)")
    config.data.shuffle = False
    run = built(config)
    source = run.source
    lower = jax.tree.map(lambda x: x * 0.9, run.state.params)  # not the reference, so that rewards are not 0
    state = run.state.__class__(run.state.step, lower, run.state.opt_state)
    rewards, shifts = [], []
    for step in range(2):
        batch = source.next(state, jax.random.key(step)).batch
        logps = offline._logps(source.net, lower, batch, 8, source.mesh)
        rewards.append(np.asarray(((logps - batch.ref_logps) * batch.mask).sum(1)) * 0.1)
        shifts.append(np.unique(batch.scalars.reward_shift))
    np.testing.assert_allclose(shifts[0], rewards[0].mean(), rtol=1e-5)
    np.testing.assert_allclose(shifts[1], np.concatenate(rewards).mean(), rtol=1e-5)
    saved = json.loads(json.dumps(source.get_state()))
    again = built(config).source
    again.set_state(saved, {})
    batches = [s.next(state, jax.random.key(3)).batch for s in (source, again)]
    jax.tree.map(np.testing.assert_array_equal, *batches)


@pytest.mark.slow
def test_a_resumed_run_equals_an_undisturbed_one(tmp_path):
    found = []
    for name, stops in (("whole", (4,)), ("resumed", (2, 4))):
        for stop in stops:
            config = config_of("preference", "bco_pair(running_mean=True)")
            config.output_dir, config.total_steps = str(tmp_path / name), stop
            result = train(config, tasks.generate("sort_pairs", size=24))
        found.append((result.metrics[-1], jax.device_get(result.model.params)))
    (metrics, params), (other_metrics, other_params) = found
    assert metrics["step"] == other_metrics["step"] == 4
    jax.tree.map(np.testing.assert_array_equal, params, other_params)
    for name in ("loss", "num_tokens", "rewards/margins"):
        assert metrics[name] == other_metrics[name]


# --- held-out rows ---


@pytest.mark.parametrize(
    ("loss", "task"),
    [
        ("kto", "sort_labels"),
        pytest.param("dpo", "sort_pairs", marks=pytest.mark.slow),
        pytest.param("aot", "sort_pairs", marks=pytest.mark.slow),
        pytest.param("tpo", "sort_triples", marks=pytest.mark.slow),
    ],
)
def test_held_out_rows_are_one_batch(loss, task):
    """Whatever the size of the parts, and with a last one that is filled up."""
    found = []
    for rows in (6, 12) if loss == "tpo" else (4, 8):
        config = config_of("preference", loss, task=task)
        config.eval.every, config.eval.prompts, config.batch.microbatch_rows = 0, 5, rows
        run = built(config)
        moved = jax.tree.map(lambda x: x * 1.02, run.state.params)
        found.append(run.evaluation(moved, jax.random.key(0)))
    assert found[0]["eval/rewards/chosen"] != 0
    for name in found[0]:
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_long_row_does_not_make_all_held_out_rows_take_more_memory():
    """Training packs 16 tokens of most rows; in the evaluation they are as wide as the longest, and fewer at once."""
    config = config_of("sft", "nll")
    config.batch.prompts, config.batch.packing, config.batch.microbatch_tokens = 16, "true", 256
    config.eval.prompts = 17
    config.data.max_length, config.eval.every, mesh = 128, 0, make_mesh(devices=jax.devices()[:1])
    short = [{"prompt": f"sort:{n}=", "completion": str(n)} for n in range(100, 116)]
    long = {"prompt": f"sort:{'1' * 100}=", "completion": "1"}
    found = []
    for held_out in ([*short, long], short):
        with jax.set_mesh(mesh):
            run = build(config, mesh, Given(train_dataset=[*short, long], eval_dataset=held_out))
        (evaluation,) = run.evaluation.sets
        width = evaluation.batch.inputs.tokens.shape[1]
        assert evaluation.rows * width <= run.source.pack.passing_tokens
        found.append((width, evaluation.rows))
    assert found == [(112, 1), (16, 7)]


@pytest.mark.slow
def test_what_is_measured():
    def names(config):
        config.eval.every = 0
        run = built(config)
        return set(run.evaluation(run.state.params, jax.random.key(0)))

    demos = config_of("sft", "nll", task="sort_demos")
    assert "eval/loss" in names(demos)
    demos.data.eval_path = "task:sort"  # prompts and answers, nothing to learn from
    assert not {"eval/loss"} & (found := names(demos)) and "eval/greedy_accuracy" in found
    demos.data.eval_path, demos.eval.measure = "task:sort_demos", "both"
    assert {"eval/loss", "eval/greedy_accuracy"} <= names(demos)


# --- meshes ---

MESH = """
import jax, numpy as np
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.training.step import improve
from jaxrl_llm.training.setup.run import build
from jaxrl_llm.training.logging.step_log import merge

def step(path, data, fsdp, tensor, microbatch_rows=0):
    config = load_config_file(path)
    config.batch.prompts, config.eval.every, config.batch.microbatch_rows = 8, 0, microbatch_rows
    config.eval.measure, config.eval.prompts = "auto", 10
    config.optimizer.learning_rate, config.optimizer.eps, config.optimizer.warmup_steps = 1e-3, 1e-4, 0
    mesh = make_mesh(data, fsdp, tensor, devices=jax.devices()[: data * fsdp * tensor])
    with jax.set_mesh(mesh):
        run = build(config, mesh)
        experience = run.source.next(run.state, jax.random.key(0))
        state, updates = improve(run, run.state, experience.batch)
        metrics = merge(updates)
        return jax.device_get(state.params), metrics | run.evaluation(state.params, jax.random.key(0))

for name in {names}:
    path = f"{root}/configs/{{name}}.py:tiny"
    params, metrics = step(path, 1, 1, 1)
    for shape in ((2, 2, 2), (1, 4, 1, 12 if name == "tpo" else 8)):
        other_params, other_metrics = step(path, *shape)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, other_params)
        for key in metrics.keys() - {{"rewards/accuracies"}}:  # of rewards that are 0 but for rounding
            np.testing.assert_allclose(other_metrics[key], metrics[key], rtol=1e-4, atol=1e-5, err_msg=key)
        print("same", name, shape)
"""


@pytest.mark.slow
def test_every_mesh_gives_the_same_step(run_python, root):
    done = run_python("-c", MESH.format(names=["dpo", "kto", "reward_model", "tpo"], root=root), devices=8, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("same") == 8


@pytest.mark.slow
def test_a_mesh_does_not_cut_a_pair(run_python, root):
    flags = ["--config.batch.prompts=6", "--config.output_dir=out", "--config.mesh.fsdp=4"]
    done = run_python("-m", "jaxrl_llm.train", f"--config={root / 'configs/dpo.py'}:tiny", *flags, devices=4)
    assert done.returncode == 2
    assert "12 rows does not divide into mesh.data x mesh.fsdp x mesh.expert = 4 parts of whole pairs" in done.stderr


# --- learning ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "task", "beta"), [("apo_zero_unpaired", "sort_labels", 1.0), ("aot", "sort_pairs", 0.1)]
)
def test_held_out_accuracy_and_margin_rise(loss, task, beta, tmp_path):
    """Of losses without a configuration of their own: tests/system/test_learning.py runs the others."""
    config = config_of("preference", loss, task=task)
    config.algorithm.beta = beta
    config.output_dir, config.total_steps, config.batch.prompts = str(tmp_path), 30, 32
    config.optimizer.learning_rate, config.optimizer.eps = 3e-5, 1e-8
    config.eval.every, config.eval.prompts, config.checkpoint.every = 0, 128, 0
    first, *_, last = train(config).metrics
    assert last["eval/rewards/accuracies"] > max(0.8, first["eval/rewards/accuracies"] - 0.01), last
    assert last["eval/rewards/margins"] > first["eval/rewards/margins"] + 0.02
    assert last["eval/loss"] < first["eval/loss"]


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("strategy", [None, "first_fit", "wrapped"])
def test_long_rows_are_learned_in_pieces(tmp_path, strategy, streaming):
    """In batches, as rows and packed; evaluations measure the pieces. An epoch has as many steps as they take."""
    rows = [{"text": "sort:" + "".join(str((i * k) % 10) for k in range(3 + i % 9)) + "="} for i in range(48)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of("sft", "nll")
    config.output_dir, config.total_steps, config.batch.prompts = str(tmp_path / "run"), 3, 8
    config.data.path, config.data.eval_split, config.data.loss_on = str(path), "train", "all"
    config.data.max_length, config.data.overlong, config.data.streaming = 8, "split", streaming
    config.data.packing = strategy is not None
    config.data.packing_strategy = strategy or "first_fit"
    config.data.eval_path, config.eval.every, config.eval.prompts, config.checkpoint.every = str(path), 0, 48, 0
    config.num_epochs = None if streaming else 1
    run = build(config, make_mesh(devices=jax.devices()[:1]))
    tokenizer = run.model.tokenizer
    tokens = [tokenizer(row["text"])["input_ids"] + [tokenizer.eos_token_id] for row in rows]
    batch = run.source.next(run.state, jax.random.key(0)).batch
    segments, mask = np.asarray(batch.inputs.segments), np.asarray(batch.mask)
    if strategy == "wrapped":
        assert segments.max() == 1 and (segments == 0).any(axis=1).sum() <= 1, "one document a row; the last is shorter"
        assert 0.8 < mask[:, 1:].mean() < 1, "all is learned but the first tokens of texts"
    else:
        starts = np.diff(segments, axis=1, prepend=0) > 0
        assert not mask[starts].any() and mask[(segments > 0) & ~starts].all()
    if not streaming and strategy != "first_fit":
        # A piece of one token teaches nothing.
        pieces = [-(-len(ids) // 8) - (len(ids) % 8 == 1) for ids in tokens]
        rows = -(-sum(map(len, tokens)) // 8) if strategy else sum(pieces)
        assert max(pieces) == 3 and run.config.total_steps == -(-rows // 8)
    *_, last = train(config).metrics
    assert np.isfinite(last["loss"]) and np.isfinite(last["eval/loss"])


@pytest.mark.slow
def test_packed_rows_lower_the_held_out_loss(tmp_path):
    config = config_of("sft", "nll", task="sort_demos")
    config.output_dir, config.total_steps, config.batch.prompts = str(tmp_path), 60, 8
    config.model.random_init, config.data.packing, config.data.max_length = True, True, 128
    config.optimizer.learning_rate, config.optimizer.eps = 1e-3, 1e-8
    config.eval.every, config.eval.prompts, config.checkpoint.every = 0, 128, 0
    first, *_, last = train(config).metrics
    assert last["eval/loss"] < 0.7 * first["eval/loss"]
