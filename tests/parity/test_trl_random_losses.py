"""The losses of TRL's GRPOTrainer and DPOTrainer, gradients and metrics, under options drawn at random: `migrate` reads
them, and the objective of its configuration gives the same on the same log-probs."""

import contextlib
import json
import math
import random
from collections import defaultdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.batch import Batch, Inputs, Scalars
from jaxrl_llm.models.logprobs import TokenStatistics
from jaxrl_llm.tools.migrate import migrate
from jaxrl_llm.training.objectives import preference
from jaxrl_llm.training.objectives.policy_gradient import policy_gradient, policy_objective
from jaxrl_llm.training.setup.objectives import policy_spec, preference_spec

torch = pytest.importorskip("torch")
trl = pytest.importorskip("trl", minversion="1.16")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

N, T = 8, 7
CHOICES = {  # how often an option is set, and its values
    "epsilon": (0.3, [0.05, 0.3]),
    "epsilon_high": (0.3, [0.28, 0.02]),
    "delta": (0.4, [1.3, 4.0]),
    "importance_sampling_level": (0.4, ["sequence"]),
    "beta": (0.5, [0.05, 1.0]),
    "use_bias_correction_kl": (0.4, [True, False]),
    "top_entropy_quantile": (0.25, [0.5, 0.2]),
    "entropy_coef": (0.25, [0.01, 0.3]),
    "off_policy_mask_threshold": (0.3, [0.001, 0.05, 0.3]),
    "use_vllm": (0.5, [True]),
    "vllm_importance_sampling_mode": (0.8, ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]),
    "vllm_importance_sampling_clip_max": (0.6, [1.05, 1.5]),
    "vllm_importance_sampling_clip_min": (0.5, [0.95, 0.5]),
}
OF_LOSS = {
    "sapo": {"sapo_temperature_pos": (0.5, [1.5]), "sapo_temperature_neg": (0.5, [2.0])},
    "vespo": {"vespo_k_pos": (0.5, [1.5]), "vespo_lambda_pos": (0.5, [0.5]), "vespo_k_neg": (0.5, [2.5])},
    "cispo": {"epsilon_high": (1.0, [5.0, 1.01])},
}


def drawn(loss, seed):
    """Options of GRPOConfig for a loss, without those that `migrate` notes as another formula."""
    draw, options = random.Random(f"{loss} {seed}"), {"loss_type": loss}
    for name, (chance, values) in (CHOICES | OF_LOSS.get(loss, {})).items():
        if draw.random() < chance:
            options[name] = draw.choice(values)
    if loss == "vespo":
        options.pop("importance_sampling_level", None)
        options["vllm_importance_sampling_mode"] = draw.choice(["token_truncate", "token_mask"])
    return options


class Trainer(trl.GRPOTrainer):
    """TRL's, whose model gives the log-probs and entropies that it is made with."""

    def __init__(self, args, vllm, logps, entropies):
        self.args, self.logps, self.entropies = args, logps, entropies
        self.model, self.accelerator = SimpleNamespace(training=True), SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, **_: x,
            pad_across_processes=lambda x, **_: x,
        )  # fmt: skip
        for name in (
            "top_entropy_quantile", "off_policy_mask_threshold", "importance_sampling_level", "beta", "loss_type",
            "vllm_importance_sampling_correction", "max_completion_length", "entropy_coef", "use_adaptive_entropy",
        ):  # fmt: skip
            setattr(self, name, getattr(args, name))
        self.use_vllm, self.aux_loss_enabled, self._entropy_bonus_enabled = vllm, False, args.entropy_coef != 0
        self.epsilon_low, self.epsilon_high = args.epsilon, args.epsilon_high or args.epsilon
        self.current_gradient_accumulation_steps, self._metrics = 1, {"train": defaultdict(list)}

    def _get_per_token_logps_and_entropies(self, *_, **__):
        return self.logps, self.entropies, None


def importance_ratio(args, change):
    """TRL's weights of samples of another engine, from the log-ratios `[N,T]` of its tokens."""
    level, _, kind = args.vllm_importance_sampling_mode.partition("_")
    ratio = torch.exp(change.sum(-1, keepdim=True) if level == "sequence" else change)
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    if kind == "truncate":
        return torch.clamp(ratio, min=low, max=high)
    return ratio.masked_fill((ratio < (-math.inf if low is None else low)) | (ratio > high), 0.0)


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"])
@pytest.mark.parametrize("seed", range(4))
def test_grpo(loss, seed, tmp_path):
    options, draw = drawn(loss, seed), np.random.default_rng(seed)
    vllm = options.pop("use_vllm", False)
    shape = {"per_device_train_batch_size": N, "num_generations": 4, "max_completion_length": 12}
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"output_dir": "o", "max_steps": 3, "use_vllm": vllm, **shape, **options}))
    config, _ = migrate(file, trainer="grpo", devices=1)
    args = trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], **shape, **options)

    mask = (np.arange(T) < draw.integers(1, T + 1, (N, 1))).astype(np.float32)
    logps, reference = (-draw.uniform(0.1, 2.5, (2, N, T))).astype(np.float32)
    old = logps + 0.2 * draw.normal(size=(N, T)).astype(np.float32)
    sampled = old + 0.2 * draw.normal(size=(N, T)).astype(np.float32) * vllm
    entropies = draw.uniform(0.1, 3.0, (N, T)).astype(np.float32)
    advantages = draw.normal(size=N).astype(np.float32)

    leaves = [torch.tensor(x, requires_grad=True) for x in (logps, entropies)]
    inputs = {
        "prompt_ids": torch.zeros(N, 1), "prompt_mask": torch.ones(N, 1), "completion_ids": torch.zeros(N, T),
        "completion_mask": torch.tensor(mask), "advantages": torch.tensor(advantages),
        "old_per_token_logps": torch.tensor(old), "ref_per_token_logps": torch.tensor(reference),
        "num_items_in_batch": torch.tensor(mask.sum()),
    }  # fmt: skip
    if vllm:
        inputs["sampling_per_token_logps"] = torch.tensor(sampled)
        inputs["importance_sampling_ratio"] = importance_ratio(args, torch.tensor((old - sampled) * mask))
    trainer = Trainer(args, vllm, *leaves)
    expected = trainer._compute_loss(trainer.model, inputs)
    expected.backward()

    spec = policy_spec(config)
    fields = {"advantages": np.broadcast_to(advantages[:, None], (N, T)), "old_logps": old, "sample_logps": sampled}
    if config.algorithm.beta:
        fields["ref_logps"] = reference
    scalars = Scalars(token_count=np.float32(mask.sum()))
    objective = policy_gradient(spec, None)
    batch = objective.prepare(
        Batch(Inputs(np.zeros((N, T), np.int32)), mask, scalars=scalars, **fields),
        (jnp.asarray(logps), jnp.asarray(entropies)) if objective.observe else None,
    )

    def loss_of(logps, entropies):
        return policy_objective(spec, TokenStatistics(logps, entropies, logps), batch)

    (value, metrics), gradients = jax.value_and_grad(loss_of, (0, 1), has_aux=True)(logps, entropies)
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5, atol=1e-6)
    for ours, leaf in zip(gradients, leaves, strict=True):
        theirs = np.zeros((N, T)) if leaf.grad is None else leaf.grad.numpy()
        np.testing.assert_allclose(ours * mask, theirs * mask, rtol=1e-4, atol=1e-6)
    for name, (logged,) in trainer._metrics["train"].items():
        if metrics.get(name) is not None and metrics[name].reduce == "sum":
            np.testing.assert_allclose(metrics[name].value, logged, rtol=1e-4, atol=1e-5, err_msg=name)


PAIRS = 5
DIVERGING = {"sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft", "sigmoid_norm"}
LOSSES = sorted(DIVERGING | {"nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down"})


def drawn_pairs(loss, seed):
    """Options of DPOConfig with a loss and up to two others, of those that TRL takes together."""
    draw = random.Random(f"{loss} {seed}")
    losses = [loss, *draw.sample([name for name in LOSSES if name != loss], seed % 3)]
    options = {
        "loss_type": losses,
        "beta": draw.choice([0.01, 0.1, 0.5, 1.0]),
        "label_smoothing": draw.choice([0.1, 0.3]),
    }
    if len(losses) > 1:
        options["loss_weights"] = [round(draw.uniform(0.1, 2.0), 2) for _ in losses]
    if set(losses) <= DIVERGING and draw.random() < 0.7:
        options["f_divergence_type"] = draw.choice(["forward_kl", "js_divergence", "alpha_divergence"])
    options["f_alpha_divergence_coef"] = draw.choice([0.5, 0.3, 1.0, 2.0, 0.0])
    if draw.random() < 0.4:
        options["ld_alpha"] = draw.choice([0.0, 0.5])
    if not {"sft", "aot", "aot_unpaired", "hinge"} & set(losses):  # hinge with weights has no gradient in TRL 1.16
        options["use_weighting"] = draw.random() < 0.3
    return options


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_dpo(loss, seed, tmp_path, monkeypatch):
    options, draw = drawn_pairs(loss, seed), np.random.default_rng(seed)
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"output_dir": "o", "max_steps": 3, **options}))
    config, _ = migrate(file, trainer="dpo", devices=1)
    args = trl.DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], **options)

    shape, places = (2 * PAIRS, T), np.arange(T)
    start = draw.integers(1, 3, (2 * PAIRS, 1))
    mask = ((places >= start) & (places < start + draw.integers(1, T - 1, start.shape))).astype(np.float32)
    logps = -draw.uniform(0.1, 2.5, shape).astype(np.float32)
    reference = logps + 0.5 * draw.normal(size=shape).astype(np.float32)
    entropies, squares = draw.uniform(0.1, 3.0, shape), -draw.uniform(0.1, 2.0, shape)
    is_top, mean_logits = draw.random(shape) < 0.3, draw.normal(size=shape)

    def sides(x):  # pairs alternate here; there all chosen rows are before all rejected ones
        return torch.tensor(np.concatenate([x[0::2], x[1::2]]))

    def model_of(logps):
        names = {"entropy": entropies, "mean_logits": mean_logits, "is_top1": is_top, "log_sum_sq_probs": squares}
        outputs = SimpleNamespace(
            log_probs=(logps * sides(mask))[:, 1:], **{k: sides(x)[:, 1:] for k, x in names.items()}
        )
        model = torch.nn.Module()
        model.forward = lambda **_: outputs
        return model

    leaf = sides(logps).requires_grad_()
    trainer = trl.DPOTrainer.__new__(trl.DPOTrainer)
    for name in (
        "ld_alpha",
        "f_divergence_type",
        "f_alpha_divergence_coef",
        "beta",
        "label_smoothing",
        "use_weighting",
    ):
        setattr(trainer, name, getattr(args, name))
    trainer.args, trainer.model, trainer.ref_model = args, model_of(leaf), model_of(sides(reference))
    trainer.accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer.loss_types, trainer.loss_weights = args.loss_type, args.loss_weights or [1.0]
    trainer.aux_loss_enabled = trainer.precompute_ref_logps = False
    trainer._metrics, trainer._total_train_tokens, trainer._tp_size = {"train": defaultdict(list)}, 0, 1
    monkeypatch.setattr("trl.trainer.dpo_trainer.disable_gradient_checkpointing", lambda *_: contextlib.nullcontext())
    ones = torch.ones(shape, dtype=torch.long)
    inputs = {"input_ids": ones, "attention_mask": ones, "completion_mask": sides(mask).long()}
    expected = trainer._compute_loss(trainer.model, inputs, False)
    expected.backward()

    tokens = (jnp.asarray(x, jnp.float32) for x in (entropies, is_top, mean_logits, squares))
    statistics = TokenStatistics(jnp.asarray(logps), *tokens)
    monkeypatch.setattr(preference, "token_statistics", lambda net, logps, *_, **__: statistics._replace(logps=logps))
    monkeypatch.setattr(preference, "token_logps", lambda net, logps, *_: (logps, None))
    spec = preference_spec(config)
    objective = preference.preference(spec, None)
    inputs = Inputs(np.zeros(shape, np.int32), segments=np.ones(shape, np.int32))
    batch = Batch(inputs, mask, ref_logps=reference if spec.needs_reference else None)
    batch = objective.prepare(batch, objective.observe(statistics.logps, batch) if objective.observe else None)
    (value, metrics), gradient = jax.value_and_grad(objective.loss, has_aux=True)(statistics.logps, batch)
    np.testing.assert_allclose(value, expected.item(), rtol=2e-5, atol=1e-5)
    theirs = leaf.grad.numpy()
    np.testing.assert_allclose(sides(np.asarray(gradient)), theirs, rtol=2e-4, atol=2e-6 * max(1, np.abs(theirs).max()))
    for name, (logged,) in trainer._metrics["train"].items():
        if name in metrics and (spec.needs_reference or not name.startswith("rewards/")):  # sft alone has no reference
            np.testing.assert_allclose(metrics[name].value, logged, rtol=1e-4, atol=1e-5, err_msg=name)
