"""A teacher with another tokenizer: spans of text in the loss of a run, settings, and a student that learns from it."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import jaxrl_llm
from jaxrl_llm.algorithms.distillation import LEAST_PROBABILITY, hybrid_distances, sorted_distance
from jaxrl_llm.config import ConfigError
from jaxrl_llm.data import tasks
from jaxrl_llm.data.templates import continued_ids
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.model import load_model, save_hf
from jaxrl_llm.training.objectives.objective import Positions
from jaxrl_llm.training.packing.planner import Packer
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.run import build
from jaxrl_llm.training.step import improve
from jaxrl_llm.training.teachers.cross_tokenizer import CrossTokenizer, CrossTokenizerSpec
from jaxrl_llm.training.update import merge_frozen
from tests.data.bpe_tokenizer import bpe_tokenizer
from tests.data.spacing_tokenizer import SPACINGS, spacing_tokenizer
from tests.training.teachers import test_teacher

MESH = make_mesh(devices=jax.devices()[:1])
DIGITS = [row["prompt"] + row["prompt"][5:-1] for row in tasks.generate("sort", size=64)]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return saved_teacher(tmp_path_factory.mktemp("teacher") / "hf")


def saved_teacher(folder, opinions=3.0):
    """The folder of a random model, of another size, whose tokenizer joins digits; with 1 it is nearly uniform."""
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "model_type": "qwen3"}
    small |= {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 312}
    model = load_model("embedded:sort", init_key=jax.random.key(5), entries=small)
    params = jax.tree.map(lambda x: opinions * x, model.params)
    tokenizer = bpe_tokenizer(DIGITS, 300, regex=False)
    save_hf(dataclasses.replace(model, params=params, tokenizer=tokenizer, generation=None), folder)
    return str(folder)


def config_of(teacher, **settings):
    own = {"rollout__group_size": 2, "algorithm__advantage": "zero", "teacher__form": "uld"}
    return test_teacher.config_of(teacher, **own | settings)


def first_batch(config, rows=None, eval_rows=None):
    """The batch of the first step, its metrics, those of its update, and of an evaluation."""
    with jax.set_mesh(MESH):
        rows = tasks.generate("sort", size=16) if rows is None else rows
        rewards = None if config.algorithm.name == "sft" else test_teacher.length
        run = build(config, MESH, Given(train_dataset=rows, eval_dataset=eval_rows, rewards=rewards))
        experience = run.source.next(run.state, jax.random.key(1))
        held_out = None if eval_rows is None else run.evaluation(run.state.params, jax.random.key(0))
        updates = improve(run, run.state, experience.batch)[1]
    return experience.batch, jax.device_get(experience.metrics), updates[0], held_out


def log_probs_of(model, ids, temperature):
    """Log-probs `[n,V]` of what could have been each token of one row, by whole logits; 0 for the first."""
    logits = model(jnp.asarray([ids], jnp.int32))[0] / temperature
    return np.pad(np.asarray(jax.nn.log_softmax(logits))[:-1], ((1, 0), (0, 0)))


def distances_by_hand(teacher, batch, distance, temperatures=(1.0, 1.0), skip_eos=False):
    """The distance of every span of every row, found by decoding one token after the other."""
    own, other = load_model("embedded:sort"), load_model(teacher)
    found = []
    for tokens, segments, mask in zip(
        *jax.device_get((batch.inputs.tokens, batch.inputs.segments, batch.mask)), strict=True
    ):
        ids, first = tokens[segments > 0].tolist(), int((segments > 0).sum() - mask.sum())
        ends = ids[-1] == own.tokenizer.eos_token_id
        prompt, text = (own.tokenizer.decode(x, skip_special_tokens=True) for x in (ids[:first], ids[first:]))
        asked = other.tokenizer(prompt)["input_ids"]
        theirs = other.tokenizer(text)["input_ids"] + [other.tokenizer.eos_token_id] * ends
        p, q = (
            log_probs_of(model, x, temperature)[start:]
            for model, x, start, temperature in (
                (own, ids, first, temperatures[0]), (other, asked + theirs, len(asked), temperatures[1]),
            )
        )  # fmt: skip
        answers, row = (ids[first:], theirs), []
        places = [[], []]
        for model, x, known in zip((own, other), answers, places, strict=True):
            for i in range(len(x) - ends):
                begun = model.tokenizer.decode(x[: i + 1], skip_special_tokens=True)
                known += [] if "\ufffd" in begun else [len(begun)]  # no whole character: nothing is aligned behind it
        start = [0, 0]
        for place in sorted(set(places[0]) & set(places[1])):
            end = [x.index(place) for x in places]
            row.append([(a, b) for a, b in zip(start, end, strict=True)])
            start = [x + 1 for x in end]
        row += [[(len(x) - 1, len(x) - 1) for x in answers]] if ends and not skip_eos else []
        for spans in row:
            merged = []
            for (a, b), logs, tokens_of in zip(spans, (p, q), answers, strict=True):
                earlier = [max(logs[i, tokens_of[i]], np.log(LEAST_PROBABILITY)) for i in range(a, b)]
                merged.append(np.exp(logs[b] + sum(earlier)))
            found.append((float(distance(*merged)), spans))
    return found


FORMS = {
    "unpacked": {},
    "packed": {"batch__packing": "true"},
    "by micro-batches, without ends": {"batch__microbatch_rows": 2, "teacher__uld_skip_eos": True},
    "at temperatures": {"teacher__temperature": 1.5, "teacher__policy_temperature": 0.8, "batch__packing": "true"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_the_distance_in_the_loss(teacher, name):
    settings = FORMS[name]
    batch, metrics, update, _ = first_batch(config_of(teacher, teacher__coef=0.5, **settings))
    temperatures = settings.get("teacher__policy_temperature", 1.0), settings.get("teacher__temperature", 1.0)
    by_hand = distances_by_hand(teacher, batch, sorted_distance, temperatures, settings.get("teacher__uld_skip_eos"))
    assert any(own[1] > own[0] for _, (own, _) in by_hand), "no span of several tokens: the case proves little"
    expected = np.mean([value for value, _ in by_hand])
    np.testing.assert_allclose(update["teacher/divergence"].value, expected, rtol=2e-4)
    np.testing.assert_allclose(update["loss"].value, 0.5 * expected, rtol=2e-4)
    assert update["grad_norm"].value > 0.01
    tokens = sum(b - a + 1 for _, ((a, b), _) in by_hand)
    np.testing.assert_allclose(metrics["teacher/aligned"], tokens / np.asarray(batch.mask).sum(), rtol=1e-6)
    assert metrics["teacher/too_long"] == 0


@pytest.mark.slow
def test_hybrid_beside_rewards(teacher):
    """Tokens are matched by their bytes, and the ends with each other; the term is added to the policy's own."""
    weights = {"teacher__uld_matched_weight": 0.7, "teacher__uld_unmatched_weight": 0.4}
    settings = {"teacher__uld_hybrid": True, "teacher__beta": 0.5, "algorithm__advantage": "group", **weights}
    batch, _, update, _ = first_batch(config_of(teacher, **settings))
    own, other = load_model("embedded:sort"), load_model(teacher)
    theirs = other.tokenizer.get_vocab()
    matches = np.full(own.net.config.vocab_size, -1, np.int32)
    for piece, token in own.tokenizer.get_vocab().items():
        matches[token] = theirs.get(piece, -1)
    matches[own.tokenizer.eos_token_id] = other.tokenizer.eos_token_id
    np.testing.assert_array_equal(batch.scalars.teacher_matches, matches)

    def distance(p, q):
        matched, unmatched = hybrid_distances(p, q, matches, 0.5)
        return 0.7 * matched + 0.4 * unmatched

    expected = np.mean([value for value, _ in distances_by_hand(teacher, batch, distance)])
    np.testing.assert_allclose(update["teacher/divergence"].value, expected, rtol=2e-4)
    np.testing.assert_allclose(update["loss"].value, update["policy_term"].value + expected, rtol=2e-4)


@pytest.mark.slow
def test_given_rows_with_their_own_likelihood(teacher):
    """sft by spans, plus the cross-entropy of the tokens; conversations are rendered by the teacher's own template."""
    settings = {"algorithm__name": "sft", "algorithm__advantage": "group", "teacher__nll_coef": 0.5, "eval__every": 0}
    rows = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]}
        for row in tasks.generate("sort_demos", size=12)
    ]
    config = config_of(teacher, data__max_length=64, **settings)
    batch, metrics, update, held_out = first_batch(config, rows, rows[:6])
    np.testing.assert_allclose(
        update["loss"].value, update["teacher/divergence"].value + 0.5 * update["nll_loss"].value, rtol=1e-4
    )
    assert metrics["teacher/aligned"] > 0.9
    assert 0.3 * update["loss"].value < held_out["eval/loss"] < 3 * update["loss"].value
    mask = np.asarray(batch.mask)
    own = load_model("embedded:sort").tokenizer
    other = load_model(teacher).tokenizer
    first = own.decode(np.asarray(batch.inputs.tokens)[0][mask[0] > 0].tolist(), skip_special_tokens=True)
    given = next(row["messages"] for row in rows if row["messages"][1]["content"] == first)
    assert other.apply_chat_template(given[:1], tokenize=False, add_generation_prompt=True).startswith("[user]sort:")


@pytest.mark.slow
def test_rows_that_do_not_fit_learn_nothing_there(teacher):
    """Prompts that are too long for the teacher have no spans; of long completions the first ones are kept."""
    batch, metrics, _, _ = first_batch(config_of(teacher, teacher__max_completion_length=1))
    ends = np.asarray(batch.teacher_ends)
    assert 0 < metrics["teacher/too_long"] <= 1
    assert ((ends >= 0).sum(axis=1) > 0).any()
    assert (ends == np.arange(ends.shape[1])).sum(axis=1).max() == 1
    none, metrics, _, _ = first_batch(config_of(teacher, teacher__max_prompt_length=1))
    assert metrics["teacher/too_long"] == 1
    assert metrics["teacher/aligned"] == 0
    assert (np.asarray(none.teacher_ends) == -1).all()


def test_another_tokenizer_is_asked_for_by_name(teacher):
    with pytest.raises(ConfigError, match=r"another vocabulary: .*use a model with the same tokenizer, or set teacher"):
        first_batch(config_of(teacher, teacher__form="divergence"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"teacher__form": "divergence", "teacher__uld_hybrid": True}, "teacher.uld_hybrid is True, which is of"),
        ({"teacher__top_k": 4}, "teacher.top_k is 4, which is of teacher.form = divergence"),
        ({"teacher__beta": 0.5}, "teacher.beta is 0.5, but teacher.uld_hybrid is false"),
        (
            {"teacher__uld_hybrid": True, "teacher__uld_matched_weight": 1.0},
            "teacher.uld_unmatched_weight is None: set",
        ),
        (
            {"teacher__path": "server(url='http://x/v1', model='m')"},
            "teacher.form is 'uld', but teacher.path is a server",
        ),
        (
            {"teacher__path": "self(rate=0)", "teacher__context": "success"},
            "teacher.form is uld, but teacher.context is",
        ),
        ({"teacher__others": ("b=x",)}, "reads the distributions of one teacher"),
        ({"rollout__staleness": 1}, "teacher.form is uld, but rollout.staleness is 1"),
        ({"algorithm__aggregation": "rollout_token"}, "but algorithm.aggregation is 'rollout_token'"),
        ({"environment__tools": ("a.py:f",)}, "teacher.form is uld, but environment.tools is"),
        (
            {"algorithm__name": "sft", "algorithm__advantage": "group", "data__packing": True},
            "but data.packing is True",
        ),
        ({"teacher__nll_coef": 0.1, "algorithm__beta": 0.1}, "teacher.nll_coef is 0.1, but algorithm.beta is 0.1"),
    ],
)
def test_contradictions(settings, words):
    with pytest.raises(ConfigError) as error:
        config_of("embedded:sort", **settings)
    assert words in str(error.value)


@pytest.mark.slow
def test_a_student_learns_from_a_teacher_with_another_tokenizer(teacher, tmp_path):
    """A run of the command: the distance from the teacher falls, and a run that stopped goes on the same."""

    def train(name, steps):
        config = config_of(teacher, rewards__functions=(), rollout__group_size=1, batch__prompts=16)
        config.data.path, config.output_dir, config.total_steps = "task:sort", str(tmp_path / name), steps
        config.optimizer.learning_rate, config.optimizer.schedule = 3e-3, "constant"
        config.checkpoint.every, config.logging.backends = 6, ("jsonl",)
        jaxrl_llm.train(config)
        lines = (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    whole = train("whole", 12)
    distances = [line["teacher/divergence"] for line in whole if "teacher/divergence" in line]
    assert np.mean(distances[-3:]) < 0.6 * np.mean(distances[:3])
    train("parts", 6)
    last = train("parts", 12)[-1]
    for name in ("loss", "grad_norm", "teacher/divergence", "teacher/aligned"):
        assert last[name] == whole[-1][name], name


@pytest.mark.slow
def test_samples_and_given_rows_by_turns_with_adapters(teacher):
    """Steps of both kinds have spans, and adapters learn from them."""
    settings = {
        "teacher__on_policy": 0.5,
        "batch__packing": "true",
        "lora__rank": 4,
        "rollout__max_completion_length": 12,
    }
    config = config_of(teacher, rewards__functions=(), **settings)
    with jax.set_mesh(MESH):
        run = build(config, MESH, Given(train_dataset=tasks.generate("sort_demos", size=32)))
        kinds, state = set(), run.state
        for step in range(6):
            experience = run.source.next(merge_frozen(state, run.frozen), jax.random.key(step))
            state, updates = improve(run, state, experience.batch)
            kinds.add(experience.metrics["teacher/on_policy"])
            assert experience.metrics["teacher/aligned"] > 0.5
            assert updates[0]["grad_norm"].value > 0
            assert np.isfinite(updates[0]["teacher/divergence"].value)
    assert kinds == {0.0, 1.0}


def pair_of(own, other, width=16, **settings):
    """The pair of a policy's tokenizer and a teacher's, of which nothing else is read."""
    policy, teacher = (
        SimpleNamespace(
            tokenizer=x, net=SimpleNamespace(config=SimpleNamespace(vocab_size=len(x), logit_softcap=None)), mesh=MESH
        )
        for x in (own, other)
    )
    settings = {"align": "spans", "learn_end": True, "hybrid": False, "temperature": 1.0, **settings}
    spec = CrossTokenizerSpec(**settings, template_kwargs={})
    eos = (own.eos_token_id,)
    return CrossTokenizer.of(spec, policy, teacher, eos, width, 16, Packer(None, Positions(), MESH))  # pyright: ignore


@pytest.mark.parametrize("spacing", [x for x in SPACINGS if x != "prepend"])  # which does not tell its bytes
def test_tokenizers_that_put_a_space_before_a_text(spacing):
    """As policy and as teacher: the text behind a prompt is the same, and all of it is in spans, to the end."""
    spaced, plain = spacing_tokenizer(spacing), bpe_tokenizer(["ab ab cd cd ef ef"] * 9, 300, regex=False)
    for own, other in ((spaced, plain), (plain, spaced)):
        tokens, row = own("x=")["input_ids"], continued_ids(own, own("x=")["input_ids"], "ab cd ef")
        ids = [*tokens, *row, own.eos_token_id]
        mask = np.float32([[0] * len(tokens) + [1] * (len(ids) - len(tokens))])
        cross = pair_of(own, other, hybrid=True)
        matches = cross.matches[cross.ends[0]]
        with jax.set_mesh(MESH):
            rows = cross.rows([{"prompt": "x="}], jnp.array([ids]), jnp.asarray(mask))
        theirs = np.asarray(rows.inputs.tokens)[0, 16:][np.asarray(rows.inputs.segments)[0, 16:] > 0].tolist()
        assert other.decode(theirs, skip_special_tokens=True).strip() == "ab cd ef"
        assert theirs[-1] == other.eos_token_id
        assert float(rows.metrics["teacher/aligned"]) == 1.0
        ends = np.asarray(rows.ends)[0]
        assert (ends == np.arange(len(ids))).sum() > 2
        last = np.asarray(rows.teacher_last)[0][ends == np.arange(len(ids))]
        assert last[-1] == 16 + len(theirs) - 1
        assert matches[own.eos_token_id] == other.eos_token_id
        letter = own.convert_tokens_to_ids("d")
        assert other.convert_ids_to_tokens(int(matches[letter])) == "d"
        if spacing == "first" and own is spaced:  # known by its bytes: the pieces are ▁d and Ġd
            assert plain.convert_ids_to_tokens(int(matches[own.convert_tokens_to_ids("▁")])) == "Ġ"


def rows_of(cross, prompt, own, completion, end=None):
    """The teacher's tokens of a completion behind a prompt, as text, and what `CrossTokenizer.rows` makes of it."""
    before = own("x=")["input_ids"]
    ids = [*before, *completion, own.eos_token_id if end is None else end]
    mask = np.float32([[0] * len(before) + [1] * (len(ids) - len(before))])
    with jax.set_mesh(MESH):
        rows = cross.rows([{"prompt": prompt}], jnp.array([ids]), jnp.asarray(mask))
    theirs, segments = (np.asarray(x)[0, cross.width :] for x in (rows.inputs.tokens, rows.inputs.segments))
    theirs = theirs[segments > 0].tolist()
    return cross.tokenizers[1].convert_tokens_to_string(cross.tokenizers[1].convert_ids_to_tokens(theirs)), rows


def test_a_space_between_prompt_and_completion_is_the_teachers_too():
    """SentencePiece's decoders leave it out; in a chat it is the template's, and the teacher's template has its own."""
    own, plain = spacing_tokenizer("first"), bpe_tokenizer(["ab ab cd cd"] * 9, 300)
    chat = [{"role": "user", "content": "x="}]
    for prompt, first, expected in (("x=", " ab", " ab cd</s>"), ("x=", "ab", "ab cd</s>"), (chat, " ab", "ab cd</s>")):
        completion = continued_ids(own, own("x=")["input_ids"], f"{first} cd")
        text, rows = rows_of(pair_of(own, plain, 64), prompt, own, completion)
        assert text == expected
        assert float(rows.metrics["teacher/aligned"]) == 1.0


def test_letters_are_matched_before_the_bytes_of_what_has_no_token():
    """SentencePiece's vocabularies begin with a token for each byte, which no letter is written with."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b"]
    made = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    own: Any = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    other: Any = bpe_tokenizer(["ab"], 300)
    for policy, teacher in ((own, other), (other, own)):
        cross = pair_of(policy, teacher, hybrid=True)
        matches = cross.matches[cross.ends[0]]
        for piece, letter in (("a", "a"), ("b", "b"), ("▁", "Ġ"), ("<0x00>", "Ā")):
            pair = own.convert_tokens_to_ids(piece), other.convert_tokens_to_ids(letter)
            assert matches[pair[policy is other]] == pair[policy is own], piece
        assert (matches[[own.convert_tokens_to_ids("<0x61>")]] == -1).all() or policy is other


def test_the_turns_of_a_chat_end_as_its_template_writes_them():
    """Gemma's texts end with <eos> and its turns with <end_of_turn>, which no other vocabulary has by that name."""
    plain: Any = bpe_tokenizer(["ab"], 300)
    gemma: Any = bpe_tokenizer(["ba"], 300, eos="<eos>")
    gemma.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    gemma.chat_template = gemma.chat_template.replace("{{ eos_token }}", "{{ '<end_of_turn>\n' }}")
    turn = gemma.convert_tokens_to_ids("<end_of_turn>")
    chat = [{"role": "user", "content": "x="}]
    for prompt, their_end in (("x=", gemma.eos_token_id), (chat, turn)):
        text, rows = rows_of(pair_of(plain, gemma, 64, hybrid=True), prompt, plain, plain("ab")["input_ids"])
        assert text == "ab" + gemma.convert_ids_to_tokens(their_end)
        assert rows.matches is not None and rows.matches[plain.eos_token_id] == their_end
        text, rows = rows_of(pair_of(gemma, plain, 64, hybrid=True), prompt, gemma, gemma("ab")["input_ids"], their_end)
        assert text == "ab</s>"
        assert rows.matches is not None and rows.matches[their_end] == plain.eos_token_id
        assert float(rows.metrics["teacher/aligned"]) == 1.0


def test_a_teacher_that_has_no_chats_is_told_apart_from_the_policy():
    own, base = bpe_tokenizer(["ab"], 300), bpe_tokenizer(["ab"], 300)
    base.chat_template = None
    with pytest.raises(ConfigError, match=r"the teacher \(teacher.path\) cannot read a prompt: .* no chat template"):
        rows_of(pair_of(own, base), [{"role": "user", "content": "x="}], own, [5])


def test_a_tokenizer_that_does_not_tell_bytes_is_aligned_by_positions():
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "</s>": 3}, unk_token="c"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    own, other = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>"), bpe_tokenizer(["a b"], 300)
    with pytest.raises(ConfigError, match=r"uld_align = spans needs the bytes of each token.*: set it to positions"):
        pair_of(own, other)
    cross = pair_of(own, other, align="positions", hybrid=True)
    with jax.set_mesh(MESH):
        rows = cross.rows([{"prompt": "a"}], jnp.array([[0, 0, 1, 0, 3]]), jnp.float32([[0, 1, 1, 1, 1]]))
    # "a b a" has more tokens there, of which the first three are read, and its end.
    np.testing.assert_array_equal(rows.ends, [[-1, 1, 2, 3, 4]])
    theirs = other("a b a")["input_ids"]
    np.testing.assert_array_equal(rows.teacher_last, [[0, 16, 17, 18, 16 + len(theirs)]])
    matches = cross.matches[cross.ends[0]]
    assert matches[[0, 3]].tolist() == [other.convert_tokens_to_ids("a"), other.eos_token_id]
    headless = bpe_tokenizer(["a b"], 300)
    headless.eos_token = None
    with pytest.raises(ConfigError, match=r"uld_skip_eos is false, but the teacher has no end-of-text token"):
        pair_of(other, headless)
