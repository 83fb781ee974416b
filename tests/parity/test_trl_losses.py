"""Losses and gradients against TRL's own loss methods, called without a trainer on random log-probs.

Each TRL method runs unbound on a stand-in that holds its settings, and takes the log-probs from a stand-in model, so
that no weights, tokenizer or data are needed. Everything is float64.
"""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import policy_losses, preference_losses
from jaxrl_llm.algorithms.advantages import soft_overlong_punishment
from jaxrl_llm.algorithms.aggregation import loss_weights
from jaxrl_llm.algorithms.controllers import AdaptiveEntropy
from jaxrl_llm.algorithms.kl import kl_estimate
from jaxrl_llm.algorithms.losses import with_metrics
from jaxrl_llm.algorithms.off_policy import off_policy_sequence_mask
from jaxrl_llm.algorithms.policy_losses import top_entropy_mask
from jaxrl_llm.algorithms.sequence_logps import length_desensitized_logps, sequence_logps, split_pairs, wpo_weights
from jaxrl_llm.data.length_limit import LimitedTokenizer
from jaxrl_llm.data.tokenize import RowTokenizer
from jaxrl_llm.training import offline

torch = pytest.importorskip("torch")
pytest.importorskip("trl", minversion="1.16")

pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.filterwarnings("ignore")]

N, T, MAX_LENGTH = 6, 9, 16


class Accelerator:
    """One process: gathering and reducing change nothing."""

    num_processes = 1
    sync_gradients = True
    device = "cpu"

    def gather(self, x):
        return x

    def gather_for_metrics(self, x):
        return x

    def reduce(self, x, reduction):
        return x

    def pad_across_processes(self, x, dim, pad_index):
        return x


def random_rows(seed=0):
    rng = np.random.default_rng(seed)
    logps = -rng.exponential(1.0, (N, T))
    mask = (np.arange(T) < rng.integers(3, T + 1, (N, 1))) & (rng.random((N, T)) < 0.9)
    mask[:, 0] = True
    return {
        "logps": logps,
        "old": logps + 0.3 * rng.normal(size=(N, T)),
        "ref": logps + 0.3 * rng.normal(size=(N, T)),
        "entropy": rng.exponential(1.0, (N, T)),
        "advantages": rng.normal(size=N),
        "mask": mask.astype(float),
    }


def double(x):
    return torch.tensor(np.asarray(x), dtype=torch.float64)


def torch_loss(function, logps):
    """Returns a TRL loss and its gradient with respect to the log-probs."""
    leaf = double(logps).requires_grad_()
    loss = function(leaf)
    loss.backward()
    return loss.item(), leaf.grad.numpy()


def assert_same(ours, theirs, logps, rtol=1e-6):
    value, gradient = jax.jit(jax.value_and_grad(ours))(jnp.asarray(logps))
    expected_value, expected_gradient = torch_loss(theirs, logps)
    np.testing.assert_allclose(value, expected_value, rtol=rtol, atol=1e-9)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=rtol, atol=1e-9)
    assert np.abs(expected_gradient).max() > 1e-4


# -- policy losses -----------------------------------------------------------------------------------------------------


def grpo_stand_in(rows, leaf, loss_type, **settings):
    from trl import GRPOTrainer

    arguments = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
    }
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, double(rows["entropy"]), None),
        accelerator=Accelerator(),
        args=SimpleNamespace(**{key: settings.pop(key, value) for key, value in arguments.items()}),
        model=SimpleNamespace(training=True),
        loss_type=loss_type,
        beta=settings.pop("beta", 0.0),
        epsilon_low=settings.pop("epsilon_low", 0.2),
        epsilon_high=settings.pop("epsilon_high", 0.2),
        importance_sampling_level=settings.pop("level", "token"),
        top_entropy_quantile=settings.pop("top_entropy_quantile", 1.0),
        off_policy_mask_threshold=settings.pop("off_policy_mask_threshold", None),
        max_completion_length=MAX_LENGTH,
        current_gradient_accumulation_steps=1,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(partial(defaultdict, list)),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )
    assert not settings
    trainer.get_high_entropy_mask = partial(GRPOTrainer.get_high_entropy_mask, trainer)
    return trainer


def grpo_inputs(rows):
    empty = torch.zeros((N, 0), dtype=torch.long)
    return {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": torch.zeros((N, T), dtype=torch.long),
        "completion_mask": double(rows["mask"]),
        "advantages": double(rows["advantages"]),
        "old_per_token_logps": double(rows["old"]),
        "ref_per_token_logps": double(rows["ref"]),
        "num_items_in_batch": double(rows["mask"].sum()),
    }


def trl_policy_loss(rows, loss_type, **settings):
    from trl import GRPOTrainer

    def loss(leaf):
        return GRPOTrainer._compute_loss(grpo_stand_in(rows, leaf, loss_type, **settings), None, grpo_inputs(rows))

    return loss


def our_policy_loss(rows, name, aggregation, epsilons=(0.2, 0.2), beta=0.0, token_mask=1.0, ratio=None, **options):
    mask = rows["mask"]
    weights = loss_weights(mask, aggregation, max_completion_length=MAX_LENGTH, microbatch_rows=N)

    def loss(logps):
        function = getattr(policy_losses, name)
        result = function(logps, rows["old"], rows["advantages"], *epsilons, mask=mask, **options)
        loss = with_metrics(result)[0] * token_mask
        if beta:
            loss += beta * kl_estimate(logps, rows["ref"], ratio=ratio and ratio(logps))
        return (weights * loss).sum()

    return loss


ROWS = {"level": "sequence"}
POLICY = [
    ("grpo", {}, "ppo_clip", "sequence", {}),
    ("bnpo", {}, "ppo_clip", "microbatch_token", {}),
    ("dr_grpo", {}, "ppo_clip", "constant", {}),
    ("dapo", {"epsilon_high": 0.28}, "ppo_clip", "token", {"epsilons": (0.2, 0.28)}),
    ("grpo", {"delta": 1.3}, "ppo_clip", "sequence", {"delta": 1.3}),
    ("grpo", {"beta": 0.04}, "ppo_clip", "sequence", {"beta": 0.04}),
    ("cispo", {"epsilon_high": 1.1}, "cispo", "token", {"epsilons": (0.2, 1.1)}),
    ("sapo", {}, "sapo", "sequence", {}),
    ("sapo", {"sapo_temperature_pos": 2.0}, "sapo", "sequence", {"temperature_positive": 2.0}),
    ("vespo", {}, "vespo", "token", {}),
    ("grpo", {"level": "sequence"}, "gspo", "sequence", {}),
    ("grpo", {"level": "sequence", "epsilon_low": 0.05}, "gspo", "sequence", {"epsilons": (0.05, 0.2)}),
    ("luspo", {"level": "sequence"}, "luspo", "sequence", {}),
    ("luspo", {"level": "sequence", "beta": 0.04}, "gspo", "sequence_sum", {"beta": 0.04}),
    ("luspo", {"beta": 0.04}, "ppo_clip", "sequence_sum", {"beta": 0.04}),
    ("cispo", {**ROWS, "epsilon_high": 1.02}, "cispo", "token", {"epsilons": (0.2, 1.02), **ROWS}),
    ("sapo", {**ROWS, "beta": 0.04}, "sapo", "sequence", {**ROWS, "beta": 0.04}),
]


@pytest.mark.parametrize(("loss_type", "settings", "name", "aggregation", "options"), POLICY)
def test_policy_losses(loss_type, settings, name, aggregation, options):
    rows = random_rows()
    ours = our_policy_loss(rows, name, aggregation, **options)
    assert_same(ours, trl_policy_loss(rows, loss_type, **settings), rows["logps"])


def test_the_cispo_metric_of_rows():
    from trl import GRPOTrainer

    rows = random_rows()
    trainer = grpo_stand_in(rows, double(rows["logps"]), "cispo", level="sequence", epsilon_high=1.02)
    GRPOTrainer._compute_loss(trainer, None, grpo_inputs(rows))
    arguments = (rows["logps"], rows["old"], rows["advantages"], 0.2, 1.02)
    metric = policy_losses.cispo(*arguments, mask=rows["mask"], level="sequence")[1]["cispo_clip_ratio"]
    weights = loss_weights(rows["mask"], "sequence")
    assert metric.reduce == "row_mean"
    (theirs,) = trainer._metrics["train"]["cispo_clip_ratio"]
    assert theirs > 0
    np.testing.assert_allclose((weights * metric.value).sum(), theirs, rtol=1e-6)


def test_importance_corrected_kl():
    rows = random_rows()
    ours = our_policy_loss(rows, "ppo_clip", "sequence", beta=0.1, ratio=lambda logps: jnp.exp(logps - rows["old"]))
    theirs = trl_policy_loss(rows, "grpo", beta=0.1, use_bias_correction_kl=True)
    assert_same(ours, theirs, rows["logps"])


def test_top_entropy_tokens_leave_kl_and_weights_alone():
    rows = random_rows()
    keep = top_entropy_mask(rows["entropy"], rows["mask"], 0.3)
    ours = our_policy_loss(rows, "ppo_clip", "token", beta=0.1, token_mask=keep)
    assert_same(ours, trl_policy_loss(rows, "dapo", beta=0.1, top_entropy_quantile=0.3), rows["logps"])


def test_off_policy_sequences_are_dropped():
    rows = random_rows()
    rows["old"] = rows["old"] + np.linspace(-0.5, 1.0, N)[:, None]
    keep = off_policy_sequence_mask(rows["advantages"], rows["old"], rows["logps"], rows["mask"], 0.2)
    assert 0 < float((keep * rows["mask"]).sum()) < rows["mask"].sum()
    ours = our_policy_loss(rows, "ppo_clip", "sequence", beta=0.1, token_mask=keep)
    assert_same(ours, trl_policy_loss(rows, "grpo", beta=0.1, off_policy_mask_threshold=0.2), rows["logps"])


@pytest.mark.parametrize(("level", "epsilon"), [("token", 0.2), ("sequence", 0.05)])
def test_clip_metrics(level, epsilon):
    from trl import GRPOTrainer

    rows = random_rows()
    trainer = grpo_stand_in(rows, double(rows["logps"]), "grpo", level=level, epsilon_low=epsilon, epsilon_high=epsilon)
    GRPOTrainer._compute_loss(trainer, None, grpo_inputs(rows))
    ours = policy_losses.clip_fractions(
        rows["logps"], rows["old"], rows["advantages"], epsilon, epsilon, mask=rows["mask"], level=level
    )
    # TRL averages sequence-level indicators over rows, token-level ones over tokens
    weights = loss_weights(rows["mask"], "sequence" if level == "sequence" else "token")
    for name in ("low", "high", "region"):
        (theirs,) = trainer._metrics["train"][f"clip_ratio/{name}_mean"]
        np.testing.assert_allclose((weights * getattr(ours, name)).sum(), theirs, rtol=1e-6)
    assert theirs > 0


def test_entropy_controller():
    from trl import GRPOTrainer

    rows, inputs = random_rows(), grpo_inputs(random_rows())
    trainer = grpo_stand_in(rows, double(rows["logps"]), "grpo")
    trainer._entropy_bonus_enabled = trainer.use_adaptive_entropy = True
    trainer.entropy_coef, trainer._last_world_entropy, trainer._entropy_window_stats = 0.01, float("inf"), None
    limits = {"entropy_target": 0.5, "entropy_coef_delta": 0.005, "entropy_coef_min": 0.0, "entropy_coef_max": 0.02}
    vars(trainer.args).update(limits)
    ours = AdaptiveEntropy(coef=0.01, target=0.5, maximum=0.02)
    mask, advantages = rows["mask"], rows["advantages"]
    plain, _ = policy_losses.ppo_clip(rows["logps"], rows["old"], advantages, 0.2, 0.2, mask=mask)
    plain = float((loss_weights(mask, "sequence") * plain).sum())
    for scale in (0.1, 0.2, 0.3, 2.0, 2.0, 0.1, 0.1):
        entropy = scale * rows["entropy"]
        trainer._get_per_token_logps_and_entropies = lambda *_, e=entropy, **__: (
            double(rows["logps"]),
            double(e),
            None,
        )
        mean = (entropy * mask).sum() / mask.sum()
        theirs = GRPOTrainer._compute_loss(trainer, None, inputs).item()
        np.testing.assert_allclose(plain - float(ours.applied) * mean, theirs, rtol=1e-6)
        ours = ours.update(mean)
        np.testing.assert_allclose(ours.coef, trainer.entropy_coef, rtol=1e-9)


def test_gmpo():
    from trl.experimental.gmpo import GMPOTrainer

    rows = random_rows()

    def theirs(leaf):
        trainer = grpo_stand_in(rows, leaf, "grpo", epsilon_low=0.25, epsilon_high=0.15)
        return GMPOTrainer._compute_loss(trainer, None, grpo_inputs(rows))

    assert_same(our_policy_loss(rows, "gmpo", "sequence", (0.25, 0.15)), theirs, rows["logps"])


def test_rloo():
    from trl import RLOOTrainer

    rows = random_rows()
    rows["old"] = rows["logps"] + 0.3 * (rows["old"] - rows["logps"])

    def theirs(leaf):
        inputs = grpo_inputs(rows) | {"old_logps": double((rows["old"] * rows["mask"]).sum(1))}
        return RLOOTrainer._compute_loss(grpo_stand_in(rows, leaf, "grpo"), None, inputs)

    assert_same(our_policy_loss(rows, "rloo", "sequence"), theirs, rows["logps"])


# -- preference losses -------------------------------------------------------------------------------------------------

CHOSEN_FIRST = np.arange(N).reshape(N // 2, 2).T.reshape(-1)  # TRL puts all chosen rows first


def dpo_stand_in(loss_type, **settings):
    trainer = SimpleNamespace(
        accelerator=Accelerator(),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, gradient_checkpointing=False, discopop_tau=0.05),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        ld_alpha=None,
        beta=0.1,
        loss_types=[loss_type],
        loss_weights=[1.0],
        label_smoothing=0.0,
        use_weighting=False,
        f_divergence_type="reverse_kl",
        f_alpha_divergence_coef=0.5,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics=defaultdict(partial(defaultdict, list)),
    )
    vars(trainer).update(settings)
    return trainer


def trl_preference_loss(rows, loss_type, dtype=torch.float64, **settings):
    from trl import DPOTrainer

    mask = rows["mask"][CHOSEN_FIRST]
    ref = np.asarray(ref_sums(rows, settings.get("ld_alpha")))[CHOSEN_FIRST]
    ref_chosen, ref_rejected = double(ref).to(dtype).chunk(2)

    def loss(leaf):
        shifted = leaf[CHOSEN_FIRST] * double(mask)
        outputs = SimpleNamespace(
            log_probs=shifted.to(dtype),
            entropy=torch.zeros(N, T),
            mean_logits=torch.zeros(N, T),
            is_top1=torch.zeros(N, T, dtype=torch.bool),
            log_sum_sq_probs=double(-rows["entropy"][CHOSEN_FIRST]),
        )
        inputs = {
            "input_ids": torch.zeros((N, T + 1), dtype=torch.long),
            "attention_mask": torch.ones((N, T + 1)),
            "completion_mask": torch.cat([torch.zeros(N, 1), torch.tensor(mask)], dim=1).long(),
            "ref_chosen_logps": ref_chosen,
            "ref_rejected_logps": ref_rejected,
        }
        trainer = dpo_stand_in(loss_type, **settings)
        return DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)

    return loss


def ref_sums(rows, ld_alpha=None):
    if ld_alpha is not None:
        return length_desensitized_logps(rows["ref"], rows["mask"], ld_alpha)
    return sequence_logps(rows["ref"], rows["mask"])[0]


def our_preference_loss(rows, name, ld_alpha=None, weigh=False, **options):
    ref = ref_sums(rows, ld_alpha)

    def loss(logps):
        sums, lengths = sequence_logps(logps, rows["mask"])
        if ld_alpha is not None:
            sums = length_desensitized_logps(logps, rows["mask"], ld_alpha)
        function = getattr(preference_losses, name)
        halves = (sums[0::2], sums[1::2], ref[0::2], ref[1::2])
        losses = function(*halves, 0.1, lengths=(lengths[0::2], lengths[1::2]), **options)
        if weigh:
            losses *= wpo_weights(logps, -rows["entropy"], rows["mask"])
        return losses.mean()

    return loss


PREFERENCE = [
    ("sigmoid", {}, "dpo", {}),
    ("hinge", {}, "hinge", {}),
    ("ipo", {}, "ipo", {}),
    ("exo_pair", {"label_smoothing": 1e-3}, "exo_pair", {}),
    ("nca_pair", {}, "nca_pair", {}),
    ("robust", {"label_smoothing": 0.1}, "robust", {"label_smoothing": 0.1}),
    ("bco_pair", {}, "bco_pair", {}),
    ("sppo_hard", {}, "sppo_hard", {}),
    ("aot", {"label_smoothing": 0.1}, "aot", {"label_smoothing": 0.1}),
    ("aot_unpaired", {"label_smoothing": 0.1}, "aot_unpaired", {"label_smoothing": 0.1}),
    ("apo_zero", {}, "apo_zero", {}),
    ("apo_down", {}, "apo_down", {}),
    ("discopop", {}, "discopop", {}),
    ("sigmoid_norm", {}, "sigmoid_norm", {}),
    ("sigmoid", {"f_divergence_type": "forward_kl"}, "dpo", {"divergence": "forward_kl"}),
    ("ipo", {"f_divergence_type": "js_divergence"}, "ipo", {"divergence": "js_divergence"}),
    ("sigmoid", {"ld_alpha": 0.3}, "dpo", {"ld_alpha": 0.3}),
    ("sigmoid", {"use_weighting": True}, "dpo", {"weigh": True}),
]


@pytest.mark.parametrize(("loss_type", "settings", "name", "options"), PREFERENCE)
def test_preference_losses(loss_type, settings, name, options):
    rows = random_rows(1)
    assert_same(
        our_preference_loss(rows, name, **options), trl_preference_loss(rows, loss_type, **settings), rows["logps"]
    )


def test_alpha_divergence():
    # TRL computes this one in float32 at most
    rows = random_rows(1)
    ours = our_preference_loss(rows, "dpo", divergence="alpha_divergence", alpha=0.4)
    settings = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.4}
    assert_same(ours, trl_preference_loss(rows, "sigmoid", torch.float32, **settings), rows["logps"], rtol=1e-4)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_labelled_losses(loss_type):
    from trl import KTOTrainer

    rows, rng = random_rows(2), np.random.default_rng(5)
    labels, policy_kl, ref_kl = np.array([1, 0, 1, 1, 0, 1]), rng.normal(size=N) + 0.3, rng.normal(size=N)
    ref = np.asarray(sequence_logps(rows["ref"], rows["mask"])[0])

    def theirs(leaf):
        trainer = dpo_stand_in(None, desirable_weight=1.2, undesirable_weight=0.7)
        trainer.loss_type, trainer.calculate_KL = loss_type, loss_type == "kto"
        trainer._compute_kl_logps = lambda *_: double(policy_kl)
        blank = torch.zeros(N, T)
        outputs = SimpleNamespace(log_probs=leaf * double(rows["mask"]), entropy=blank, mean_logits=blank)
        inputs = {
            "input_ids": torch.zeros((N, T + 1), dtype=torch.long),
            "attention_mask": torch.ones((N, T + 1)),
            "completion_mask": torch.cat([torch.zeros(N, 1), torch.tensor(rows["mask"])], dim=1).long(),
            "label": torch.tensor(labels, dtype=torch.bool),
            "ref_logps": double(ref),
            "ref_KL_logps": double(ref_kl),
        }
        return KTOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)

    def ours(logps):
        kl = preference_losses.kto_kl(policy_kl, ref_kl)
        sums, _ = sequence_logps(logps, rows["mask"])
        function = getattr(preference_losses, loss_type)
        return function(sums, ref, labels, 0.1, kl=kl, desirable_weight=1.2, undesirable_weight=0.7).mean()

    assert float(preference_losses.kto_kl(policy_kl, ref_kl)) > 0
    assert_same(ours, theirs, rows["logps"])


def test_mismatches_of_truncated_rows():
    """TRL's collator pairs each prompt with the whole completion before it, and truncates the pair."""
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    rng, longest = np.random.default_rng(0), 9
    lengths = [(7, 6), (2, 12), (3, 3), (8, 1), (1, 9), (5, 4)]  # of prompts and completions
    parts = [[rng.integers(1, 99, n).tolist() for n in pair] for pair in lengths]
    completions = [completion for _, completion in parts]
    rotated = [completions[-1], *completions[:-1]]
    collate = DataCollatorForUnpairedPreference(pad_token_id=0, max_length=longest)
    theirs = collate.torch_call(
        [
            {"prompt_ids": prompt, "completion_ids": completion, "KL_completion_ids": other, "label": True}
            for (prompt, completion), other in zip(parts, rotated, strict=True)
        ]
    )
    limit = LimitedTokenizer(RowTokenizer("labels", None), longest, "truncate_right").apply_limit
    masks = [[0] * len(prompt) + [1] * len(completion) for prompt, completion in parts]
    rows: list[Any] = [
        [limit({"ids": prompt + completion, "mask": mask, "label": True})]
        for (prompt, completion), mask in zip(parts, masks, strict=True)
    ]
    spec: Any = SimpleNamespace(mismatched=True, width=longest)
    pairs = offline.with_mismatches(spec, rows)
    for place, prefix in enumerate(("", "KL_")):
        batch = offline.pad_examples([[pair[place]] for pair in pairs], longest)
        np.testing.assert_array_equal(batch.inputs.tokens, theirs[f"{prefix}input_ids"])
        np.testing.assert_array_equal(batch.inputs.segments > 0, theirs[f"{prefix}attention_mask"])
        np.testing.assert_array_equal(batch.mask, theirs[f"{prefix}completion_mask"])
    assert offline.longest(rows, mismatched=True) == 8 + 12


CPO = [
    ("sigmoid", 0.0, "cpo", {"label_smoothing": 0.1}),
    ("simpo", 0.0, "simpo", {"gamma": 0.5, "label_smoothing": 0.1}),
    ("simpo", 0.3, "alphapo", {"gamma": 0.5, "label_smoothing": 0.1, "alpha": 0.3}),
    ("hinge", 0.0, "hinge", {}),
]


@pytest.mark.parametrize(("loss_type", "alpha", "name", "options"), CPO)
def test_reference_free_losses(loss_type, alpha, name, options):
    from trl.experimental.cpo import CPOTrainer

    rng = np.random.default_rng(0)
    lengths = (rng.integers(3, 9, 4).astype(float), rng.integers(3, 9, 4).astype(float))
    sums = -rng.uniform(4, 12, (2, 4))
    averages = loss_type == "simpo"

    def theirs(leaf):
        trainer = SimpleNamespace(
            accelerator=Accelerator(), beta=0.7, simpo_gamma=0.5, label_smoothing=0.1, loss_type=loss_type, alpha=alpha
        )
        chosen, rejected = (leaf / double(np.stack(lengths)) if averages else leaf).unbind(0)
        return CPOTrainer.cpo_loss(trainer, chosen, rejected)[0].mean()

    def ours(sums):
        function = getattr(preference_losses, name)
        return function(sums[0], sums[1], None, None, 0.7, lengths=lengths, **options).mean()

    assert_same(ours, theirs, sums)


TPO = [
    ("sigmoid", "tpo", {"label_smoothing": 0.1}),
    ("hinge", "hinge", {}),
    ("ipo", "ipo", {}),
    ("tpo-l", "tpo_l", {"gamma": 0.4, "label_smoothing": 0.1}),
]


@pytest.mark.parametrize(("loss_type", "name", "options"), TPO)
def test_triple_preferences(loss_type, name, options):
    """From logits on. TRL has chosen rows first, then the rejected, then the gold ones; here the three are adjacent."""
    from trl.experimental.tpo import TPOTrainer

    rng, pairs, width, vocab = np.random.default_rng(0), 4, 7, 11
    logits, tokens = rng.normal(size=(3 * pairs, width, vocab)), rng.integers(0, vocab, (3 * pairs, width))
    column, lengths = np.arange(width), rng.integers(1, 5, (3 * pairs, 1))
    mask = (column >= 2) & (column < 2 + lengths)
    adjacent = np.arange(3 * pairs).reshape(3, pairs).T.reshape(-1)  # TRL's row in each row of ours

    def theirs(leaf):
        trainer = SimpleNamespace(
            accelerator=Accelerator(), model=SimpleNamespace(training=False), _metrics={"eval": defaultdict(list)},
            _total_train_tokens=0, beta=0.7, label_smoothing=0.1, loss_type=loss_type, tpo_alpha=0.3, tpo_l_gamma=0.4,
        )  # fmt: skip
        inputs = {
            "input_ids": torch.tensor(tokens),
            "attention_mask": torch.ones(tokens.shape),
            "completion_mask": torch.tensor(mask).long(),
        }
        return TPOTrainer._compute_loss(trainer, lambda **_: SimpleNamespace(logits=leaf), inputs, False)

    def ours(logits):
        # Index t of a row speaks of its own token: the logits before it predict it.
        scores = jnp.roll(jax.nn.log_softmax(logits), 1, axis=1)
        logps = jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0][adjacent]
        sums, lengths = sequence_logps(logps, mask[adjacent], together=3)
        loss = getattr(preference_losses, name)
        per_pair = loss(*split_pairs(sums, 3), None, None, 0.7, lengths=split_pairs(lengths, 3), **options)
        return per_pair.mean() - 0.3 * sums[2::3].sum() / lengths[2::3].sum()

    assert_same(ours, theirs, logits)


def test_orpo():
    from trl.experimental.orpo import ORPOTrainer

    rng = np.random.default_rng(0)
    lengths, sums = rng.integers(3, 9, (2, 4)).astype(float), -rng.uniform(1, 12, (2, 4))

    def theirs(leaf):
        trainer = SimpleNamespace(accelerator=Accelerator(), beta=0.1)
        chosen, rejected = (leaf / double(lengths)).unbind(0)
        return -ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0].mean()

    # TRL computes the odds in float32
    assert_same(lambda sums: preference_losses.orpo(*sums, lengths=lengths)[0].mean(), theirs, sums, rtol=1e-4)


@pytest.mark.parametrize("center", [None, 0.01])
def test_reward_model(center):
    from trl import RewardTrainer

    rng = np.random.default_rng(0)
    margin, scores = rng.uniform(0, 1, 4), rng.normal(size=(2, 4))

    def theirs(leaf):
        trainer = dpo_stand_in(None)
        trainer.args.center_rewards_coefficient = center
        inputs = {"attention_mask": torch.ones(8, 3), "margin": double(margin)}
        outputs = SimpleNamespace(logits=leaf.reshape(8, 1))
        return RewardTrainer.compute_loss(trainer, lambda **_: outputs, inputs)

    ours = lambda scores: preference_losses.bradley_terry(*scores, margin, center or 0.0).mean()  # noqa: E731
    assert_same(ours, theirs, scores)


def test_soft_overlong_punishment():
    from trl.rewards import get_soft_overlong_punishment

    lengths = np.array([1, 80, 81, 90, 99, 100, 101, 150])
    theirs = get_soft_overlong_punishment(100, 20)([[0] * n for n in lengths])
    np.testing.assert_allclose(soft_overlong_punishment(lengths, 100, 20), theirs, rtol=1e-6)
