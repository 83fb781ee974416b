"""The text of docs/migrating.md: an introduction, and a table of keys for each library."""

import textwrap
from importlib.resources import files

from jaxrl_llm.tools.markdown import table
from jaxrl_llm.tools.migrate.table import table as keys_of

SECTIONS = {
    "TRL": "Arguments of the trainers and their configurations, of TRL's scripts, and of `accelerate launch` and `trl "
    "vllm-serve` as TRL's pages show them.",
    "verl": "`ppo_trainer.yaml` (FSDP and Megatron; `optim.*` stands for the optimizer's section), `sft_trainer.yaml`, "
    "`sft_trainer_engine.yaml` and `evaluation.yaml`. A name that ends in `*` is every key below it.",
    "axolotl": "Its RLHF keys and the usual ones beside them; `trl.*` and `vllm.*` are the keys of those sections. It "
    "trains with TRL, so what is said there holds too.",
    "OpenRLHF": "Flags of 0.11: those that begin with `actor.` are of `train_ppo_ray`, and of other commands without "
    "it or with `model.`. Flags without a dot are those up to 0.9.",
    "LLaMA-Factory": "Its own keys; those of transformers beside them are as in TRL.",
    "ms-swift": "Flags of `swift sft`, `swift pt` and `swift rlhf`; those of transformers and TRL are as in TRL.",
    "NeMo-RL": "Keys of the YAML in its examples/configs, with what their parents say (`defaults: PARENT.yaml`), and "
    "overrides of `uv run examples/run_grpo.py --config FILE a.b=c`.",
    "prime-rl": "Keys of the TOML of `rl` and `sft`, and of the flags behind `uv run rl @ FILE.toml`. Those of `model` "
    "and `optim` are of `sft`, and with `trainer.` of `rl`. A name that ends in `*` is every key below it.",
    "SkyRL": "Overrides of `python -m skyrl.train.entrypoints.main_base key=value` and of the scripts in its examples. "
    "A name that ends in `*` is every key below it.",
    "Tunix": "Keys of the YAML and the overrides of `tunix.cli`, and `dpo_config` for `DPOTrainingConfig`; scripts "
    "have them as arguments of `GRPOConfig`, `RLTrainingConfig`, `RolloutConfig` and optax's functions.",
    "Harmony": "The arguments of its training classes, and what recipes call besides.",
}


def page() -> str:
    """Return the page: the introduction, and for each library the keys that have one of ours, then the others."""
    sections = [files("jaxrl_llm.tools.migrate").joinpath("keys", "opening.md").read_text(encoding="utf-8")]
    for title, text in SECTIONS.items():
        rows = []
        for entry in sorted(keys_of(title.lower().replace("llama-", "llama")), key=lambda entry: not entry.ours):
            theirs, ours = (", ".join(f"`{key}`" for key in keys) for keys in (entry.keys, entry.ours.split()))
            rows.append((theirs, ours or "none", entry.note))
        sections.append(f"## {title}\n\n{textwrap.fill(text, 120)}\n\n{table(('there', 'here', 'what differs'), rows)}")
    return "\n".join([*sections, "This page is written by `python -m jaxrl_llm migrate --tables`.", ""])
