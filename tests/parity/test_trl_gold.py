"""The distance from a teacher with another tokenizer against TRL's `ULDLoss`, with two tokenizers that split otherwise.

Ours computes in float32 from hidden states and heads, in chunks; TRL's in float64 from whole logits. TRL's
`uld_token_merge_strategy="bayesian"` is what is here: "observed" reads each distribution a token late.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.aggregation import loss_weights
from jaxrl_llm.algorithms.distillation import prefix_logps
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models import chunked_softmax
from jaxrl_llm.models.chunked_divergences import AlignedDistributions, UldOptions, chunked_uld
from jaxrl_llm.models.chunked_softmax import chunked_logps
from jaxrl_llm.training.objectives.objective import Positions
from jaxrl_llm.training.packing.planner import Packer
from jaxrl_llm.training.teachers.cross_tokenizer import CrossTokenizer, CrossTokenizerSpec, at_ends
from tests.data.bpe_tokenizer import bpe_tokenizer

torch = pytest.importorskip("torch")
pytest.importorskip("trl", minversion="1.16")

pytestmark = pytest.mark.filterwarnings("ignore")

MESH = make_mesh(devices=jax.devices()[:1])
TEXTS = ["the cat sat on the mat ", "12345 67890 naïve café ", "def f(x): return x + 1\n"]
EXCHANGES = [
    ("Say something: ", "the cat sat on the café, naïve 😀"),
    ("2 + 2 = ", "4"),
    ("Write code.\n", "def f(x): return x + 12345"),
]
WIDTH, LONGEST, SIZE, D = 24, 48, 64, 12

CASES = {
    "sorted": {},
    "at temperatures": {"student": 0.7, "teacher": 1.5},
    "by position": {"positions": True},
    "hybrid": {"hybrid": True, "beta": 0.5},
    "hybrid with weights, forward": {"hybrid": True, "beta": 0.0, "weights": (0.3, 2.0), "teacher": 2.0},
    "hybrid by position, reverse": {"hybrid": True, "beta": 1.0, "positions": True},
}


@pytest.fixture(scope="module")
def tokenizers():
    own = bpe_tokenizer(TEXTS[::-1] * 3, 300)
    other = bpe_tokenizer([text.upper() for text in TEXTS] + TEXTS[:1] * 5, 320, regex=False)
    return own, other


def rows_of(tokenizer):
    """Tokens `[N,T]` of prompts, completions and their ends, at the left edge, and the mask of the latter two."""
    tokens, mask = np.zeros((2, len(EXCHANGES), SIZE), np.int32)
    for row, (prompt, completion) in enumerate(EXCHANGES):
        first, then = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, completion))
        ids = [*first, *then, tokenizer.eos_token_id]
        tokens[row, : len(ids)], mask[row, len(first) : len(ids)] = ids, 1
    return tokens, mask.astype(np.float32)


def of_trl(tokenizers, tokens, mask, logits, teacher_rows, teacher_logits, case):
    """TRL's loss of the student's logits `[N,T,V]`, which predict the tokens at their own places."""
    from trl.experimental.gold.gold_trainer import ULDLoss
    from trl.experimental.utils import piece_byte_len

    weights = case.get("weights", (None, None))
    config = SimpleNamespace(
        uld_crossentropy_weight=0.0, uld_distillation_weight=1.0, uld_student_temperature=case.get("student", 1.0),
        uld_teacher_temperature=case.get("teacher", 1.0), uld_skip_student_eos=True, uld_skip_teacher_eos=True,
        use_extended_uld=not case.get("positions"), uld_token_merge_strategy=case.get("strategy", "bayesian"),
        uld_use_hybrid_loss=case.get("hybrid", False), uld_hybrid_matched_weight=weights[0],
        uld_hybrid_unmatched_weight=weights[1], beta=case.get("beta", 1.0),
    )  # fmt: skip
    loss = ULDLoss(config, student_tokenizer=tokenizers[0], teacher_tokenizer=tokenizers[1])
    labels = np.where(mask > 0, tokens, -100)
    offsets = np.zeros((*tokens.shape, 2), np.int64)
    for row in range(len(tokens)):
        end = 0
        for column in np.flatnonzero(mask[row]):
            size = piece_byte_len(tokenizers[0].convert_ids_to_tokens([int(tokens[row, column])])[0])
            offsets[row, column], end = (end, end + size), end + size
    ids, teacher_labels, _, teacher_offsets = teacher_rows
    own_labels, own_ids = (torch.tensor(x, dtype=torch.long) for x in (labels, tokens))
    return loss(
        torch.roll(logits, -1, dims=1), torch.roll(teacher_logits, -1, dims=1), own_labels, teacher_labels, own_ids,
        ids, torch.tensor(offsets), teacher_offsets,
    )  # fmt: skip


QUICK = ("at temperatures", "hybrid with weights, forward", "hybrid by position, reverse")


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in CASES])
def test_uld_loss(monkeypatch, tokenizers, name):
    """Value, and gradients by hidden states and head, of a batch whose spans have one or more tokens on both sides."""
    from trl.experimental.gold.gold_trainer import build_teacher_inputs_from_texts

    case, rng = CASES[name], np.random.default_rng(0)
    monkeypatch.setattr(chunked_softmax, "LOGITS_IN_FLIGHT", 3 * 10 * 300)  # several chunks
    tokens, mask = rows_of(tokenizers[0])
    hidden, other = (rng.normal(size=(len(tokens), size, D)).astype(np.float32) for size in (SIZE, WIDTH + LONGEST))
    heads = [0.6 * rng.normal(size=(D, len(x))).astype(np.float32) for x in tokenizers]

    align = "positions" if case.get("positions") else "spans"
    temperatures = case.get("student", 1.0), case.get("teacher", 1.0)
    own, theirs = (
        SimpleNamespace(
            tokenizer=x, net=SimpleNamespace(config=SimpleNamespace(vocab_size=len(x), logit_softcap=None)), mesh=MESH
        )
        for x in tokenizers
    )
    settings = CrossTokenizerSpec(align, False, case.get("hybrid", False), temperatures[1], {})
    cross = CrossTokenizer.of(
        settings, own, theirs, (tokenizers[0].eos_token_id,), WIDTH, LONGEST, Packer(None, Positions(), MESH)
    )
    with jax.set_mesh(MESH):
        rows = cross.rows([{"prompt": prompt} for prompt, _ in EXCHANGES], jnp.asarray(tokens), jnp.asarray(mask))
    ends = np.asarray(rows.ends)
    last = ends == np.arange(SIZE)
    lengths = [(ends[row] == column).sum() for row, column in zip(*np.nonzero(last), strict=True)]
    assert max(lengths) > 1 or align == "positions", "no span has several tokens: the case proves little"

    def ours(hidden, kernel):
        theirs, prefix = at_ends(
            jnp.asarray(other), jnp.asarray(heads[1]), rows.inputs.tokens, rows.teacher_ends, rows.teacher_last,
            WIDTH, temperatures[1], None,
        )  # fmt: skip
        logps = chunked_logps(hidden, kernel, jnp.asarray(tokens), temperatures[0])[0]
        earlier = prefix_logps(logps, jnp.where(last, -1, ends), SIZE)
        teacher = AlignedDistributions(theirs, jnp.asarray(heads[1]), prefix, None, rows.matches)
        options = UldOptions(*temperatures, case.get("beta", 1.0), case.get("weights"))
        distance = chunked_uld(hidden, kernel, earlier, teacher, options)
        return (loss_weights(last, "sequence") * distance).sum()

    value, gradients = jax.jit(jax.value_and_grad(ours, (0, 1)))(jnp.asarray(hidden), jnp.asarray(heads[0]))

    prompts, completions = ([pair[side] for pair in EXCHANGES] for side in (0, 1))
    teacher_rows = build_teacher_inputs_from_texts(tokenizers[1], prompts, completions)
    ids = teacher_rows[0].numpy()
    aligned = np.zeros((*ids.shape, D))
    for row, prompt in enumerate(prompts):
        first = len(tokenizers[1](prompt)["input_ids"])
        count = (teacher_rows[1][row].numpy() != -100).sum() - 1  # without its end
        np.testing.assert_array_equal(rows.inputs.tokens[row, WIDTH : WIDTH + count], ids[row, first : first + count])
        aligned[row, first : first + count] = other[row, WIDTH : WIDTH + count]
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (hidden, heads[0])]
    teacher_logits = torch.tensor(aligned) @ torch.tensor(heads[1], dtype=torch.float64)
    expected = of_trl(tokenizers, tokens, mask, leaves[0] @ leaves[1], teacher_rows, teacher_logits, case)
    expected.backward()
    assert float(expected) > 0.1
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    for found, leaf in zip(gradients, leaves, strict=True):
        assert np.abs(leaf.grad.numpy()).max() > 1e-3
        np.testing.assert_allclose(found, leaf.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_observed_reads_distributions_a_token_late(tokenizers):
    """TRL's default strategy takes the logits behind each token: a teacher that is certain of the text is far from a
    student that is as certain, wherever two spans differ in their tokens; "bayesian" and ours find no distance."""
    from trl.experimental.gold.gold_trainer import build_teacher_inputs_from_texts

    tokens, mask = rows_of(tokenizers[0])
    prompts, completions = ([pair[side] for pair in EXCHANGES] for side in (0, 1))
    rows = build_teacher_inputs_from_texts(tokenizers[1], prompts, completions)

    def certain(ids, size):
        return 40.0 * torch.nn.functional.one_hot(torch.roll(ids, -1, dims=1), size).double()

    own, theirs = (
        torch.roll(certain(ids, len(x)), 1, dims=1)  # at the tokens themselves
        for ids, x in zip((torch.tensor(tokens, dtype=torch.long), rows[0]), tokenizers, strict=True)
    )
    distances = [
        of_trl(tokenizers, tokens, mask, own, rows, theirs, {"strategy": strategy}).item()
        for strategy in ("bayesian", "observed")
    ]
    np.testing.assert_allclose(distances[0], 0.0, atol=1e-6)
    assert distances[1] > 0.05
