"""A*-PO against TRL's own trainer: its optimal values and the prompts that it leaves out, and its loss."""

import contextlib
from collections import defaultdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.advantages import a2po_advantages, optimal_values
from jaxrl_llm.algorithms.aggregation import loss_weights
from jaxrl_llm.algorithms.policy_losses import a2po
from jaxrl_llm.data.scored_prompts import ScoredPrompts

torch = pytest.importorskip("torch")
pytest.importorskip("trl", minversion="1.16")

pytestmark = pytest.mark.filterwarnings("ignore")

RNG = np.random.default_rng(0)
PROMPTS, SAMPLES, ROWS, PROMPT, TOKENS, VOCAB = 7, 5, 4, 3, 6, 11
SCORES = (RNG.random((PROMPTS, SAMPLES)) < 0.3).astype(np.float32)
SCORES[2], SCORES[5] = 0.0, 1.0


class Rows(list):
    """A data set as TRL's first stage reads it."""

    def filter(self, keeps):
        return Rows(row for row in self if keeps(row))


class Tokenizer:
    """Of prompts that are numbers; a completion is the number of its sample."""

    def __call__(self, texts, **options):
        ids = torch.tensor([[int(text)] for text in texts])
        return Encoded(input_ids=ids, attention_mask=torch.ones_like(ids))

    def batch_decode(self, ids, skip_special_tokens):
        return [int(row[0]) for row in ids]


class Encoded(dict):
    def to(self, device):
        return self


@pytest.mark.parametrize("beta", [0.05, 0.5, 5.0])
def test_optimal_values_and_the_prompts_that_are_left_out(monkeypatch, beta):
    """TRL's first stage from end to end, with a reference whose samples are numbered and scored by the table."""
    from trl.experimental.a2po import a2po_trainer

    def generate(input_ids, attention_mask, generation_config):
        repeated = input_ids.repeat_interleave(SAMPLES, dim=0)
        return torch.cat([repeated, torch.arange(SAMPLES).repeat(len(input_ids))[:, None]], dim=1)

    trainer = a2po_trainer.A2POTrainer
    fake = SimpleNamespace(
        args=SimpleNamespace(
            beta1=beta, num_value_samples=SAMPLES, per_device_train_batch_size=3, max_prompt_length=8,
            filter_all_incorrect=True,
        ),
        train_dataset=Rows({"prompt": str(index)} for index in range(PROMPTS)),
        eval_dataset=None,
        accelerator=SimpleNamespace(prepare=lambda loader: loader, device="cpu"),
        processing_class=Tokenizer(),
        ref_model=SimpleNamespace(generate=generate),
        value_generation_config=None,
        reward_funcs=[lambda prompts, completions: SCORES[np.array(prompts, int), completions].tolist()],
        reward_weights=torch.ones(1),
    )  # fmt: skip
    fake._calculate_rewards = lambda *args, **kwargs: trainer._calculate_rewards(fake, *args, **kwargs)
    monkeypatch.setattr(a2po_trainer, "unwrap_model_for_generation", lambda model, _: contextlib.nullcontext(model))
    monkeypatch.setattr(a2po_trainer, "gather_object", lambda values: values)
    monkeypatch.setattr(a2po_trainer, "logger", SimpleNamespace(info=lambda text: None))
    trainer._estimate_optimal_values(fake)

    theirs = [fake._optimal_values[str(index)] for index in range(PROMPTS)]
    np.testing.assert_allclose(optimal_values(SCORES, beta), theirs, rtol=1e-5, atol=1e-6)
    ours = ScoredPrompts([{"prompt": str(index)} for index in range(PROMPTS)], 1, drop_unsolved=True, shuffle=False)
    ours.give(SCORES)
    kept = [row["prompt"] for row in fake.train_dataset]
    assert [next(ours)[0]["prompt"] for _ in kept] == kept and 0 < len(kept) < PROMPTS


@pytest.mark.parametrize("beta2", [1e-3, 0.3])
def test_loss(x64, beta2):
    """Values and gradients by the logits, of rows that end at different places."""
    from trl.experimental.a2po import A2POTrainer

    logits, reference = RNG.normal(size=(2, ROWS, PROMPT + TOKENS, VOCAB))
    ids = RNG.integers(VOCAB, size=(ROWS, PROMPT + TOKENS))
    lengths = np.array([6, 2, 4, 1])
    completion = np.arange(TOKENS) < lengths[:, None]
    mask = np.concatenate([np.zeros((ROWS, PROMPT), bool), completion], axis=1)
    attention = np.concatenate([np.ones((ROWS, PROMPT), int), completion], axis=1)
    rewards, samples = np.array([1.0, 0.0, 1.0, 0.0]), RNG.random((ROWS, SAMPLES))
    advantages = a2po_advantages(rewards, samples, beta1=0.5)

    def logps(logits):
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], ids[:, 1:, None], axis=-1)[..., 0]
        return jnp.pad(picked, ((0, 0), (1, 0)))

    def ours(logits):
        loss, _ = a2po(logps(logits), logps(reference), advantages, mask=mask, beta2=beta2)
        return (loss_weights(mask, "sequence") * loss).sum()

    fake = SimpleNamespace(
        model=SimpleNamespace(training=True), args=SimpleNamespace(beta2=beta2), model_kwarg_keys=(),
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    fake._get_sequence_logps = lambda *args: A2POTrainer._get_sequence_logps(fake, *args)
    tokens, seen = torch.tensor(ids), torch.tensor(attention)

    def model_of(logits):
        return lambda **inputs: SimpleNamespace(logits=logits)

    with torch.no_grad():
        of_reference = fake._get_sequence_logps(model_of(torch.tensor(reference)), tokens, seen, TOKENS)
    leaf = torch.tensor(logits, requires_grad=True)
    theirs = A2POTrainer.compute_loss(
        fake,
        model_of(leaf),
        {
            "input_ids": tokens, "attention_mask": seen, "logits_to_keep": TOKENS, "ref_logps": of_reference,
            "rewards": torch.tensor(rewards), "v_star": torch.tensor(np.array(optimal_values(samples, 0.5))),
        },
    )  # fmt: skip
    theirs.backward()
    value, gradient = jax.value_and_grad(ours)(jnp.asarray(logits))
    np.testing.assert_allclose(value, theirs.item(), rtol=1e-6)
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-6, atol=1e-9)
    assert np.abs(gradient).max() > 1e-5
