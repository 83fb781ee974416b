"""The rules for LLaMA-Factory, which trains with transformers: its YAML becomes TRL's keys with its own defaults."""

import json
import math
import re
from pathlib import Path
from typing import Any

from jaxrl_llm.tools.migrate import shared, trl
from jaxrl_llm.tools.migrate.draft import Draft, Options, RefusedError, Source
from jaxrl_llm.tools.migrate.losses import with_options
from jaxrl_llm.tools.migrate.table import defaults, rules
from jaxrl_llm.tools.migrate.trees import file_named

RULES = rules("llamafactory")
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
TAGS = {
    "role": "from", "content": "value", "user": "human", "assistant": "gpt", "system": "system",
    "observation": "observation", "function": "function_call",
}  # fmt: skip
OPENAI = {"role": "role", "content": "content"} | {
    role: role for role in ("user", "assistant", "system", "observation", "function")
}
# What changes what is learned and has no equivalent, while it is on.
ABSENT = (
    "use_badam", "use_apollo", "use_adam_mini", "use_llama_pro", "mixture_of_depths", "shift_attn", "use_asft_loss",
    "pref_bco_weight", "tokenized_path", "tool_format", "freeze_language_model",
)  # fmt: skip


def convert(source: Source, options: Options) -> Draft:
    """Return our settings for a YAML of LLaMA-Factory."""
    yaml = source.settings
    stage, stages = str(yaml.get("stage", "sft")), RULES["stages"]
    if stage not in stages:
        raise RefusedError(f"{source.path}: stage is {stage!r}, which has no equivalent; there are {', '.join(stages)}")
    if yaml.get("do_train") is False or "export_dir" in yaml or not yaml.keys() & {"stage", "dataset"}:
        raise RefusedError(
            f"{source.path} trains nothing: python -m jaxrl_llm export merges the adapters of a run, "
            "jaxrl_llm.save_hf(jaxrl_llm.load_model('ADAPTER'), 'FOLDER') those of a folder, and chat and serve sample"
        )
    trainer = stages[stage]
    theirs = {**defaults("trl", "ppo" if stage == "ppo" else trainer), **RULES["defaults"]}
    theirs |= RULES["ppo"] if stage == "ppo" else {}
    title = f"{stage}, from FILE of LLaMA-Factory; what that leaves out is as in LLaMA-Factory."
    draft = Draft(source, title, theirs, _translated(yaml, stage))
    sources = _sources(draft, yaml, stage)
    rows, size = shared.all_rows(options, sources), float(yaml.get("val_size") or 0)  # which holds out some of them
    held = math.ceil(rows * size if size < 1 else size)
    devices = options.devices or int(yaml.get("ray_num_workers") or 0)
    trl.apply(draft, trainer, options._replace(rows=max(rows - held, 0), devices=devices))
    draft.set_direct("llamafactory")
    draft.drop("data.path", "data.split", "data.eval_split")
    _data(draft, yaml, sources, rows)
    if trainer == "dpo":
        _preference(draft, yaml)
    if stage == "ppo":
        _proximal(draft, yaml)
    _trained(draft, yaml)
    if yaml.get("fp8"):
        shared.fp8_matmuls(draft, "fp8")
    draft.use("stage", "do_train", "finetuning_type", "fp8", "ray_num_workers")
    shared.check_off(draft, yaml, ABSENT)
    return draft


def _translated(yaml: dict[str, Any], stage: str) -> dict[str, tuple[str, Any]]:
    """Return TRL's key -> (LLaMA-Factory's key, value)."""
    named = RULES["names"] | (RULES["ppo_names"] if stage == "ppo" else {})
    theirs = {named.get(key, key): (key, value) for key, value in yaml.items()}
    if yaml.get("reward_model_type") == "api":
        theirs.pop("reward_model", None)
    theirs.pop("dataset", None)
    theirs["dataset_name"] = ("dataset", "DATA")
    theirs.setdefault(
        "gradient_checkpointing", ("disable_gradient_checkpointing", not yaml.get("disable_gradient_checkpointing"))
    )
    # Its trainers shuffle whatever the stage, also where TRL's do not.
    order = "sequential" if yaml.get("disable_shuffling") else "random"
    theirs["train_sampling_strategy"] = ("disable_shuffling", order)
    theirs["completion_only_loss"] = ("train_on_prompt", not (yaml.get("train_on_prompt") or stage == "pt"))
    packs = yaml.get("packing", stage == "pt") or yaml.get("neat_packing")
    if stage in ("pt", "sft"):
        theirs["packing"] = ("neat_packing" if yaml.get("neat_packing") else "packing", bool(packs))
    if yaml.get("finetuning_type", "lora") == "lora":
        rank, targets = int(yaml.get("lora_rank") or 8), str(yaml.get("lora_target") or "all")
        theirs["use_peft"] = ("finetuning_type", True)
        theirs["lora_r"] = ("lora_rank", rank)
        theirs["lora_alpha"] = ("lora_alpha", yaml.get("lora_alpha") or 2 * rank)
        names = "all-linear" if targets == "all" else [name.strip() for name in targets.split(",")]
        theirs["lora_target_modules"] = ("lora_target", names)
        if yaml.get("pissa_init"):
            theirs["init_lora_weights"] = ("pissa_init", f"pissa_niter_{yaml.get('pissa_iter', 16)}")
    if extra := yaml.get("additional_target"):
        theirs["lora_modules_to_save"] = ("additional_target", [name.strip() for name in str(extra).split(",")])
    if bits := yaml.get("quantization_bit"):
        theirs["load_in_8bit" if int(bits) == 8 else "load_in_4bit"] = ("quantization_bit", True)
        theirs["bnb_4bit_quant_type"] = ("quantization_type", yaml.get("quantization_type", "nf4"))
    if yaml.get("pure_bf16"):
        theirs["dtype"] = ("pure_bf16", "bfloat16")
    if yaml.get("use_muon"):
        theirs["optim"] = ("use_muon", "muon")
    elif yaml.get("use_galore"):
        given = {"rank": yaml.get("galore_rank", 16), "update_proj_gap": yaml.get("galore_update_interval", 200)}
        theirs["optim"] = ("use_galore", "galore_adamw")
        theirs["optim_args"] = ("galore_rank", given | {"scale": yaml.get("galore_scale", 2.0)})
    if yaml.get("use_dft_loss"):
        theirs["loss_type"] = ("use_dft_loss", "dft")
    if yaml.get("use_swanlab"):
        given = yaml.get("report_to")
        theirs["report_to"] = ("use_swanlab", [*([given] if isinstance(given, str) else given or []), "swanlab"])
    return theirs


def _sources(draft: Draft, yaml: dict[str, Any], stage: str) -> list[dict[str, Any]]:
    """Return the sources, each with a function that reads its rows as its entry of dataset_info.json says."""
    names = [name.strip() for name in str(yaml.get("dataset") or "").split(",") if name.strip()]
    folder = Path(str(yaml.get("dataset_dir") or "data"))
    found = file_named(folder / "dataset_info.json", draft.source.path)
    info = json.loads(found.read_text(encoding="utf-8")) if found else {}
    folder = found.parent if found else folder
    sources, most = [], yaml.get("max_samples")
    for name in names:
        entry = info.get(name)
        if entry is None:
            where = f"{folder}/dataset_info.json" + ("" if found else ", which is not here")
            draft.check(f"dataset {name} is an entry of {where}: set its path and format in data.sources")
            sources.append({"path": name, "split": "train"})
            continue
        split, count = str(entry.get("split", "train")), entry.get("num_samples") or most
        split = f"{split}[:{int(count)}]" if count else split
        path = entry.get("hf_hub_url") or str(folder / str(entry.get("file_name") or entry.get("script_url")))
        one = {"path": path, "split": split, "format": _format(draft, name, entry, stage)}
        sources.append(one | ({"name": entry["subset"]} if entry.get("subset") else {}))
        if {"videos", "audios"} & set(entry.get("columns", {})):
            draft.check(f"dataset {name} has videos or sound, which no model reads here")
    return sources


def _data(draft: Draft, yaml: dict[str, Any], sources: list[dict[str, Any]], rows: int) -> None:
    """Set the sources and how they are read; `rows` are those of all, 0 where they are not known."""
    draft.set("data.sources", tuple(sources) or None, "dataset", "dataset_dir", "max_samples")
    if not sources:
        draft.set("data.path", "DATA")
        draft.check("the file names no dataset: set data.path")
    draft.use("dataset_dir", "max_samples")
    if template := yaml.get("template"):
        draft.use("template")
        draft.check(
            f"template = {template}: the tokenizer's own template is used here; see that it is this one (python -m "
            "jaxrl_llm preview --config=... shows the rows), or name one in data.chat_template"
        )
    if yaml.get("mask_history"):
        draft.set("data.loss_on", "last_turn", "mask_history")
    draft.set("data.system_prompt", yaml.get("default_system"), "default_system")
    if share := float(yaml.get("val_size") or 0):
        shared.hold_out(draft, share, "val_size", sources, rows)
    elif other := yaml.get("eval_dataset"):
        draft.set("eval.every", -1, "eval_dataset")
        draft.check(
            f"eval_dataset = {other}: set eval.sets or data.eval_path to its rows, with their format, and eval.every"
        )
    else:
        draft.set("eval.every", -1)


def _format(draft: Draft, name: str, entry: dict[str, Any], stage: str) -> str:
    """Write the function that reads the rows of a data set, and return its name."""
    function = re.sub(r"^(?=\d)", "rows_", re.sub(r"\W", "_", name))
    said, tags = entry.get("columns", {}), entry.get("tags", {})
    columns = {key: said.get(key) for key in (*COLUMNS, "history", "system")} if said else COLUMNS
    chat = entry.get("formatting", "alpaca") != "alpaca"
    tags = {
        key: tags.get(f"{key}_tag", OPENAI[key] if entry.get("formatting") == "openai" else tag)
        for key, tag in TAGS.items()
    }
    system, history, messages = columns.get("system"), columns.get("history"), columns.get("messages") or "messages"

    def answer(column: Any) -> str:
        """Return the expression of a column with one turn of the assistant."""
        inner = f"[{tags['content']!r}]" if chat else ""
        text = f"row[{column!r}]{inner}"
        return f'[{{"role": "assistant", "content": {text}}}]'

    lines = ["messages = []"]
    if system:
        lines += [f"if row.get({system!r}):", f'    messages.append({{"role": "system", "content": row[{system!r}]}})']
    if stage == "pt":
        lines = [f'return {{"text": row[{columns["prompt"]!r}]}}']
    elif chat:
        roles = {tags[key]: key for key in ("user", "assistant", "system")} | {tags["observation"]: "tool"}
        if said.get("tools"):
            lines += [
                f"for one in row[{messages!r}]:",
                f"    role, content = one[{tags['role']!r}], one[{tags['content']!r}]",
                f"    if role == {tags['function']!r}:",
                "        calls = json.loads(content)",
                "        calls = calls if isinstance(calls, list) else [calls]",
                '        calls = [{"type": "function", "function": call} for call in calls]',
                '        messages.append({"role": "assistant", "content": "", "tool_calls": calls})',
                "    else:",
                '        messages.append({"role": roles[role], "content": content})',
            ]
            lines = ["import json", f"roles = {roles!r}", *lines]
        else:
            one = f'{{"role": roles[one[{tags["role"]!r}]], "content": one[{tags["content"]!r}]}}'
            lines = [f"roles = {roles!r}", *lines, f"messages += [{one} for one in row[{messages!r}]]"]
    else:
        if history:
            lines += [
                f"for asked, answered in row.get({history!r}) or ():",
                '    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]',
            ]
        keys = tuple(filter(None, (columns["prompt"], columns["query"])))
        lines.append(f'query = "\\n".join(row[key] for key in {keys!r} if row.get(key))')
        lines.append('messages.append({"role": "user", "content": query})')
    if stage in ("dpo", "rm"):
        made = {"prompt": "messages"} | {one: answer(said.get(one, one)) for one in ("chosen", "rejected")}
    elif stage == "sft" and chat:
        made = {"messages": "messages"}
    elif stage == "sft" and history:  # whose answers are learned too
        made = {"messages": f"messages + {answer(columns['response'])}"}
    elif stage == "ppo":
        made = {"prompt": "messages[:-1]" if chat else "messages"}
    else:
        prompt, completion = ("messages[:-1]", "messages[-1:]") if chat else ("messages", answer(columns["response"]))
        made = {"prompt": prompt, "completion": completion}
        made |= {"label": f"row[{said.get('kto_tag', 'kto_tag')!r}]"} if stage == "kto" else {}
    if chat and said.get("tools"):
        lines += [
            f"tools = json.loads(row[{said['tools']!r}] or '[]')",
            'tools = [one if "function" in one else {"type": "function", "function": one} for one in tools]',
        ]
        made["tools"] = "tools"
    if (images := said.get("images", "images")) != "images":
        made["images"] = f"row[{images!r}]"
    if stage != "pt":
        lines.append("return {" + ", ".join(f'"{key}": {value}' for key, value in made.items()) + "}")
    body = "".join(f"    {line}\n" for line in lines)
    return draft.function(function, f'def {function}(row):\n    """Return a row as LLaMA-Factory makes it."""\n{body}')


def _preference(draft: Draft, yaml: dict[str, Any]) -> None:
    """Set the loss of pairs, and the likelihood beside it."""
    losses, kind = RULES["losses"], str(yaml.get("pref_loss", "sigmoid"))
    shared.check_known("pref_loss", kind, losses)
    name, smoothing = losses[kind], float(yaml.get("dpo_label_smoothing") or 0.0)
    if kind == "sigmoid" and smoothing:
        name = with_options("dpo", {"label_smoothing": smoothing})
    elif kind == "simpo":
        name = with_options("simpo", {"gamma": float(yaml.get("simpo_gamma", 0.5)), "nll_weight": 0.0})
    likely = float(yaml.get("pref_ftx") or 0.0)
    draft.set("algorithm.loss", f"{name}+sft" if likely else name, "pref_loss", "dpo_label_smoothing", "simpo_gamma")
    if likely:
        draft.set("algorithm.loss_weights", (1.0, likely), "pref_ftx")
    if likely or kind == "orpo":
        draft.check("the likelihood beside the loss of pairs is a mean over tokens here, and over completions there")
    draft.use("pref_ftx", "dpo_label_smoothing", "simpo_gamma")


def _proximal(draft: Draft, yaml: dict[str, Any]) -> None:
    """Set how long prompts are read, and note what the rewards have here."""
    draft.set("data.overlong", "truncate_right", "cutoff_len")
    model, kind = yaml.get("reward_model"), yaml.get("reward_model_type", "lora")
    if kind == "api":
        draft.check(f"reward_model = {model} is a server: a reward function of your own asks a server here")
    elif model:
        draft.check(
            f"reward_model = {model} (reward_model_type {kind}): LLaMA-Factory keeps the head of a reward model in "
            "value_head.safetensors, which is not read here. Name one of transformers (ForSequenceClassification), "
            "such as the hf/ of its stage rm, trained here"
        )
    if yaml.get("ppo_score_norm"):
        draft.check("ppo_score_norm has no equivalent: rewards are not divided by a running deviation")
    draft.use("reward_model", "reward_model_type", "ppo_score_norm")


def _trained(draft: Draft, yaml: dict[str, Any]) -> None:
    """Set what is trained of the model other than TRL's keys say."""
    kind = yaml.get("finetuning_type", "lora")
    shared.check_known("finetuning_type", kind, ("lora", "full", "freeze"))
    if kind == "freeze":
        draft.check(
            "finetuning_type = freeze: name the parameters that are trained in model.trainable (docs/models.md)"
        )
    if path := yaml.get("adapter_name_or_path"):
        draft.set("lora.path", str(path).split(",")[0], "adapter_name_or_path")
        draft.drop("lora.rank", "lora.alpha", "lora.targets", "lora.rslora", "lora.dora")
    if ratio := yaml.get("loraplus_lr_ratio"):
        draft.set("optimizer.rate_factors", (f"lora_B={float(ratio):g}",), "loraplus_lr_ratio")
    if yaml.get("use_eaft_loss"):
        options = {"alpha": float(yaml.get("eaft_alpha") or 1.0)} if yaml.get("eaft_alpha") else {}
        draft.set("algorithm.loss", with_options("eaft", options), "use_eaft_loss", "eaft_alpha")
    if yaml.get("train_from_scratch"):
        draft.set("model.random_init", True, "train_from_scratch")
    if yaml.get("enable_thinking") is not None:
        draft.set("data.chat_template_kwargs", f"enable_thinking={bool(yaml['enable_thinking'])}", "enable_thinking")
    if yaml.get("packing") and not yaml.get("neat_packing") and yaml.get("stage", "sft") == "sft":
        draft.check("packing: packed rows attend to each other there unless neat_packing is on; here they never do")
