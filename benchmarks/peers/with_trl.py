"""One task in TRL: generation of transformers, the GRPO, DPO and SFT trainers; a frozen model alone is recomputed."""

import os
import sys
import tempfile
import time
import warnings

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList, TrainerCallback

from benchmarks import task
from benchmarks.cases import BETA, is_geometric, lengths, pairs, prompts, reward, texts, useful_tokens, words
from benchmarks.meter import Meter, report
from benchmarks.task import Task

DEVICE, HALF = task.device(), task.dtype() == "bfloat16"
STEPS = 100  # at most; the meter ends a run


class Stops(StoppingCriteria):
    """Ends each row at its own length."""

    def __init__(self, stops: np.ndarray, prompt: int):
        self.stops, self.prompt = torch.tensor(stops, device=DEVICE), prompt

    def __call__(self, input_ids, scores, **_):
        return (input_ids.shape[1] - self.prompt) >= self.stops


class Timed(TrainerCallback):
    """Makes an interval of each training step, and stops when there are enough."""

    def __init__(self, meter: Meter, phases: dict[str, float]):
        self.meter, self.phases = meter, phases

    def on_step_begin(self, args, state, control, **_):
        self.phases.clear()
        self.meter.start()

    def on_step_end(self, args, state, control, **_):
        self.meter.stop(**self.phases)
        control.should_training_stop = self.meter.enough()
        return control


def device_peak_gb() -> float:
    """The most GB of the accelerator's memory that tensors took so far."""
    return torch.cuda.max_memory_allocated() / 2**30


def adapters(job: Task) -> dict:
    """The trainers' argument that trains adapters in place of the model, where the shape says so."""
    if not job.shape.lora:
        return {}
    from peft import LoraConfig

    rank = job.shape.lora
    return {"peft_config": LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")}


def load(job: Task):
    """The model that never ends a row by itself."""
    model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.bfloat16 if HALF else torch.float32)
    model.generation_config.eos_token_id = None
    return model.to(DEVICE)


def rollout(job: Task, meter: Meter) -> None:
    """Completions of one batch of prompts by `generate`."""
    shape, model = job.shape, load(job).eval()
    ids = torch.tensor(np.repeat(prompts(shape), shape.group, axis=0)).to(DEVICE)
    stops = lengths(shape) if is_geometric(job.case) else np.full(shape.completions, shape.new)
    kept = StoppingCriteriaList([Stops(stops, shape.prompt)]) if is_geometric(job.case) else None

    @torch.no_grad()
    def sample() -> dict[str, float]:
        found = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=int(stops.max()), pad_token_id=0, eos_token_id=None, stopping_criteria=kept,
        )  # fmt: skip
        steps = found.shape[1] - shape.prompt
        assert steps == stops.max(), f"{steps} tokens were sampled"
        return {"useful": useful_tokens(job.case, shape) / (shape.completions * steps)}

    meter.measure(sample)


def settings(job: Task, rows: int, **more) -> dict:
    """Arguments of every trainer: one batch of `rows`, no files, and recomputation behind adapters alone."""
    return {
        "output_dir": tempfile.mkdtemp(), "max_steps": STEPS, "learning_rate": 1e-6, "logging_steps": STEPS,
        "save_strategy": "no", "report_to": "none", "use_cpu": DEVICE == "cpu", "bf16": HALF,
        "gradient_checkpointing": bool(job.shape.lora), "disable_tqdm": True, "dataloader_pin_memory": False,
        "per_device_train_batch_size": rows, **more,
    }  # fmt: skip


def grpo(job: Task, meter: Meter) -> None:
    """GRPO steps; the time in `generate` is kept as a phase."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    shape, phases, model = job.shape, {}, load(job)
    generate = model.generate
    stops = StoppingCriteriaList([Stops(lengths(shape), shape.prompt)]) if is_geometric(job.case) else None

    def timed(*arguments, **options):
        began = time.perf_counter()
        if options.get("generation_config") is not None:
            options["generation_config"].eos_token_id = None
        found = generate(*arguments, **options, **({} if stops is None else {"stopping_criteria": stops}))
        phases["time/rollout"] = phases.get("time/rollout", 0.0) + time.perf_counter() - began
        return found

    def odd_share(completion_ids, **_) -> list[float]:
        return [reward(ids) for ids in completion_ids]

    model.generate = timed
    rows = [{"prompt": words(row)} for row in prompts(shape)]
    longest = int(lengths(shape).max()) if stops is not None else shape.new
    more = {"num_generations": shape.group, "max_completion_length": longest, "temperature": 1.0, "num_iterations": 1}
    trainer = GRPOTrainer(
        model=model, reward_funcs=odd_share, train_dataset=Dataset.from_list(rows * 20),
        processing_class=AutoTokenizer.from_pretrained(job.folder), callbacks=[Timed(meter, phases)],
        args=GRPOConfig(**settings(job, shape.completions, beta=BETA[job.case], **more)), **adapters(job),
    )  # fmt: skip
    if stops is None:
        trainer.eos_token_ids = []  # no sampled token is taken for an end
    trainer.train()


def offline(job: Task, meter: Meter) -> None:
    """DPO or SFT steps."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    shape = job.shape
    common = {"processing_class": AutoTokenizer.from_pretrained(job.folder), "callbacks": [Timed(meter, {})]}
    common |= adapters(job)
    if job.case == "dpo":
        data = [
            {"prompt": words(prompt), "chosen": words(chosen[:-1]), "rejected": words(rejected[:-1])}
            for prompt, chosen, rejected in zip(*pairs(shape), strict=True)
        ]
        given = settings(job, shape.pairs, beta=0.1, max_length=shape.row)
        data = Dataset.from_list(data * 20)
        reference = None if job.shape.lora else load(job)
        DPOTrainer(model=load(job), ref_model=reference, train_dataset=data, args=DPOConfig(**given), **common).train()
        return
    data = Dataset.from_list([{"text": words(row)} for row in texts(shape.rows, shape.row - 1)] * 20)
    given = settings(job, shape.rows, max_length=shape.row)
    SFTTrainer(model=load(job), train_dataset=data, args=SFTConfig(**given), **common).train()


def main(argv: list[str]) -> None:
    """The command line: one task."""
    job = task.read(argv)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    meter = Meter(least=job.least, peak=None if DEVICE == "cpu" else device_peak_gb)
    if job.case.startswith("rollout"):
        rollout(job, meter)
    elif job.case in ("dpo", "sft"):
        offline(job, meter)
    else:
        grpo(job, meter)
    report(meter.summary())


if __name__ == "__main__":
    main(sys.argv[1:])
