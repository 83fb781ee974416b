"""Self-distillation against TRL's SDPOTrainer and SDFTTrainer: what the teacher is asked, and the loss of a batch."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.aggregation import loss_weights
from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.algorithms.distillation import distilled_advantages, generalized_jsd
from jaxrl_llm.algorithms.policy_losses import ppo_clip
from jaxrl_llm.models.logprobs import TokenStatistics
from jaxrl_llm.training.objectives.distillation import DivergenceSpec, teacher_term
from jaxrl_llm.training.objectives.objective import weigh
from jaxrl_llm.training.teachers.teacher_context import ContextSpec, all_text, successful_rows, with_context

torch = pytest.importorskip("torch")
pytest.importorskip("trl", minversion="1.16")

pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.filterwarnings("ignore")]

RNG = np.random.default_rng(0)
ROWS, TOKENS, VOCABULARY, GROUP = 8, 7, 31, 4
STUDENT, TEACHER, OLD = 2.0 * RNG.normal(size=(3, ROWS, TOKENS, VOCABULARY))
OLD = STUDENT + 0.5 * OLD
SAMPLED = RNG.integers(VOCABULARY, size=(ROWS, TOKENS))
MASK = (np.arange(TOKENS) < RNG.integers(2, TOKENS + 1, size=ROWS)[:, None]).astype(np.float64)
SCORES = np.float32([1, 0, 2, 0, 0, 0, 0.5, 1])
COMPLETIONS = ["12", "<think>so\nso</think> 3", "4{x}", "", "a", "<think>b</think>c", "d", "<think>e"]
FEEDBACK = ["wrong", None, " ", "late", "", "too {short}", "no", "yes"]
TAUGHT = np.float64([1, 1, 0, 1, 1, 0, 1, 0])


def defaults(config):
    """The default of each field of a configuration of TRL's."""
    missing = dataclasses.MISSING
    return {
        field.name: field.default if field.default is not missing else field.default_factory()
        for field in dataclasses.fields(config)
        if field.default is not missing or field.default_factory is not missing
    }


def trainer_of(config, tokenized, **settings):
    """As much of a trainer as its context builder and its loss read; what is to be tokenised is kept."""

    def tokenize(messages):
        tokenized.extend(messages)
        return [[1]] * len(messages)

    accelerator = SimpleNamespace(
        device=torch.device("cpu"), process_index=0, gather=lambda x: x, pad_across_processes=lambda x, **_: x
    )
    return SimpleNamespace(
        args=SimpleNamespace(**defaults(config) | settings), accelerator=accelerator, num_generations=GROUP,
        model=SimpleNamespace(training=True), _tokenizer=SimpleNamespace(pad_token_id=-1),
        processing_class=SimpleNamespace(decode=lambda ids, **_: COMPLETIONS[int(ids[0])]),
        _tokenize_prompts_untruncated=tokenize, _tokenize_prompts=tokenize,
        _log_self_distillation_metric=lambda mode, value: None,
    )  # fmt: skip


@pytest.mark.parametrize("conversational", [False, True])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("success", {}),
        ("success", {"dont_reprompt_on_self_success": False, "success_reward_threshold": 0.5}),
        ("success", {"remove_thinking_from_demonstration": True}),
        ("privileged", {"use_successful_as_teacher": False, "include_environment_feedback": True}),
        ("success_and_privileged", {"include_environment_feedback": True}),
        (
            "success_or_privileged",
            {"include_environment_feedback": True, "environment_feedback_only_without_solution": True},
        ),
    ],
)
def test_what_the_teacher_of_sdpo_is_asked(kind, settings, conversational):
    """The prompts of all rows, text by text, and the rows that are taught."""
    from accelerate import PartialState
    from trl.experimental.sdpo.sdpo_config import SDPOConfig
    from trl.experimental.sdpo.sdpo_trainer import SuccessfulRolloutTeacherContextBuilder

    PartialState(cpu=True)
    texts = [f"question {row // GROUP}" for row in range(ROWS)]
    system = {"role": "system", "content": "s"}
    prompts = [[system, {"role": "user", "content": text}] if conversational else text for text in texts]
    ids = torch.arange(ROWS)[:, None]
    trainer = trainer_of(SDPOConfig, asked := [], **settings)
    output = {"completion_ids": ids, "completion_mask": torch.ones_like(ids)}
    result = SuccessfulRolloutTeacherContextBuilder(trainer).build(output, prompts, torch.tensor(SCORES), FEEDBACK)
    expected = result["self_distillation_mask"].tolist()

    args = trainer.args
    spec = ContextSpec(
        kind, args.success_reward_threshold, args.dont_reprompt_on_self_success,
        args.remove_thinking_from_demonstration, "privileged_context", GROUP,
    )  # fmt: skip
    solutions = successful_rows(SCORES, GROUP, spec.success_threshold, spec.exclude_own)
    ours, taught = [], []
    for row, prompt in enumerate(prompts):
        solution, text = spec.shown(solutions[row], COMPLETIONS, FEEDBACK[row] or "")
        taught.append(float(solution is not None or bool(text)))
        ours.append(with_context(spec, prompt, solution, text) if taught[-1] else prompt)
    assert taught == expected
    assert any(taught)
    assert ours == asked


def test_what_the_teacher_of_sdft_is_asked():
    from trl.experimental.sdft.sdft_config import SDFTConfig
    from trl.experimental.sdft.sdft_trainer import DemonstrationTeacherContextBuilder

    trainer = trainer_of(SDFTConfig, asked := [])
    ids = torch.zeros(2, 1, dtype=torch.long)
    shown = ["one {way}", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
    DemonstrationTeacherContextBuilder(trainer).build(["q", "r"], shown, ids, ids)
    spec = ContextSpec(
        "privileged", 1.0, True, False, "privileged_context", GROUP,
        template="{prompt}{privileged}", privileged_template="\n\n{privileged}",
    )  # fmt: skip
    assert [with_context(spec, prompt, None, all_text(x)) for prompt, x in zip("qr", shown, strict=True)] == asked


def assert_same(ours, theirs):
    """The loss of a batch, and its gradient by the student's logits."""
    value, gradient = jax.value_and_grad(ours)(jnp.asarray(STUDENT))
    leaf = torch.tensor(STUDENT, requires_grad=True)
    expected = theirs(leaf)
    expected.backward()
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-6, atol=1e-10)
    assert np.abs(gradient).max() > 1e-4
    return float(value), float(expected.detach())


def trl_loss(trainer, logits, off_policy):
    """TRL's loss of the batch whose logits of the student are given, by the method of the trainer."""
    from trl.experimental.sdpo.sdpo_trainer import DistillationLogits, SDPOTrainer

    mask, taught = torch.tensor(MASK), torch.tensor(TAUGHT)
    aligned = DistillationLogits(torch.tensor(SAMPLED), mask, mask * taught[:, None], logits, torch.tensor(TEACHER))
    inputs = {"old_per_token_logps": torch.tensor(token_logps(OLD))} if off_policy else {}
    return SDPOTrainer._compute_self_distillation_loss(trainer, trainer.model, inputs, aligned)


def token_logps(logits):
    return np.asarray(jnp.take_along_axis(jax.nn.log_softmax(logits), SAMPLED[..., None], axis=-1)[..., 0])


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_loss_of_whole_distributions(beta, off_policy):
    """Value and gradient, with rows that are not taught, and the clipped weights of later updates."""
    from trl.experimental.sdpo.sdpo_config import SDPOConfig

    trainer = trainer_of(SDPOConfig, [], distillation_mode="full_logits", distillation_alpha=beta)
    trainer.accelerator.gather = lambda x: x.detach()
    old = jnp.asarray(token_logps(OLD)) if off_policy else None
    batch = Batch(Inputs(SAMPLED), jnp.asarray(MASK), old_logps=old, taught=jnp.asarray(TAUGHT))
    batch = weigh(batch, loss_weights(batch.mask, "sequence"))
    bound = trainer.args.distillation_is_clip
    spec = DivergenceSpec(1.0, beta, 1.0, bound, top_k=0, tail=True, least=None, limit=None)

    def ours(logits):
        own = jax.nn.log_softmax(logits)
        logps = jnp.take_along_axis(own, SAMPLED[..., None], axis=-1)[..., 0]
        divergence = generalized_jsd(own, jax.nn.log_softmax(TEACHER), beta)
        term, _ = teacher_term(spec, TokenStatistics(logps, logps, logps, divergence=divergence), batch)
        return (batch.prepared.weights * term).sum()

    value, expected = assert_same(ours, lambda logits: trl_loss(trainer, logits, off_policy))
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_the_loss_of_sampled_tokens():
    """In the advantages it has the gradient of TRL's sampled_token in the first update; as a number it is another."""
    from trl.experimental.sdpo.sdpo_config import SDPOConfig

    trainer = trainer_of(SDPOConfig, [])
    assert trainer.args.distillation_mode == "sampled_token"
    trainer.accelerator.gather = lambda x: x.detach()
    own, theirs = token_logps(STUDENT), token_logps(TEACHER)
    taught = MASK * TAUGHT[:, None]
    advantages = distilled_advantages(jnp.zeros_like(own), own, jnp.where(taught > 0, theirs, own), MASK)
    weights = loss_weights(MASK, "sequence").astype(jnp.float64)

    def ours(logits):
        logps = jnp.take_along_axis(jax.nn.log_softmax(logits), SAMPLED[..., None], axis=-1)[..., 0]
        return (weights * ppo_clip(logps, own, advantages, 0.2, 0.2)[0]).sum()

    assert_same(ours, lambda logits: trl_loss(trainer, logits, False))
