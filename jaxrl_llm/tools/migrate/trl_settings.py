"""What the trainers of TRL have in common: the model and its adapters, the data, sampling, the reference."""

import json
import re

from jaxrl_llm.config.entries import LORA_INIT, lora_init, makes_up
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.diagnose import READERS
from jaxrl_llm.tools.migrate import shared
from jaxrl_llm.tools.migrate.draft import OURS, Draft, short
from jaxrl_llm.tools.migrate.table import rules

NAMES = rules("trl")["names"]
ROWS = ("per_device_train_batch_size", "gradient_accumulation_steps")
SAME = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "bad_words", "stop", "stop_token_ids", "ignore_eos",
)  # fmt: skip
# Entries of generation_kwargs whose value is that of a key of ours.
GENERATION = {name: f"rollout.{name}" for name in SAME} | {
    "stop_strings": "rollout.stop",
    "min_tokens": "rollout.min_completion_length",
    "min_new_tokens": "rollout.min_completion_length",
    "max_tokens": "rollout.max_completion_length",
    "max_new_tokens": "rollout.max_completion_length",
    "structured_outputs.regex": "rollout.structured_regex",
    "structured_outputs.choice": "rollout.structured_choice",
    "structured_outputs.json": "rollout.structured_json",
    "structured_outputs.grammar": "rollout.structured_grammar",
}


def batch(draft: Draft, devices: int, each: int = 1) -> None:
    """Set the rows of the data in a batch, one update, and the rows of a micro-batch, `each` for a row of the data."""
    per_device, accumulation = (int(draft.get(key)) for key in ROWS)
    draft.set("batch.prompts", per_device * devices * accumulation, *ROWS)
    at_once = per_device * devices * each
    shared.microbatch_rows(draft, at_once, at_once * accumulation, *ROWS)


def generation(draft: Draft) -> None:
    """Set how completions are sampled, from a dictionary under the names of transformers and of vLLM."""
    values = draft.get(key := "generation_kwargs")
    entries = dict(values) if isinstance(values, dict) else {}
    if not entries:
        draft.check(f"{key} = {short(values)} is no dictionary that the file spells out: set rollout.* as it says")
    for name in ("guided_decoding", "structured_outputs"):
        nested = entries.pop(name, None)
        if isinstance(nested, dict):
            entries |= {f"structured_outputs.{kind}": value for kind, value in nested.items()}
    for name, value in entries.items():
        ours = GENERATION.get(name)
        if name == "do_sample":
            draft.set("rollout.temperature", None if value else 0.0, key)
        elif name == "logit_bias":
            draft.set("rollout.logit_bias", tuple(f"{token}={bias}" for token, bias in value.items()), key)
        elif ours is None:
            draft.check(f"{key}: {name} = {short(value)} has no equivalent")
        elif OURS[ours].many:
            draft.set(ours, tuple(value) if isinstance(value, list | tuple) else (value,), key)
        elif ours == "rollout.structured_json":
            draft.set(ours, value if isinstance(value, str) else json.dumps(value), key)
        else:
            draft.set(ours, max(value, 0) if name == "top_k" else value, key)


def model(draft: Draft) -> None:
    """Set parameter types, adapters, quantisation and sharding."""
    dtype = shared.init_kwargs(draft, "model_init_kwargs", "model.revision")
    dtype = dtype or draft.get("torch_dtype" if draft.sets("torch_dtype") else "dtype")
    name = shared.type_name(dtype)
    if name not in shared.TYPES.values():
        name = "float32"
        if dtype:
            draft.check(f"the model's dtype is {dtype!r}; its parameters are float32 here (model.param_dtype)")
    keys = [key for key in ("model_init_kwargs", "torch_dtype", "dtype") if draft.sets(key)]
    draft.set("model.param_dtype", name, *keys)
    if draft.get("fp16"):
        draft.set("model.dtype", "bfloat16", "fp16")
        draft.check("fp16: bfloat16 is written; gradients in float16 need loss scaling, which is not here")
    elif draft.get("bf16") is not None:
        draft.set("model.dtype", "bfloat16" if draft.get("bf16") else "float32", "bf16")
    draft.use("bf16", "fp16")
    if draft.get("activation_offloading"):
        draft.set("model.remat", "offload", "activation_offloading")
    shared.check_model(draft)
    draft.use("processing_class")
    if (tokenizer := draft.get("processing_class")) != draft.values["model.path"]:
        draft.set("model.tokenizer", tokenizer, "processing_class")
    peft = draft.sets("r") or draft.get("peft_config")
    if peft or draft.get("use_peft"):
        rank, alpha, dropout = (8, 8, 0.0) if peft else (16, 32, 0.05)
        draft.set("lora.rank", draft.first("r", "lora_r", default=rank), "r", "lora_r", "use_peft", "peft_config")
        draft.set("lora.alpha", draft.first("lora_alpha", default=alpha), "lora_alpha")
        draft.set("lora.dropout", draft.first("lora_dropout", default=dropout), "lora_dropout")
        draft.take("lora.rslora", "use_rslora")
        dora, quantized = bool(draft.get("use_dora")), draft.get("load_in_4bit") or draft.get("load_in_8bit")
        draft.set("lora.dora", dora and not quantized, "use_dora")
        if dora and quantized:
            draft.check("use_dora is left out: adapters on quantised matrices are plain LoRA here (lora.dora)")
        start = lora_init(draft.first("init_lora_weights", default=True))
        if LORA_INIT.fullmatch(start):
            draft.set("lora.init", start, "init_lora_weights")
        else:
            draft.check(
                f"{draft.named('init_lora_weights')} = {start!r} has no equivalent; lora.init is kaiming, as by default"
            )
            draft.use("init_lora_weights")
        targets = draft.first("target_modules", "lora_target_modules")
        parameters = draft.first("target_parameters", "lora_target_parameters") or ()
        if targets is None and draft.sets("finetune_attention_modules"):
            targets = _chosen_by_unsloth(draft)
        if targets is None:
            targets, written = ("q_proj", "v_proj"), "q_proj and v_proj, which most have, are"
            if parameters:
                targets, written = (), "none, as for most mixtures of experts, is"
            draft.check(f"PEFT chooses the target modules by architecture; {written} written")
        targets, parameters = ((x,) if isinstance(x, str) else tuple(x) for x in (targets, parameters))
        targets = tuple(name for target in (*targets, *parameters) for name in re.split(r"[,\s]+", target) if name)
        targets = tuple(re.sub(r"^[a-z_]+\.(?=experts\.)", "", name) for name in targets)
        keys = [f"{prefix}target_{kind}" for prefix in ("", "lora_") for kind in ("modules", "parameters")]
        modules = draft.first("modules_to_save", "lora_modules_to_save") or ()
        modules = (modules,) if isinstance(modules, str) else tuple(modules)
        if draft.get("peft_config") == "get_peft_model":  # Unsloth's, which trains these whole
            modules += tuple(name for name in targets if name in shared.EMBEDDINGS.split("|") and name not in modules)
            targets = tuple(name for name in targets if name not in modules)
        draft.set("lora.targets", targets, *keys)
        draft.set("lora.modules_to_save", modules or None, "modules_to_save", "lora_modules_to_save", *keys[:1])
        _modules(draft)
        draft.set("model.vision", "lora" if draft.get("finetune_vision_layers") else None, "finetune_vision_layers")
        if draft.get("finetune_language_layers") is False:
            draft.check("finetune_language_layers = False: adapters are on the decoder here too (lora.exclude_modules)")
        draft.use("finetune_language_layers")
    if rate := draft.get("embedding_learning_rate"):
        factor = float(rate) / float(draft.get("learning_rate"))
        draft.set("optimizer.rate_factors", (f"{shared.EMBEDDINGS}={factor:g}",), "embedding_learning_rate")
    sharded = [key for key in ("fsdp", "fsdp_config", "deepspeed") if draft.get(key)]
    launched = ("accelerate_config", "config_file")  # names of TRL's, and files that are mostly named so
    sharded += [key for key in launched if re.search(r"zero_?[123]|fsdp", str(draft.get(key)))]
    if sharded:
        draft.set("mesh.fsdp", -1, *sharded)
        draft.set("mesh.data", 1, *sharded)
    if draft.get("load_in_4bit"):
        kind = draft.first("bnb_4bit_quant_type", default="nf4")
        shared.check_known(draft.named("bnb_4bit_quant_type"), kind, ("nf4", "fp4"))
        draft.set("model.quantize", "nf4" if kind == "nf4" else "int4", "load_in_4bit", "bnb_4bit_quant_type")
        if kind == "fp4":
            draft.check(
                "bnb_4bit_quant_type is fp4, as of a BitsAndBytesConfig by default: its levels are not here, and "
                "model.quantize = 'int4' is written; 'nf4' loses less, and is the type of QLoRA"
            )
    elif draft.get("load_in_8bit"):
        draft.set("model.quantize", "int8", "load_in_8bit")
    if makes_up(draft.values.get("lora.init", "")):  # PEFT quantises by itself, to numbers of four bits
        if "model.quantize" not in draft.values:
            draft.set("model.quantize", "nf4", "init_lora_weights")
        draft.check(
            f"{draft.named('init_lora_weights')} = 'loftq': the matrices are {draft.values['model.quantize']} "
            "(model.quantize), and adapters start from what they lack; of PEFT's loftq_config one round (loftq_iter)"
        )
    if draft.values.get("model.quantize") and "lora.rank" not in draft.values:
        draft.check("a quantised model is trained by adapters: set lora.rank")


def _chosen_by_unsloth(draft: Draft) -> tuple[str, ...]:
    """Return the targets of adapters that Unsloth chooses by kind where they are not named."""
    kinds = {
        "finetune_attention_modules": ("q_proj", "k_proj", "v_proj", "o_proj"),
        "finetune_mlp_modules": ("gate_proj", "up_proj", "down_proj"),
    }
    draft.use(*kinds)
    chosen = [names for key, names in kinds.items() if draft.first(key, default=True)]
    return ("all-linear",) if len(chosen) == len(kinds) else sum(chosen, ())


def _modules(draft: Draft) -> None:
    """Set what PEFT's configuration says of single layers and modules."""
    layers, excluded = draft.get("layers_to_transform"), draft.get("exclude_modules")
    draft.set("lora.layers_to_transform", (layers,) if isinstance(layers, int) else layers, "layers_to_transform")
    if draft.get("layers_pattern") not in (None, "layers", ["layers"], ["model.layers"]):
        draft.check("layers_pattern is left out: layers are those of the decoder")
    draft.use("layers_pattern")
    if isinstance(excluded, str):
        draft.check(
            f"exclude_modules = {short(excluded)} is a regular expression of whole names: set lora.exclude_modules to "
            "the ends of the names that it means"
        )
    else:
        draft.set("lora.exclude_modules", excluded, "exclude_modules")
    for key in ("rank_pattern", "alpha_pattern"):
        numbers = draft.get(key) or {}
        draft.set(f"lora.{key}", tuple(f"{name}={number}" for name, number in numbers.items()) or None, key)


def data(draft: Draft, trainer: str) -> None:
    """Set the data and what happens to long rows."""
    if draft.get("datasets"):
        _mixture(draft)
    else:
        _dataset(draft)
    sampling = (
        "grpo", "gmpo", "asyncgrpo", "rloo", "distillation", "serverdistillation", "asyncdistillation", "iwopd", "sdpo",
        "sdft",
    )  # fmt: skip
    if trainer in sampling and "rollout.max_completion_length" not in draft.values:
        draft.set("rollout.max_completion_length", 1024, "max_completion_length")
        draft.check("max_completion_length is None, which is no limit; rollout.max_completion_length is 1024 here")
    key = "shuffle_dataset" if trainer in sampling else "train_sampling_strategy"
    draft.set("data.shuffle", draft.get(key) not in (False, "sequential"), key)
    if trainer not in (*sampling, "ppo", "ppo_0.11", "a2po", "onlinedpo"):
        if trainer in ("reward", "prm"):
            draft.set("data.overlong", "filter" if trainer == "reward" else "truncate_right", "max_length")
        else:
            # GKD's rows, GOLD's and packed ones are cut whatever the mode: at their start, and at their end.
            left = draft.get("truncation_mode") == "keep_end" and not draft.values.get("data.packing")
            side = "truncate_left" if left or trainer in ("gkd", "gold") else "truncate_right"
            splits = draft.values.get("data.packing") and draft.get("packing_strategy") in ("bfd_split", "wrapped")
            draft.set("data.overlong", "split" if splits else side, "truncation_mode", "packing_strategy")
        if draft.get("max_length") is None:
            draft.check("max_length is None, which is no limit; data.max_length is 1024 here")
        else:
            draft.take("data.max_length", "max_length")
    elif draft.get("max_prompt_length"):
        draft.take("rollout.max_prompt_length", "max_prompt_length")
        draft.set("data.overlong", "truncate_left", "max_prompt_length")
    elif trainer != "iwopd":
        draft.check(
            "TRL has no limit for prompts; here rollout.max_prompt_length is 512 tokens, and a longer prompt stops the "
            "run (data.overlong)"
        )


def _mixture(draft: Draft) -> None:
    """Set the sources of a mixture, of which the splits, names and streams of a single data set say nothing."""
    draft.drop("data.name", "data.split")
    draft.take("data.streaming", "streaming")
    entries, sources = draft.get("datasets"), []
    if not isinstance(entries, list | tuple):
        raise ConfigError(f"datasets is {short(entries)}, and not a list of entries with a path each")
    for entry in entries:
        given = {key: value for key, value in entry.items() if value is not None} if isinstance(entry, dict) else {}
        source = {key: given.pop(key) for key in ("path", "name", "split", "data_files") if key in given}
        files, share = source.get("data_files"), given.pop("fraction", None)
        split = str(source.get("split", "train"))
        name = split.partition("[")[0]
        fault = None
        if not isinstance(source.get("path"), str):
            fault = "it names no path"
        elif isinstance(files, dict) and name not in files:
            fault = f"its data_files have no split {name}"
        elif share is not None and not (isinstance(share, int | float) and share >= 0):
            fault = f"its fraction is {short(share)}, and not a number from 0 on"
        if fault:
            draft.check(f"datasets: {short(entry)} is left out: {fault}")
            continue
        if share == 0:  # of whose rows none is taken there either
            continue
        if isinstance(files, dict):
            source["data_files"], source["split"] = files[name], f"train{split.removeprefix(name)}"
        if files and source["path"] not in READERS.values():
            draft.check(f"datasets: data_files of {source['path']} are files in it there; here they are paths, or URLs")
        if share is not None and (draft.values["data.streaming"] or not draft.values.get("data.packing")):
            source["weight"] = float(share)
        if share is not None:
            draft.check(
                f"datasets: fraction = {share} of {source['path']}: its first rows make up this share there; here rows "
                "are drawn by weight in these shares from all of them, and with packing each is taken once"
            )
        for key, value in given.items():
            draft.check(f"datasets: {key} = {short(value)} of {source['path']} has no equivalent")
        sources.append(source)
    draft.set("data.sources", tuple(sources) or None, "datasets")
    if not sources:
        draft.set("data.path", "DATA")
        draft.check("datasets has no entry that is trained on: set data.path")


def _dataset(draft: Draft) -> None:
    """Set the data set, and what is evaluated on."""
    path = draft.first("dataset_name", "train_dataset")
    if isinstance(path, str):
        draft.set("data.path", path, "dataset_name", "train_dataset")
    elif isinstance(path, list):
        draft.drop("data.name", "data.split")
        draft.set("data.sources", tuple(path), "train_dataset")
    else:
        draft.set("data.path", "DATA")
        draft.check("the file names no data set: set data.path, or call train(config, train_dataset=...)")
    evaluation = draft.get("eval_dataset")
    if isinstance(evaluation, list):
        draft.set("eval.sets", tuple(evaluation), "eval_dataset")
    if isinstance(evaluation, str) and evaluation != path:
        draft.set("data.eval_path", evaluation, "eval_dataset")
    draft.use("eval_dataset")
    held = draft.get("train_test_split")
    if held is None:
        draft.set("data.eval_split", draft.get("dataset_test_split"), "dataset_test_split", "eval_dataset")
    else:  # no split has the rows that are held out
        draft.use("dataset_test_split")
        draft.set("eval.fraction", held if isinstance(held, float) else None, "train_test_split")


def reference_sync(draft: Draft, updates: int) -> None:
    """Set how the reference follows the policy, which is counted in optimizer updates there and in steps here."""
    if draft.get("sync_ref_model") and draft.get("beta"):
        steps = shared.divided(draft.get("ref_model_sync_steps"), updates)
        draft.set("algorithm.ref_sync_steps", steps, "sync_ref_model", "ref_model_sync_steps")
        draft.set("algorithm.ref_mixup_alpha", draft.get("ref_model_mixup_alpha"), "ref_model_mixup_alpha")
        if draft.values.get("lora.rank"):
            draft.set("lora.reference", "copy")
