"""Five optimizer steps of TRL's GRPO and RLOO trainers: their batches, updated with here, give the same parameters."""

import itertools

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm.algorithms import advantages
from jaxrl_llm.algorithms.batch import Batch, Inputs, Scalars
from jaxrl_llm.config import default
from jaxrl_llm.data import tasks
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.files.hf import EMBEDDED
from jaxrl_llm.models.model import Model, load_model, save_hf
from jaxrl_llm.training.passes import scored_logps
from jaxrl_llm.training.setup.objectives import objective_of
from jaxrl_llm.training.setup.run import make_optimizer
from jaxrl_llm.training.setup.specs import update_spec
from jaxrl_llm.training.update import init_state, make_update

torch = pytest.importorskip("torch")
trl = pytest.importorskip("trl", minversion="1.16")

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS, ROWS, GROUP, COMPLETION = 5, 8, 4, 10
RATE, WARMUP = 1e-3, 2
METRICS = ("entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
           "clip_ratio/low_min", "clip_ratio/high_max", "cispo_clip_ratio", "policy_loss",
           "vespo/phi_seq_mean")  # fmt: skip


def digits_in_order(completions, **_):
    """A reward with many values."""
    return [sum(a <= b for a, b in itertools.pairwise(text)) / 8 for text in completions]


def short(completions, **_):
    return [None if len(text) > 7 else 1.0 - 0.1 * len(text) for text in completions]


def run_trl(name: str, tmp_path, rows: int, **settings):
    """TRL's trainer after five optimizer steps, with the micro-batches and generation batches it went through."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer_class = getattr(trl, f"{name}Trainer")

    class Recording(trainer_class):
        def __init__(self, *args, **kwargs):
            self.parts, self.losses, self.generated, self.metrics = [], [], [], []
            super().__init__(*args, **kwargs)

        def _generate_and_score_completions(self, inputs):
            found = super()._generate_and_score_completions(inputs)
            self.generated.append({key: x.clone() for key, x in found.items() if hasattr(x, "clone")})
            return found

        def _calculate_rewards(self, *args):
            rewards = super()._calculate_rewards(*args)
            self.generated.append({"rewards": rewards.clone()})
            return rewards

        def _compute_loss(self, model, inputs):
            # `shuffle_sequence_dict` permutes the rows of a generation batch: what is seen here is what counts.
            self.parts.append({key: x.clone() for key, x in inputs.items() if hasattr(x, "clone")})
            loss = super()._compute_loss(model, inputs)
            self.losses.append(float(loss.detach()))
            return loss

        def log(self, logs, *args, **kwargs):
            self.metrics.append({key: np.mean(x) for key, x in self._metrics["train"].items()} | logs)
            return super().log(logs, *args, **kwargs)

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "sort")
    arguments = getattr(trl, f"{name}Config")(
        output_dir=str(tmp_path / "trl"), max_steps=STEPS, per_device_train_batch_size=rows, num_generations=GROUP,
        max_completion_length=COMPLETION, learning_rate=RATE, lr_scheduler_type="linear", warmup_steps=WARMUP,
        adam_beta2=0.99, adam_epsilon=1e-4, weight_decay=0.1, max_grad_norm=1.0, logging_steps=1, bf16=False,
        gradient_checkpointing=False, use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True,
        reward_weights=[1.0, 0.5], **settings,
    )  # fmt: skip
    trainer = Recording(
        model=AutoModelForCausalLM.from_pretrained(EMBEDDED / "sort", dtype=torch.float32),
        reward_funcs=[digits_in_order, short],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in tasks.generate("sort", size=64)]),
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer


def as_batch(parts: list[dict], token_count: float | None) -> Batch:
    """The micro-batches of one optimizer step, joined; TRL cuts all of a generation batch to the same widths."""
    joined = {
        key: np.concatenate([np.asarray(part[key].detach()) for part in parts])
        for key in parts[0]
        if parts[0][key].ndim
    }
    prompts = joined["prompt_ids"].shape[1]
    tokens = np.concatenate([joined["prompt_ids"], joined["completion_ids"]], axis=1).astype(np.int32)
    segments = np.concatenate([joined["prompt_mask"], joined["completion_mask"]], axis=1).astype(np.int32)
    mask = np.where(np.arange(tokens.shape[1]) >= prompts, segments, 0).astype(np.float32)

    def wide(name: str):
        return np.pad(joined[name], ((0, 0), (prompts, 0))) if name in joined else None

    old = wide("old_per_token_logps")
    if "old_logps" in joined:  # of whole rows: any way to spread them over tokens gives the same ratio
        first = np.arange(tokens.shape[1]) == prompts
        old = (joined["old_logps"][:, None] * first).astype(np.float32)
    return Batch(
        Inputs(tokens, segments, prompt_width=prompts),
        mask,
        old_logps=old,
        ref_logps=wide("ref_per_token_logps"),
        sample_logps=np.zeros_like(mask) if old is None else old,
        advantages=joined["advantages"][:, None] * mask,
        scalars=Scalars(token_count=None if token_count is None else np.float32(token_count)),
    )


def run_ours(trainer, accumulation: int, algorithm: dict, temperature: float = 1.0):
    """Losses, gradient norms, metrics and Hugging Face tensors after the same five updates."""
    config = default()
    config.total_steps, config.batch.microbatch_rows = STEPS, len(trainer.parts[0]["advantages"])
    config.rollout.max_completion_length, config.rollout.temperature = COMPLETION, temperature
    config.optimizer.learning_rate, config.optimizer.schedule, config.optimizer.warmup_steps = RATE, "linear", WARMUP
    config.optimizer.b2, config.optimizer.eps, config.optimizer.weight_decay = 0.99, 1e-4, 0.1
    config.algorithm.update(algorithm)
    mesh, lines = make_mesh(devices=jax.devices()[:1]), []
    model = load_model("embedded:sort", mesh=mesh)
    with jax.set_mesh(mesh):
        optimizer = make_optimizer(config)
        state = init_state(model.params, optimizer, mesh)
        update = make_update(objective_of(config, model.net), optimizer, update_spec(config), mesh)
        for step in range(STEPS):
            parts = trainer.parts[step * accumulation : (step + 1) * accumulation]
            count = parts[0].get("num_items_in_batch")
            if count is not None:
                count = float(count) * accumulation / trainer.args.steps_per_generation
            batch = as_batch(parts, count)
            if "old_per_token_logps" in parts[0] and step == 0:
                logps = scored_logps(model.net, state.params, batch.inputs, temperature, ROWS, 1)
                np.testing.assert_allclose(logps * batch.mask, batch.old_logps * batch.mask, atol=2e-5)
            state, metrics = update(state, batch)
            lines.append({name: float(x) for name, x in metrics.items()})
    return lines, Model(model.net, state.params, model.tokenizer, model.hf_config)


def compare(trainer, ours, accumulation: int, tmp_path):
    lines, model = ours
    logged = [entry for entry in trainer.metrics if "grad_norm" in entry]
    assert len(lines) == len(logged) == STEPS
    losses = np.reshape(trainer.losses[: STEPS * accumulation], (STEPS, accumulation)).sum(axis=1)
    np.testing.assert_allclose([line["loss"] for line in lines], losses, rtol=1e-4, atol=1e-5)
    norms = [float(entry["grad_norm"]) for entry in logged]
    # Rounding grows from step to step, and how much of it there is depends on the compiler's settings.
    np.testing.assert_allclose([line["grad_norm"] for line in lines], norms, rtol=3e-4)
    assert max(norms) > 0.01
    if accumulation == 1:  # TRL averages the metrics of micro-batches, whatever their tokens
        for name in METRICS:
            assert (name in lines[0]) == (name in logged[0]), name
            if name in lines[0]:
                np.testing.assert_allclose(
                    [line[name] for line in lines], [e[name] for e in logged], rtol=1e-3, atol=1e-5, err_msg=name
                )
    save_hf(model, tmp_path / "ours")
    tensors = load_file(tmp_path / "ours/model.safetensors")
    theirs = {name: x.detach().numpy() for name, x in trainer.model.state_dict().items()}
    start = load_file(EMBEDDED / "sort/model.safetensors")
    assert set(tensors) == set(theirs)
    for name, tensor in tensors.items():
        np.testing.assert_allclose(tensor, theirs[name], rtol=1e-4, atol=2e-5, err_msg=name)
    assert max(np.abs(theirs[name] - start[name]).max() for name in theirs) > 5e-4


SLOW = pytest.mark.slow
CASES = [  # TRL's settings; ours; micro-batches of an optimizer step
    pytest.param(
        {"loss_type": "dapo", "beta": 0.1, "num_iterations": 2, "steps_per_generation": 2, "epsilon_high": 0.28},
        {"aggregation": "rollout_token", "beta": 0.1, "epsilon_high": 0.28, "kl_bias_correction": True},
        1,
        id="dapo with KL, twice over two batches",
    ),
    pytest.param({"loss_type": "grpo"}, {"aggregation": "sequence"}, 1, marks=SLOW, id="grpo"),
    pytest.param(
        {"loss_type": "grpo", "beta": 0.04, "num_iterations": 2, "temperature": 0.7, "use_bias_correction_kl": False},
        {"aggregation": "sequence", "beta": 0.04},
        2,
        marks=SLOW,
        id="grpo with KL, accumulated",
    ),
    pytest.param({"loss_type": "dapo"}, {"aggregation": "token"}, 2, marks=SLOW, id="dapo, accumulated"),
    pytest.param({"loss_type": "bnpo"}, {"aggregation": "microbatch_token"}, 2, marks=SLOW, id="bnpo"),
    pytest.param(
        {"loss_type": "dr_grpo", "scale_rewards": "none", "delta": 1.3, "num_iterations": 2},
        {"aggregation": "constant", "loss": "ppo_clip(delta=1.3)"},
        1,
        marks=SLOW,
        id="dr_grpo, two-sided",
    ),
    pytest.param(
        {"loss_type": "cispo", "epsilon_high": 1.02, "num_iterations": 3},
        {"aggregation": "rollout_token", "loss": "cispo", "epsilon_high": 1.02},
        1,
        marks=SLOW,
        id="cispo",
    ),
    pytest.param(
        {"loss_type": "sapo", "num_iterations": 2},
        {"aggregation": "sequence", "loss": "sapo"},
        1,
        marks=SLOW,
        id="sapo",
    ),
    pytest.param(
        {"loss_type": "vespo", "num_iterations": 2},
        {"aggregation": "rollout_token", "loss": "vespo"},
        1,
        marks=SLOW,
        id="vespo",
    ),
    pytest.param(
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "num_iterations": 2,
            "epsilon": 0.01,
            "beta": 0.1,
        },
        {
            "aggregation": "sequence",
            "loss": "gspo",
            "epsilon_low": 0.01,
            "epsilon_high": 0.01,
            "beta": 0.1,
            "kl_bias_correction": True,
        },
        1,
        marks=SLOW,
        id="gspo",
    ),
    pytest.param(
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "num_iterations": 2},
        {"aggregation": "sequence", "loss": "luspo"},
        2,
        marks=SLOW,
        id="luspo",
    ),
    pytest.param(
        {"loss_type": "luspo", "num_iterations": 2, "beta": 0.1},
        {"aggregation": "sequence_sum", "beta": 0.1, "kl_bias_correction": True},
        1,
        marks=SLOW,
        id="luspo of tokens",
    ),
    *(
        pytest.param(
            {"loss_type": loss, "importance_sampling_level": "sequence", "num_iterations": 2, "beta": 0.1, **cap},
            {"aggregation": mode, "loss": f"{loss}(level='sequence')", "beta": 0.1, "kl_bias_correction": True, **cap},
            1,
            marks=SLOW,
            id=f"{loss} of sequences",
        )
        for loss, mode, cap in (("cispo", "rollout_token", {"epsilon_high": 1.002}), ("sapo", "sequence", {}))
    ),
    pytest.param(
        {"loss_type": "grpo", "entropy_coef": 0.3, "top_entropy_quantile": 0.4, "num_iterations": 2},
        {"aggregation": "sequence", "entropy_coef": 0.3, "top_entropy_quantile": 0.4},
        1,
        marks=SLOW,
        id="entropy",
    ),
    pytest.param(
        {
            "loss_type": "grpo",
            "off_policy_mask_threshold": 0.001,
            "num_iterations": 3,
            "beta": 0.1,
            "use_bias_correction_kl": True,
            "mask_truncated_completions": True,
        },
        {"aggregation": "sequence", "off_policy_mask_threshold": 0.001, "beta": 0.1, "kl_bias_correction": True},
        1,
        marks=SLOW,
        id="masks and corrected KL",
    ),
    pytest.param(
        {"loss_type": "grpo", "multi_objective_aggregation": "normalize_then_sum"},
        {"aggregation": "sequence"},
        1,
        marks=SLOW,
        id="gdpo",
    ),
]


@pytest.mark.parametrize(("theirs", "algorithm", "accumulation"), CASES)
def test_grpo(theirs, algorithm, accumulation, tmp_path):
    theirs = {"temperature": 1.0, "beta": 0.0, **theirs}
    trainer = run_trl("GRPO", tmp_path, ROWS // accumulation, gradient_accumulation_steps=accumulation, **theirs)
    ours = run_ours(trainer, accumulation, algorithm, theirs["temperature"])
    compare(trainer, ours, accumulation, tmp_path)
    check_advantages(trainer, theirs)


@SLOW
@pytest.mark.parametrize("normalize", [False, True])
def test_rloo(normalize, tmp_path):
    trainer = run_trl(
        "RLOO", tmp_path, ROWS, beta=0.0, num_iterations=3, epsilon=0.1, normalize_advantages=normalize,
        reward_clip_range=(0.4, 0.9),
    )  # fmt: skip
    algorithm = {"aggregation": "sequence", "loss": "rloo", "epsilon_low": 0.1, "epsilon_high": 0.1}
    compare(trainer, run_ours(trainer, 1, algorithm), 1, tmp_path)
    for rewards, batch in zip(trainer.generated[::2], trainer.generated[1::2], strict=True):
        scores = np.clip(advantages.combine_rewards(rewards["rewards"].numpy(), [1.0, 0.5]), 0.4, 0.9)
        found = advantages.rloo_advantages(scores, GROUP, normalize=normalize)
        np.testing.assert_allclose(found, batch["advantages"].numpy(), rtol=1e-4, atol=1e-5)


def check_advantages(trainer, theirs):
    """Rewards to advantages, before TRL shuffles the rows of the batch."""
    for rewards, batch in zip(trainer.generated[::2], trainer.generated[1::2], strict=True):
        rewards = rewards["rewards"].numpy()
        assert np.isnan(rewards).any() or len(trainer.generated) > 2
        if theirs.get("multi_objective_aggregation") == "normalize_then_sum":
            found = advantages.gdpo_advantages(rewards, [1.0, 0.5], GROUP)
        else:
            scores = advantages.combine_rewards(rewards, [1.0, 0.5])
            found = advantages.group_advantages(scores, GROUP, theirs.get("scale_rewards", "group"))
        np.testing.assert_allclose(found, batch["advantages"].numpy(), rtol=1e-4, atol=1e-5)
