"""The objects that `train` is given in Python, in place of names in its configuration; those of TRL's users too."""

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import optax

from jaxrl_llm.config import ConfigDict, ConfigError, flat
from jaxrl_llm.config.entries import lora_init
from jaxrl_llm.config.resolve import closest
from jaxrl_llm.config.schema import BY_NAME, SECTIONS, SYNONYMS, nearest
from jaxrl_llm.data.splits import is_splits, is_stream
from jaxrl_llm.models.adapters.lora import has_adapters
from jaxrl_llm.models.model import Model, load_model
from jaxrl_llm.rewards.signatures import reward_name

# TRL's names of arguments, and their names here.
ALIASES = {"reward_funcs": "rewards", "processing_class": "tokenizer", "environment_factory": "environment"}
# Arguments of TRL's trainers that have no counterpart among those of `train`, and what takes their place.
ELSEWHERE = {
    "args": "settings are the first argument, a ConfigDict; `python -m jaxrl_llm migrate SCRIPT` makes one of a script",
    "ref_model": "the reference is the model as it starts, kept where algorithm.beta is above 0",
    "reward_model": "give it in rewards: a model, or the name model:FOLDER",
    "reward_processing_classes": "a reward model has the tokenizer of its folder, or model:PATH(tokenizer='OTHER')",
    "value_model": "name it with critic.path",
    "teacher_model": "name it with teacher.path",
    "compute_loss_func": "a loss of your own is algorithm.loss, path/to/file.py:function",
    "data_collator": "rows are batched by the library; data.format takes a function of a row",
    "formatting_func": "give the rows that it makes, train_dataset=[{'text': function(row)} for row in rows]; in a "
    "configuration data.format names a function of a row, path/to/file.py:function",
    "dataset_text_field": "the column text is read as it is; data.format=\"completion(field='COLUMN')\" names another",
    "preprocess_logits_for_metrics": "compute_metrics reads completions, and no logits",
    "optimizer_cls_and_kwargs": "give optimizers=(an optimizer of optax, its schedule)",
    "model_init_kwargs": "they are the settings model.*",
    "model_init": "give model, made already",
    "rollout_func": "name it with environment.rollout_func",
    "config": "it is the first argument",
}
# Fields of PEFT's LoraConfig that say nothing of what is trained.
NO_SETTINGS = (
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "megatron_core", "runtime_config", "qalora_group_size", "ensure_weight_tying",
)  # fmt: skip
NEED_ALL_ROWS = (
    "num_epochs", "eval.fraction", "data.precompute_reference", "data.group_by_length", "data.deduplicate",
    "data.curriculum_easy", "data.curriculum_hard",
)  # fmt: skip
# Fields that become settings of `lora`, with PEFT's defaults.
LORA_FIELDS = {
    "r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False, "use_dora": False, "init_lora_weights": True,
    "bias": "none",
    **dict.fromkeys(("target_modules", "target_parameters", "modules_to_save", "layers_to_transform", "layers_pattern",
                     "exclude_modules", "rank_pattern", "alpha_pattern")),
}  # fmt: skip


class Given(NamedTuple):
    """The arguments of `train` that take the place of names in its configuration, each None where the name stands."""

    train_dataset: Any = None
    eval_dataset: Any = None
    rewards: Any = None
    environment: Any = None
    tools: Any = ()
    model: Model | None = None
    tokenizer: Any = None
    optimizer: optax.GradientTransformation | None = None
    schedule: Callable[[Any], Any] | None = None
    compute_metrics: Callable[..., Mapping[str, float]] | None = None


NO_OBJECTS = Given()


def take(
    config,
    others: Mapping[str, Any],
    peft_config: Any = None,
    optimizers: Any = None,
    quantization_config: Any = None,
    **objects: Any,
) -> tuple[ConfigDict, Given]:
    """The configuration with the settings that the arguments of `train` stand for, a copy, and the objects.

    `others` are arguments by names that are not its own. Raises ConfigError, naming the argument and what to give, for
    one that cannot be taken.
    """
    if not isinstance(config, ConfigDict):
        raise ConfigError(
            f"train takes a configuration first, jaxrl_llm.default_config() with changes, and not {_kind(config)}; "
            + ("give a model with model=..." if _is_model(config) else ELSEWHERE["args"])
        )
    config = config.copy_and_resolve_references()
    for name, value in others.items():
        own = ALIASES.get(name)
        if own is None:
            known = (*objects, "peft_config", "optimizers", "quantization_config", "callbacks")
            where = ELSEWHERE.get(name) or f"the closest is {closest(name, known)}, of {', '.join(known)}"
            if name not in ELSEWHERE and (name in SYNONYMS or any(key.rpartition(".")[2] == name for key in BY_NAME)):
                where = f"settings are those of its first argument, config.{nearest(name)} = ..."
            elif name in SECTIONS:
                where = f"settings are those of its first argument, config.{name} has its own"
            raise ConfigError(f"train has no argument {name}: {where}")
        if value is not None and objects[own] is not None:
            raise ConfigError(f"train has {name} and {own}, which are one argument: give one")
        objects[own] = value if objects[own] is None else objects[own]
    rows = objects["train_dataset"]
    if is_stream(rows) or (is_splits(rows) and any(map(is_stream, rows.values()))):
        config.data.streaming = True  # in memory it would be read to its end, which it may not have
        settings = flat(config.to_dict())
        for name in NEED_ALL_ROWS:
            if settings[name] != BY_NAME[name].default:
                instead = " and total_steps to a number" if name == "num_epochs" else ""
                raise ConfigError(
                    f"{name} is {settings[name]}, which needs all rows before training, but train_dataset is a stream: "
                    f"set it to {BY_NAME[name].show(BY_NAME[name].default)}{instead}, or give a datasets.Dataset or a "
                    "list of rows"
                )
    objects["model"] = model = _model(config, objects["model"])
    if model is not None and has_adapters(model.params) and not config.lora.rank and config.lora.reference == "auto":
        config.lora.reference = "start"  # of the adapters that are trained on
    objects["tokenizer"] = _tokenizer(config, objects["tokenizer"])
    if objects["rewards"] is not None:
        objects["rewards"] = [_reward(spec) for spec in _flat(objects["rewards"])]
        if not objects["rewards"]:
            raise ConfigError("rewards is empty: give one function or more, or leave it out for rewards.functions")
        config.rewards.functions = tuple(
            spec if isinstance(spec, str) else "reward_model" if isinstance(spec, Model) else reward_name(spec)
            for spec in objects["rewards"]
        )
    if peft_config is not None:
        config.lora.update(lora_settings(peft_config))
    if quantization_config is not None:
        config.model.quantize = _quantize(quantization_config)
    if objects["compute_metrics"] is not None and not callable(objects["compute_metrics"]):
        raise ConfigError(f"compute_metrics is {_kind(objects['compute_metrics'])}, but it takes a function")
    optimizer, schedule = _optimizers(optimizers)
    return config, Given(optimizer=optimizer, schedule=schedule, **objects)


def listed(value: Any) -> list[Any]:
    """The objects of an argument that takes none, one or several."""
    return [] if value is None else [*value] if isinstance(value, list | tuple) else [value]


def lora_settings(peft_config: Any) -> dict[str, Any]:
    """The keys of `lora` that PEFT's LoraConfig, or a dictionary of its fields, stands for.

    Raises ConfigError for a field that is set and has no key.
    """
    is_data = dataclasses.is_dataclass(peft_config) and not isinstance(peft_config, type)
    fields = dict(peft_config) if isinstance(peft_config, Mapping) else dict(getattr(peft_config, "__dict__", {}))
    known = dataclasses.fields(peft_config) if dataclasses.is_dataclass(peft_config) else ()
    usual = {x.name: x.default_factory() if callable(x.default_factory) else x.default for x in known}
    if "r" not in fields:
        raise ConfigError(f"peft_config is {_kind(peft_config)}, but it takes PEFT's LoraConfig, or set lora.rank")
    for name, value in fields.items():
        if name in LORA_FIELDS or name in NO_SETTINGS or name.startswith("_"):
            continue
        if value != usual.get(name) if is_data else value:
            raise ConfigError(
                f"peft_config has {name} = {value!r}, which has no counterpart: adapters have rank, alpha, dropout, "
                "targets, rslora, dora, a start, modules_to_save, bias and what is said of single modules, set by "
                "lora.rank and the other keys of lora"
            )
    found = LORA_FIELDS | {name: fields[name] for name in LORA_FIELDS if name in fields}
    targets, parameters = found["target_modules"], found["target_parameters"] or ()
    if targets is None and parameters:
        raise ConfigError(
            f"peft_config has target_parameters = {parameters!r} and no target_modules, which PEFT then chooses by the "
            "architecture: give them too, [] for none"
        )
    if targets is None:
        targets = ("q_proj", "v_proj")  # what PEFT chooses for the families that are here
    if isinstance(targets, str):
        targets = (targets,)
    layers, excluded = found["layers_to_transform"], found["exclude_modules"] or ()
    if isinstance(excluded, str) or (found["layers_pattern"] or "layers") not in ("layers", ["layers"]):
        name = "exclude_modules" if isinstance(excluded, str) else "layers_pattern"
        raise ConfigError(
            f"peft_config has {name} = {found[name]!r}, but here modules are excluded by a list of the ends of their "
            "names, and layers are those of the decoder: give a list, or leave it out"
        )
    return {
        "rank": int(found["r"]), "alpha": float(found["lora_alpha"]), "dropout": float(found["lora_dropout"]),
        "rslora": bool(found["use_rslora"]), "dora": bool(found["use_dora"]),
        "init": lora_init(found["init_lora_weights"]),
        "targets": tuple(sorted((*targets, *parameters))),
        "modules_to_save": tuple(sorted(found["modules_to_save"] or ())), "bias": found["bias"] or "none",
        "layers_to_transform": (layers,) if isinstance(layers, int) else tuple(layers or ()),
        "exclude_modules": tuple(sorted(excluded)),
        **{
            name: tuple(f"{pattern}={number}" for pattern, number in (found[name] or {}).items())
            for name in ("rank_pattern", "alpha_pattern")
        },
    }  # fmt: skip


def _quantize(quantization_config: Any) -> str:
    """The `model.quantize` that transformers' BitsAndBytesConfig, or a dictionary of its fields, stands for.

    Its type of four bits is fp4 where it names none, which becomes int4.
    """
    names = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type")
    is_mapping = isinstance(quantization_config, Mapping)
    fields = quantization_config if is_mapping else {name: getattr(quantization_config, name, None) for name in names}
    if fields.get("load_in_4bit"):
        return "nf4" if fields.get("bnb_4bit_quant_type") == "nf4" else "int4"
    if fields.get("load_in_8bit"):
        return "int8"
    raise ConfigError(
        f"quantization_config is {_kind(quantization_config)}, but it takes transformers' BitsAndBytesConfig with "
        "load_in_4bit or load_in_8bit: set model.quantize"
    )


def _model(config, model: Any) -> Model | None:
    """The model in memory; the path of one becomes `model.path`."""
    model = getattr(model, "model", model) if not _is_model(model) else model  # the Result of an earlier run
    if model is None:
        return None
    if isinstance(model, str | os.PathLike):
        config.model.path = os.fspath(model)
        return None
    if not isinstance(model, Model):
        if not _is_torch_model(model):
            raise ConfigError(
                f"model is {_kind(model)}, but it takes a model of jaxrl_llm.load_model or of an earlier run, one of "
                "transformers, or a path"
            )
        model = from_torch(model, config)
    config.model.path = model.path or "a model in memory"
    for key, usual in (("lora.path", None), ("model.random_init", False), ("model.revision", None),
                       ("model.overrides", "")):  # fmt: skip
        section, leaf = key.split(".")
        if config[section][leaf] != usual:
            raise ConfigError(
                f"{key} is {config[section][leaf]!r}, but the model is given in memory, as it is: set {key} to "
                f"{usual!r}, or name the model with model.path"
            )
    return model


def from_torch(model: Any, config) -> Model:
    """A model of transformers as one of this library; it goes through a temporary folder, in its own type.

    Raises ConfigError for a model of PEFT, which has to be merged first.
    """
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    if hasattr(model, "peft_config"):
        raise ConfigError(
            f"{name} is a model of PEFT: give model.merge_and_unload(), or the folder of the adapter with lora.path"
        )
    with tempfile.TemporaryDirectory(prefix="jaxrl_llm_model_") as folder:
        model.save_pretrained(folder)
        loaded = load_model(folder, config.model.dtype, config.model.param_dtype)
    return dataclasses.replace(loaded, path=name)


def _tokenizer(config, tokenizer: Any) -> Any:
    if isinstance(tokenizer, str | os.PathLike):
        config.model.tokenizer = os.fspath(tokenizer)
        return None
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # that of a processor
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "get_vocab")):
        raise ConfigError(
            f"tokenizer (processing_class) is {_kind(tokenizer)}, but it takes a tokenizer of transformers, or the "
            "path of one"
        )
    return tokenizer


def _flat(rewards: Any) -> Iterable[Any]:
    """The rewards of lists within lists; the Result of a run, which is a tuple, is its model."""
    if isinstance(model := getattr(rewards, "model", None), Model) and not callable(rewards):
        yield model
    elif isinstance(rewards, Iterable) and not isinstance(rewards, str) and not callable(rewards):
        for each in rewards:
            yield from _flat(each)
    else:
        yield rewards


def _reward(spec: Any) -> Any:
    """A reward as it is; refuses a model of transformers, whose tokenizer it does not hold."""
    if _is_torch_model(spec):
        name = getattr(spec.config, "_name_or_path", "") or "FOLDER"
        raise ConfigError(
            f"rewards has {_kind(spec)}, a model without its tokenizer: give the name model:{name}, with the folder or "
            "hub id that it is saved under together with its tokenizer"
        )
    if isinstance(spec, Model) and spec.net.config.head == "lm":
        raise ConfigError(f"rewards has the model {spec.path}, which has no score head: give one of a reward_model run")
    return spec


def _optimizers(optimizers: Any) -> tuple[Any, Any]:
    """The optimizer and the schedule, each None where there is none."""
    pair = optimizers
    if optimizers is None:
        return None, None
    if isinstance(optimizers, optax.GradientTransformation):
        pair = (optimizers, None)
    elif callable(optimizers):
        pair = (None, optimizers)
    taken = isinstance(pair, tuple | list) and len(pair) == 2
    if not taken or not (pair[0] is None or isinstance(pair[0], optax.GradientTransformation)):
        raise ConfigError(
            f"optimizers is {_kind(optimizers)}, but it takes an optimizer of optax (a GradientTransformation), a "
            "schedule (a function of the number of updates), or a pair of both; an optimizer by name is optimizer.name"
        )
    if pair[1] is not None and not callable(pair[1]):
        raise ConfigError(
            f"the schedule of optimizers is {_kind(pair[1])}, but it takes a function of the number of updates, as "
            "those of optax; one by name is optimizer.schedule"
        )
    return pair[0], pair[1]


def _is_model(value: Any) -> bool:
    return isinstance(value, Model) or _is_torch_model(value)


def _is_torch_model(value: Any) -> bool:
    """True for a model of transformers, without importing it."""
    return hasattr(value, "save_pretrained") and hasattr(value, "state_dict") and hasattr(value, "config")


def _kind(value: Any) -> str:
    kind = type(value)
    return (
        f"{value!r:.80}" if kind.__module__ == "builtins" else f"a {kind.__module__.partition('.')[0]} {kind.__name__}"
    )
