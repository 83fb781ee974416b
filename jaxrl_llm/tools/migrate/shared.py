"""Rules that several libraries share: length of a run, schedules, optimizers, trackers, rows of a micro-batch."""

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config import schema
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.sources import load
from jaxrl_llm.tools.migrate.draft import OURS, Draft, Options, short, shown

LOCAL = (".parquet", ".json", ".jsonl", ".csv", ".arrow")
NO_TRACKER = ("none", "all", "console", "file")  # a choice of others, or what every run writes
EMBEDDINGS = "embed_tokens|lm_head"  # in the names of parameters that axolotl and Unsloth take for embeddings
TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Names of an optimizer of ours, whatever computes and stores it: `torch.optim.AdamW`, `paged_adamw_8bit`. apollo_adamw,
# schedule_free_sgd and the like are other algorithms.
OPTIMIZER = re.compile(
    r"([\w.]+\.)?_?((paged|fused|deepspeed|cpu|optimi|ao|flash|dist)_?)*"
    r"(adamw?|adafactor|lion|muon|sgdw?|ademamix|adopt(_adamw)?|schedule_free_adamw|prodigy|came|galore_adamw)"
    r"(_?(hf|torch|pytorch|bnb|apex|fused|xla|npu|anyprecision|layerwise|\d+bit|fp8))*"
)
SCHEDULES = {name: name for name in schema.SCHEDULES} | {
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "constant_with_warmup": "constant",
    "inverse_square_root": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
}


def known_rows(options: Options, path: Any, split: str) -> int:
    """Return the rows of the training data: those of --rows, or of local files; 0 where neither is known."""
    files = [str(file) for file in path] if isinstance(path, list | tuple) else [str(path)]
    written = [Path(file).expanduser() / name for file in files for name in ("dataset_dict.json", "dataset_info.json")]
    saved = len(files) == 1 and any(file.is_file() for file in written)  # by save_to_disk
    local = saved or all(file.endswith(LOCAL) and Path(file).expanduser().is_file() for file in files)
    if options.rows or not local:
        return options.rows
    return _counted(tuple((file, Path(file).expanduser().stat().st_mtime_ns) for file in files), split)


def all_rows(options: Options, sources: Iterable[Mapping[str, Any]]) -> int:
    """Return the rows of all data sets together: those of --rows, or their sum; 0 where one's number is not known."""
    counts = [
        known_rows(options, one.get("data_files") or one.get("path"), one.get("split") or "train") for one in sources
    ]
    return options.rows or (sum(counts) if all(counts) else 0)


@functools.cache
def _counted(files: tuple[tuple[str, int], ...], split: str) -> int:
    names = [file for file, _ in files]
    return len(load(names if len(names) > 1 else names[0], split or "train"))  # pyright: ignore[reportArgumentType]


def held_out_rows(draft: Draft, options: Options, path: Any, split: str, most: int, *keys: str) -> None:
    """Set the rows that an evaluation reads: all, or `most` of them where it is above 0; noted where unknown."""
    rows = known_rows(options._replace(rows=0), path, split)
    count = min(most, rows or most) if most > 0 else rows
    draft.set("eval.prompts", count or None, *keys)
    if not count:
        draft.check(f"{draft.named(keys[0])}: all its rows are evaluated there, here eval.prompts, 128 unless set")


def unknown_rows(draft: Draft) -> tuple[str, str]:
    """Return what is said of rows whose number is not known, and the way out besides setting what depends on it."""
    if draft.values.get("data.packing"):
        return "the number of packed rows is known only when the run has packed them", ""
    return "the number of rows is not known", ", or add --rows=N"


def full_batches(rows: int, batch: int) -> int:
    """Return the steps of a pass over the rows that leaves out a last batch that is not full, at least one; 0 where
    the number of rows is not known, which is 0."""
    return max(1, rows // batch) if rows else 0


def epochs(draft: Draft, per_epoch: int, count: float, key: str) -> None:
    """Set the steps of so many epochs of `per_epoch` steps each, or the epochs where the rows are unknown."""
    if per_epoch:
        draft.set("total_steps", max(1, math.ceil(per_epoch * count)), key)
        return
    steps, (unknown, way_out) = OURS["total_steps"].default, unknown_rows(draft)
    draft.set("total_steps", steps, key)
    draft.set("num_epochs", float(count), key)
    draft.check(
        f"{draft.named(key)} = {count:g}, and {unknown}: the run computes its steps from them (num_epochs). Warm-up, "
        f"saves and evaluations that are shares of the steps are written for {steps}: set them{way_out}"
    )


def hold_out(draft: Draft, size: float, key: str, sources: Sequence[dict[str, Any]], rows: int) -> bool:
    """Set what `key` holds out, a share or a number of all rows; a slice of the one source, if uncounted.

    Returns False, with a note, where nothing is held out.
    """
    size, split = float(size), str(sources[0].get("split", "train"))
    if draft.values.get("data.streaming"):
        reason = "streamed rows are not counted. To evaluate, set data.eval_path and eval.every"
    elif size < 1 or size < rows:
        draft.set("eval.fraction", size if size < 1 else size / rows, key)
        return True
    elif len(sources) == 1 and not rows and not {"[", "+"} & set(split):
        sources[0].update(split=f"{split}[{int(size)}:]", eval_split=f"{split}[:{int(size)}]")
        draft.use(key)
        return True
    else:
        counted = f"there are {rows} rows in all" if rows else "how many rows there are in all is not known (--rows=N)"
        reason = f"{counted}. To evaluate, set eval.fraction and eval.every"
    draft.check(f"{key} = {size:g} holds nothing out: {reason}")
    return False


def check_model(draft: Draft) -> None:
    """Note a model that the file does not name."""
    if "model.path" not in draft.values:
        draft.set("model.path", "MODEL")
        draft.check("the file names no model: set model.path")


def type_name(dtype: Any) -> str:
    """Return our name of a type of torch."""
    name = str(dtype).removeprefix("torch.")
    return TYPES.get(name, name)


def divided(value: float, by: int) -> int:
    """Return optimizer updates as training steps, rounded up."""
    return max(1, math.ceil(value / by))


def schedule(draft: Draft, name: str, key: str, ours: str = "optimizer.schedule") -> str:
    """Set and return our schedule of that name; where there is none another, with a note."""
    plain = str(name).lower().replace("-", "_")
    found = SCHEDULES.get(plain)
    if plain in ("reduce_lr_on_plateau", "greedy"):
        found = "constant"
        draft.check(
            f"{draft.named(key)} = {name!r} has no equivalent: no schedule here follows the evaluations; constant is "
            "written. Where they stall, start again from the checkpoint with a lower optimizer.learning_rate"
        )
    elif found is None:
        found = "linear"
        draft.check(
            f"{draft.named(key)} = {name!r} has no equivalent; linear is written. There are "
            f"{', '.join(schema.SCHEDULES)}"
        )
    draft.set(ours, found, key)
    return found


def init_kwargs(draft: Draft, key: str, revision: str) -> Any:
    """Set a model's revision from arguments of from_pretrained, note what has no equivalent, return the dtype."""
    options, dtype = draft.get(key) or {}, None
    for name, value in options.items() if isinstance(options, dict) else ():
        if name in ("dtype", "torch_dtype"):
            dtype = value
        elif name == "revision":
            draft.set(revision, value, key)
        elif name == "output_router_logits" and value:  # with the coefficient in config.json, as by default here
            draft.set_none("model.router_aux_loss_coef", key)
        elif name == "attn_implementation":
            draft.check(f"{key}: {name} = {short(value)} is of torch; model.attention chooses the kernel here")
        elif value is not None:
            draft.check(f"{key}: {shown(name, value)} has no equivalent")
    return dtype


def optimizer(draft: Draft, name: str, key: str) -> None:
    """Set our optimizer of that name."""
    plain = str(name).lower()
    ours = next((known for known in schema.OPTIMIZERS[1:] if known in plain), schema.OPTIMIZERS[0])
    if not OPTIMIZER.fullmatch(plain):
        draft.check(
            f"{draft.named(key)} = {name!r} has no equivalent; {ours} is written. optimizer.name takes one of optax "
            "too, module:function"
        )
    elif re.search("flash|[48]bit|fp8", plain) and ours in ("adamw", "lion", "muon", "ademamix", "galore_adamw"):
        draft.set("optimizer.moment_dtype", "float8", key)
        draft.check(
            f"{draft.named(key)} = {name!r}: moments are in 8 bits (optimizer.moment_dtype), floats with a scale for "
            "each block, and not from the table of bitsandbytes"
        )
    elif str(name).rpartition(".")[2] == "Adam" and draft.values.get("optimizer.weight_decay"):  # torch's
        draft.check(
            f"{draft.named(key)} = {name!r} adds the weight decay to the gradient; adamw, which takes it off the "
            "parameters, is written"
        )
    if "paged" in plain:
        draft.check(
            f"{draft.named(key)} = {name!r}: moments are not paged here; where they do not fit, optimizer.offload "
            "keeps them in the host's memory"
        )
    draft.set("optimizer.name", ours, key)
    if ours == "sgd":
        draft.set("optimizer.b1", 0.0, key)


def slow_moment(draft: Draft, key: str, updates: int) -> None:
    """Set what arguments of bitsandbytes' AdEMAMix, `beta3=0.999,alpha=8` or a mapping, say of it; `updates` a step."""
    given = arguments(draft, key)
    known = {"beta1": "b1", "beta2": "b2", "beta3": "b3", "alpha": "mixing", "eps": "eps"}
    for name, ours in known.items():
        if name in given:
            draft.set(f"optimizer.{ours}", float(given[name]), key)
    rises = {int(given[name]) for name in ("t_alpha", "t_beta3") if name in given}
    if rises:
        draft.set("optimizer.mixing_steps", divided(max(rises), updates), key)
    if len(rises) > 1 or bool("t_alpha" in given) != bool("t_beta3" in given):
        draft.check(f"{key}: t_alpha and t_beta3 are one number here, the larger (optimizer.mixing_steps)")
    if others := sorted(set(given) - {*known, "t_alpha", "t_beta3"}):
        draft.check(f"{key}: {', '.join(others)} of AdEMAMix is not here")


def projection(draft: Draft, key: str, updates: int) -> None:
    """Set what arguments of transformers' GaLore say of it."""
    given = arguments(draft, key)
    draft.set("optimizer.galore_rank", int(given.get("rank", 128)), key)
    draft.set("optimizer.galore_every", divided(float(given.get("update_proj_gap", 200)), updates), key)
    draft.set("optimizer.galore_scale", float(given.get("scale", 0.25)), key)
    if (kind := given.get("proj_type", "std")) != "std":
        draft.check(f"{key}: proj_type = {kind} has no equivalent; std, of the shorter dimension, is what there is")


def arguments(draft: Draft, key: str) -> dict[str, Any]:
    """Return arguments of an optimizer, which are a text, `rank=64,scale=0.1`, or a mapping."""
    given = draft.get(key) or {}
    return dict(entry.split("=") for entry in given.replace(" ", "").split(",")) if isinstance(given, str) else given


def betas(draft: Draft, key: str, section: str = "optimizer") -> None:
    """Set Adam's two decay rates from a pair."""
    pair = draft.get(key)
    pair = pair.strip("[]()").split(",") if isinstance(pair, str) else pair  # quoted once more within a variable
    for index, ours in enumerate((f"{section}.b1", f"{section}.b2")):
        draft.set(ours, float(pair[index]), key)


def backends(draft: Draft, trackers: Any, key: str) -> None:
    """Set the logging backends that there are, and note the others."""
    trackers = [str(name).lower() for name in ([trackers] if isinstance(trackers, str) else trackers or ())]
    if "all" in trackers:
        draft.check(f"{key} is all: name the trackers in logging.backends")
    known = OURS["logging.backends"].choices or ()
    trackers = [name for name in trackers if name not in NO_TRACKER]
    for name in trackers:
        if name not in known:
            draft.check(f"{key}: there is no logging backend {name}; metrics are in metrics.jsonl")
    draft.set("logging.backends", ("console", "jsonl", *(name for name in trackers if name in known)), key)


def tracked(draft: Draft, settings: Mapping[str, Any], projects: Sequence[str], names: Sequence[str]) -> None:
    """Set the project and the name of the run from the first of their keys that has a value."""
    for ours, keys in (("logging.project", projects), ("logging.run_name", names)):
        values = {key: str(settings[key]) for key in keys if settings.get(key)}
        draft.use(*(key for key in keys if key in settings))
        if values:
            key, value = next(iter(values.items()))
            draft.set(ours, value, key)
            if len(set(values.values())) > 1:
                listed = ", ".join(f"{key} = {value}" for key, value in values.items())
                draft.check(f"{listed}: a run has one name, and its project too, in all trackers ({ours})")


def below(draft: Draft, section: str) -> dict[str, Any]:
    """Return the keys of a section that the file sets, by their last part."""
    keys = {key: value for key, value in draft.settings.items() if key.startswith(f"{section}.")}
    return {key.rpartition(".")[2]: value for key, value in keys.items()}


def set_options(draft: Draft, ours: str, section: str) -> None:
    """Set a key of ours that takes options, `a=1, b='c'`, from the keys of a section that the file sets."""
    options = below(draft, section)
    written = ", ".join(f"{name}={value!r}" for name, value in options.items())
    draft.set(ours, written or None, *(f"{section}.{name}" for name in options))


def shared_rows(draft: Draft, sharing: Mapping[str, str], devices: int) -> int:
    """Set the axes of the mesh over which devices share rows, our key -> theirs, and return how many groups there are.

    Experts are shared by devices with rows of their own.
    """
    for ours, key in sharing.items():
        if (size := int(draft.get(key) or 1)) > 1:
            draft.set(ours, size, key)
            devices //= 1 if ours == "mesh.expert" else size
    draft.use(*sharing.values())
    return max(devices, 1)


def microbatch_rows(draft: Draft, rows: int, minibatch: int, *keys: str, ours: str = "batch.microbatch_rows") -> None:
    """Set `ours`, the rows of a micro-batch: at most as many as there, and a divisor of the minibatch; all of it, or
    what fits in memory, is 0."""
    if rows >= minibatch or draft.get("auto_find_batch_size"):
        draft.use(*keys, "auto_find_batch_size")
        return
    fitting = max(size for size in range(1, rows + 1) if minibatch % size == 0)
    draft.set(ours, fitting, *keys)


def fp8_matmuls(draft: Draft, *keys: str) -> None:
    """Set the matmuls of training in fp8, and the correction that samples from a policy without them need."""
    draft.set("model.matmul_dtype", "fp8", *keys)
    if draft.values.get("algorithm.name") in schema.OFFLINE:
        return
    draft.check(
        f"{keys[0]}: samples are drawn with matmuls in model.dtype here; algorithm.importance_correction corrects for "
        "the difference"
    )
    if "algorithm.importance_correction" not in draft.values and "algorithm.rollout_correction" not in draft.values:
        draft.set("algorithm.importance_correction", "token_truncate", keys[0])


def check_punished_length(draft: Draft, key: str) -> None:
    """Note a length up to which theirs punishes long completions, where it is not that of the longest one."""
    longest = draft.get(key)
    if longest is not None and int(longest) != draft.values["rollout.max_completion_length"]:
        draft.check(f"{draft.named(key)} = {longest}: the punishment here ends at rollout.max_completion_length")
    draft.use(key)


def check_known(key: str, name: Any, known: Iterable[str]) -> None:
    """Raise ConfigError for a value of a key that is not among those which have an equivalent."""
    if name not in (names := tuple(known)):
        raise ConfigError(f"{key} is {name!r}, which has no equivalent; there are {', '.join(names)}")


def check_absent(draft: Draft, absent: Mapping[str, tuple[Any, str]]) -> None:
    """Note keys that change what is learned and have no setting, unless they have a value that changes nothing: key ->
    (that value, what to do)."""
    for key, (harmless, why) in absent.items():
        if draft.get(key) not in (None, harmless):
            draft.check(f"{draft.named(key)} = {draft.get(key)} has no equivalent: {why}")
        draft.use(key)


def check_off(draft: Draft, settings: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Note keys of the file that are on and have no equivalent."""
    for key in keys:
        if settings.get(key):
            draft.use(key)
            draft.check(f"{shown(key, settings[key])} has no equivalent")


def one_batch_ahead(draft: Draft, key: str, age: int, how: str) -> None:
    """Note that a bound on the age of samples, a key with the value `age`, becomes one batch sampled ahead, `how`."""
    draft.check(
        f"{key} = {age} bounds how far a sample may be behind the policy there; here rollout.staleness says how far "
        f"all are: 1 is written, {how}"
    )


def listed(value: Any) -> list[Any]:
    """Return the values of a key that is given one of them, or a list; none of none."""
    return value if isinstance(value, list) else [] if value is None else [value]
