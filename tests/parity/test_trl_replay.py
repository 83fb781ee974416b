"""Five optimizer steps of TRL's own trainers, repeated here: same losses, gradient norms and final parameters."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm.config import default
from jaxrl_llm.data import tasks
from jaxrl_llm.models.files.hf import EMBEDDED
from jaxrl_llm.train import train

torch = pytest.importorskip("torch")
trl = pytest.importorskip("trl", minversion="1.16")

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS, ROWS = 5, 4
SETTINGS = {
    "max_steps": STEPS,
    "per_device_train_batch_size": ROWS,
    "train_sampling_strategy": "sequential",
    "learning_rate": 1e-2,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "adam_beta2": 0.99,
    "adam_epsilon": 1e-5,  # large enough that parameters with next to no gradient are not moved by rounding
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random llama that knows the tokens of the embedded model."""
    path = tmp_path_factory.mktemp("llama")
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "sort")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, initializer_range=0.1,
            num_attention_heads=4, num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id,
        ),
        attn_implementation="eager",
    )  # fmt: skip
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def run_trl(trainer_class, arguments, folder, rows, tmp_path, auto=AutoModelForCausalLM, **more):
    """(losses, gradient norms, parameters, logged metrics) of TRL's trainer on the rows, in their order."""
    from datasets import Dataset

    losses = []

    class Recording(trainer_class):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            losses.append(float(loss))
            return loss

    model = auto.from_pretrained(folder, dtype=torch.float32)
    trainer = Recording(
        model=model,
        args=arguments(output_dir=str(tmp_path / "trl"), **SETTINGS, **more),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    norms = [float(entry["grad_norm"]) for entry in logged]
    return losses, norms, {name: x.detach().numpy() for name, x in trainer.model.state_dict().items()}, logged


def run_ours(folder, rows, tmp_path, loss_on="completion", **algorithm):
    config = default()
    config.output_dir, config.model.path, config.total_steps = str(tmp_path / "ours"), str(folder), STEPS
    config.data.shuffle, config.data.loss_on, config.batch.prompts = False, loss_on, ROWS
    config.optimizer.learning_rate, config.optimizer.schedule, config.optimizer.warmup_steps = 1e-2, "linear", 2
    config.optimizer.b2, config.optimizer.eps, config.optimizer.weight_decay = 0.99, 1e-5, 0.1
    config.logging.backends = ()
    for name, value in algorithm.items():
        config.algorithm[name] = value
    result = train(config, train_dataset=rows)
    return result.metrics, load_file(tmp_path / "ours/hf/model.safetensors")


METRICS = (
    "entropy", "mean_token_accuracy", "num_tokens", "kl", "rewards/chosen", "rewards/rejected", "rewards/margins",
    "rewards/accuracies", "logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected", "nll_loss",
    "log_odds_ratio", "log_odds_chosen", "min_reward", "mean_reward", "max_reward", "accuracy", "margin",
)  # fmt: skip


def compare(theirs, ours, without=()):
    """Losses, gradient norms, parameters, and every metric that TRL logs but those in `without`."""
    losses, norms, parameters, logged = theirs
    metrics, tensors = ours
    for name in set(METRICS) & set(logged[0]) - set(without):
        np.testing.assert_allclose(
            [step[name] for step in metrics], [entry[name] for entry in logged], rtol=2e-3, atol=2e-4, err_msg=name
        )
    assert len(losses) == len(norms) == STEPS
    np.testing.assert_allclose([step["loss"] for step in metrics], losses, rtol=1e-4)
    np.testing.assert_allclose([step["grad_norm"] for step in metrics], norms, rtol=1e-4)
    assert max(losses) - min(losses) > 0.01, "nothing was learned, so equality shows nothing"
    assert set(tensors) == set(parameters)
    for name, tensor in tensors.items():
        np.testing.assert_allclose(tensor, parameters[name], rtol=1e-4, atol=1e-5, err_msg=name)


SLOW_SFT = [("all", "nll"), ("completion", "dft")]


@pytest.mark.slow
@pytest.mark.parametrize(("loss_on", "loss"), [("completion", "nll"), *SLOW_SFT])
def test_sft(folder, tmp_path, loss_on, loss):
    rows = [{name: row[name] for name in ("prompt", "completion")} for row in tasks.generate("sort_demos", size=20)]
    settings = {"completion_only_loss": loss_on == "completion", "loss_type": loss}
    theirs = run_trl(trl.SFTTrainer, trl.SFTConfig, folder, rows, tmp_path, **settings)
    compare(theirs, run_ours(folder, rows, tmp_path, loss_on=loss_on, name="sft", loss=loss))


@pytest.mark.slow
@pytest.mark.parametrize(("loss_type", "loss"), [("sigmoid", "dpo"), ("ipo", "ipo")])
def test_dpo(folder, tmp_path, loss_type, loss):
    columns = ("prompt", "chosen", "rejected")
    rows = [{name: row[name] for name in columns} for row in tasks.generate("sort_pairs", size=20)]
    theirs = run_trl(trl.DPOTrainer, trl.DPOConfig, folder, rows, tmp_path, loss_type=[loss_type], beta=0.1)
    compare(theirs, run_ours(folder, rows, tmp_path, name="preference", loss=loss, beta=0.1))


@pytest.mark.slow
def test_kto(folder, tmp_path):
    pairs = tasks.generate("sort_pairs", size=20)
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen" if i % 3 else "rejected"], "label": i % 3 > 0}
        for i, row in enumerate(pairs)
    ]
    weights = {"desirable_weight": 1.0, "undesirable_weight": 1.5}
    theirs = run_trl(trl.KTOTrainer, trl.KTOConfig, folder, rows, tmp_path, beta=0.1, **weights)
    loss = "kto(undesirable_weight=1.5)"
    compare(theirs, run_ours(folder, rows, tmp_path, name="preference", loss=loss, beta=0.1))


@pytest.mark.slow
@pytest.mark.parametrize("center", [0.0, 0.02])
def test_reward_model(folder, tmp_path, center):
    from transformers import AutoModelForSequenceClassification

    start = tmp_path / "start"
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32).save_pretrained(start)
    AutoTokenizer.from_pretrained(folder).save_pretrained(start)
    columns = ("prompt", "chosen", "rejected")
    rows = [{name: row[name] for name in columns} for row in tasks.generate("sort_pairs", size=20)]
    theirs = run_trl(
        trl.RewardTrainer, trl.RewardConfig, start, rows, tmp_path, AutoModelForSequenceClassification,
        center_rewards_coefficient=center or None,
    )  # fmt: skip
    compare(theirs, run_ours(start, rows, tmp_path, name="reward_model", loss=f"bradley_terry(center={center})"))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sigmoid", "simpo", "alphapo"])
def test_cpo(folder, tmp_path, loss):
    cpo = pytest.importorskip("trl.experimental.cpo")
    columns = ("prompt", "chosen", "rejected")
    rows = [{name: row[name] for name in columns} for row in tasks.generate("sort_pairs", size=20)]
    more = {"alpha": 0.3} if loss == "alphapo" else {}
    theirs = run_trl(
        cpo.CPOTrainer, cpo.CPOConfig, folder, rows, tmp_path, loss_type=loss, beta=0.5, cpo_alpha=0.7, simpo_gamma=0.4,
        **more,
    )  # fmt: skip
    own = {
        "sigmoid": "cpo(nll_weight=0.7)",
        "simpo": "simpo(gamma=0.4, nll_weight=0.7)",
        "alphapo": "alphapo(gamma=0.4, alpha=0.3)",  # for which TRL sets cpo_alpha to 0
    }[loss]
    ours = run_ours(folder, rows, tmp_path, name="preference", loss=own, beta=0.5)
    # TRL's logits include prompts and padding, and its nll_loss is 0 where it has no weight.
    compare(theirs, ours, without=("logits/chosen", "logits/rejected", *(("nll_loss",) if loss == "alphapo" else ())))


@pytest.mark.slow
def test_orpo(folder, tmp_path):
    orpo = pytest.importorskip("trl.experimental.orpo")
    columns = ("prompt", "chosen", "rejected")
    rows = [{name: row[name] for name in columns} for row in tasks.generate("sort_pairs", size=20)]
    theirs = run_trl(orpo.ORPOTrainer, orpo.ORPOConfig, folder, rows, tmp_path, beta=0.2)
    ours = run_ours(folder, rows, tmp_path, name="preference", loss="orpo", beta=0.2)
    compare(theirs, ours, without=("logits/chosen", "logits/rejected"))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "ipo", "tpo-l", "without gold"])
def test_tpo(folder, tmp_path, loss):
    tpo = pytest.importorskip("trl.experimental.tpo")
    columns = ("prompt", "chosen", "rejected", "reference")
    rows = [{name: row[name] for name in columns} for row in tasks.generate("sort_triples", size=20)]
    gold, kind = loss != "without gold", "sigmoid" if loss == "without gold" else loss
    theirs = run_trl(
        tpo.TPOTrainer, tpo.TPOConfig, folder, rows, tmp_path, loss_type=kind, beta=0.5, tpo_l_gamma=0.4,
        tpo_alpha=0.7 if gold else 0.0,
    )  # fmt: skip
    own = {
        "sigmoid": "tpo(nll_weight=0.7)",
        "hinge": "hinge+gold_sft(nll_weight=0.7)",
        "ipo": "ipo+gold_sft(nll_weight=0.7)",
        "tpo-l": "tpo_l(gamma=0.4, nll_weight=0.7)",
        "without gold": "cpo(nll_weight=0.0)",
    }[loss]
    free = {"reference_free": True} if loss in ("hinge", "ipo") else {}
    ours = run_ours(folder, rows, tmp_path, name="preference", loss=own, beta=0.5, **free)
    # Of ipo TRL's rewards and log-probs are means over tokens, here sums as for the others.
    sums = [name for name in METRICS if name.startswith(("rewards/", "logps/"))]
    compare(theirs, ours, without=sums if loss == "ipo" else ())
