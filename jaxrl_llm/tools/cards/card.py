"""The model card of an exported folder: README.md, as the Hugging Face hub reads it, and curves.svg beside it."""

import importlib.metadata
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config import ConfigDict, ConfigError, default, eval_set, flat
from jaxrl_llm.config.files import read_json, replaced
from jaxrl_llm.config.schema import KEYS, OFFLINE
from jaxrl_llm.config.version import __version__
from jaxrl_llm.data.opening import evaluated_on
from jaxrl_llm.models.adapters import peft
from jaxrl_llm.tools.cards.clean import in_words, shareable
from jaxrl_llm.tools.cards.curves import curves_svg
from jaxrl_llm.tools.cards.hub import named
from jaxrl_llm.tools.cards.origin import TAG, Base, base_of, datasets_of
from jaxrl_llm.tools.markdown import table
from jaxrl_llm.tools.report.page import algorithm_of, headlines
from jaxrl_llm.tools.report.runs import ReportedRun, run_of
from jaxrl_llm.training.checkpoint.outputs import given_to

CARD, CURVES = "README.md", "curves.svg"
# Settings that say where a run was, and nothing about its model.
OF_THE_MACHINE = (
    "output_dir",
    "compilation_cache",
    "data.cache",
    "data.workers",
    "logging.",
    "processes.",
    "watch.",
    "checkpoint.",
    "export.",
)
PARTS = ("model.trainable", "model.frozen", "model.freeze_router")  # settings by which not all of a model is trained
LIBRARIES = {
    "lm": ("transformers", "AutoModelForCausalLM", "text-generation"),
    "score": ("transformers", "AutoModelForSequenceClassification", "text-classification"),
    "step": ("transformers", "AutoModelForTokenClassification", "token-classification"),
}


def write_cards(run: str | Path, step: int, export: ConfigDict) -> None:
    """Writes the cards of the folders `hf` and `adapter` of a run of `step` steps, with the title and tags of
    `export`."""
    for name, place in (("hf", export.push_to_hub), ("adapter", None)):
        if (Path(run) / name).is_dir():
            write_card(Path(run) / name, run, step, place, export.title, export.tags)


def write_card(
    folder: str | Path,
    run: str | Path,
    step: int,
    repo: str | None = None,
    title: str | None = None,
    tags: Sequence[str] = (),
) -> None:
    """Writes README.md, curves.svg and the base's LICENSE into an exported folder of a run's `step`.

    The folder holds the merged model, or an adapter as PEFT reads it. `repo` is where on the hub it will be, `title`
    the card's own, and `tags` are added to those of the algorithm. What the card says is taken from config.json and
    metrics.jsonl of the run, of these up to `step`; without metrics.jsonl it has neither results nor curves. Raises
    ConfigError when it cannot be written.
    """
    folder, found = Path(folder), run_of(Path(run))
    base = base_of(str(found.settings["model.path"]), _start_of(found))
    svg = curves_svg(found, step)
    body = _body(folder, found, base, step, bool(svg), repo and named(repo), title)
    text = f"---\n{_front_matter(folder, found, base, step, tags)}---\n\n{body}"
    try:
        if base.text is not None:
            shutil.copyfile(base.text, folder / "LICENSE")
        if svg:
            (folder / CURVES).write_text(svg, encoding="utf-8")
        with replaced(folder / CARD) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the model card could not be written to {folder}: {error}; the model itself is whole"
        ) from error


def evaluations(run: ReportedRun, last_step: int) -> list[tuple[int, dict[str, float]]]:
    """(step, metrics) of the first and the last evaluation up to `last_step`; fewer where there are fewer."""
    found: list[tuple[int, dict[str, float]]] = []
    for number, step in enumerate(run.steps):
        columns = ((name, run.metrics[name][number]) for name in run.metrics if name.startswith("eval/"))
        values = {name: value for name, value in columns if value is not None and math.isfinite(value)}
        if values and step <= last_step:
            found[1:] = [(step, values)]
    return found


def _start_of(run: ReportedRun) -> Path | None:
    """The folder that the run was started in last, from which its paths count; None where it did not record that."""
    return next((Path(start["folder"]) for start in reversed(run.starts) if "folder" in start), None)


def _front_matter(folder: Path, run: ReportedRun, base: Base, step: int, tags: Sequence[str]) -> str:
    from huggingface_hub import EvalResult, ModelCardData  # slow to import

    adapter = peft.is_adapter(folder)
    library, _, task = LIBRARIES[_head(run)]
    held_out, results = _held_out(run), []
    for name, value in (pair for _, measured in evaluations(run, step)[-1:] for pair in measured.items()):
        first, _, rest = name.removeprefix("eval/").partition("/")
        path, split = held_out[first if rest and first in held_out else next(iter(held_out))]
        kind = rest if rest and first in held_out else name.removeprefix("eval/")
        results.append(EvalResult(task, path, path, kind, float(f"{value:.6g}"), dataset_split=split, metric_name=name))
    algorithm = str(run.settings["algorithm.name"])
    adapters = ["lora"] if run.settings.get("lora.rank") or run.settings.get("lora.path") else []
    licence: dict[str, Any] = dict(base.license) or {"license": "unknown"}
    hub_id = None if adapter and "model" in given_to(run.folder) else base.hub_id
    data = ModelCardData(
        base_model=hub_id,
        base_model_relation=None if hub_id is None else "adapter" if adapter else "finetune",
        datasets=None if "train_dataset" in given_to(run.folder) else datasets_of(run.settings, _start_of(run)) or None,
        library_name="peft" if adapter else library,
        pipeline_tag=task,
        tags=list(dict.fromkeys([TAG, algorithm, *adapters, *tags])),
        model_name=run.name if results else None,
        eval_results=results or None,
        **licence,
    )
    return data.to_yaml() + "\n"


def _body(
    folder: Path, run: ReportedRun, base: Base, step: int, curves: bool, repo: str | None, title: str | None
) -> str:
    kind = {"lm": "language model", "score": "reward model", "step": "process reward model"}[_head(run)]
    what = f"{kind}'s adapter (LoRA)" if peft.is_adapter(folder) else kind
    versions = _versions(run, step)
    parts = [
        f"# {title or (repo or run.name).rpartition('/')[2]}\n",
        f"A {what}, made from {_linked(base)} by {step} step{'' if step == 1 else 's'} of "
        f"{algorithm_of(run)} with jaxrl_llm {versions['jaxrl_llm']}.\n",
        table(("", ""), _facts(folder, run, base, versions)),
        "\n## Results\n",
        _results(run, step),
    ]
    if curves:
        parts.append(f"![Curves of the run]({CURVES})\n")
    parts += [
        "\n## Use\n",
        _usage(folder, run, base, repo),
        "\n## Settings\n",
        "Those that differ from the defaults of jaxrl_llm. Folders are given by their last part.\n",
        table(("key", "value"), [(f"`{name}`", f"`{value}`") for name, value in _settings(run).items()]),
        "\n## Licence\n",
        _license(base),
    ]
    return "\n".join(parts)


def _head(run: ReportedRun) -> str:
    return {"reward_model": "score", "process_reward_model": "step"}.get(run.settings["algorithm.name"], "lm")


def _linked(base: Base) -> str:
    if base.hub_id is None:
        return f"`{base.name}`" if base.name.startswith("embedded:") else f"the local model `{base.name}`"
    link = f"[{base.hub_id}](https://huggingface.co/{base.hub_id})"
    return link if base.name == base.hub_id else f"`{base.name}`, itself from {link}"


def _versions(run: ReportedRun, step: int) -> dict[str, str]:
    """The versions that made `step`, as the run has recorded them, and where it has not those of this process; of
    transformers, which writes the tokenizer, always these."""
    here = {name: importlib.metadata.version(name) for name in ("jax", "transformers")}
    starts = [start for start in run.starts if start.get("step", 0) < step] or run.starts[:1]
    return {"jaxrl_llm": __version__} | here | (starts[-1].get("versions", {}) if starts else {})


def _facts(folder: Path, run: ReportedRun, base: Base, versions: Mapping[str, str]) -> list[tuple[str, str]]:
    settings, given = run.settings, given_to(run.folder)
    data = given.get("train_dataset") or settings.get("data.sources") or settings["data.path"]
    facts = [
        ("base model", _linked(base)),
        ("data", f"`{in_words(data)}`"),
        ("algorithm", algorithm_of(run) or ""),
    ]
    if settings["algorithm.name"] not in OFFLINE:
        facts.append(("rewards", f"`{in_words(given.get('rewards') or settings['rewards.functions'])}`"))
    facts += [(name, f"`{in_words(given[name])}`") for name in ("environment", "tools") if name in given]
    parts = [f"`{name}`" for name in PARTS if settings.get(name)]
    if settings.get("model.vision") == "frozen" and "vision_config" in (read_json(folder / "config.json") or {}):
        parts.append("`model.vision`")
    whole = f"what {' and '.join(parts)} leave{'s' if len(parts) == 1 else ''}" if parts else "all"
    if settings.get("lora.rank") or settings.get("lora.path"):
        whole = f"adapters of rank {settings['lora.rank']}" if settings.get("lora.rank") else "adapters"
    facts.append(("trained", whole))
    facts.append(("learning rate", f"{settings['optimizer.learning_rate']:g}"))
    facts.append(("seed", str(settings["seed"])))
    return [*facts, ("versions", ", ".join(f"{name} {version}" for name, version in versions.items()))]


def _results(run: ReportedRun, step: int) -> str:
    measured = evaluations(run, step)
    text = ""
    if measured:
        (first, before), (last, after) = measured[0], measured[-1]
        names = [name for name in after if not name.endswith("_length")] or list(after)
        rows = [(name, *(_number(found.get(name)) for found in (before, after))) for name in names]
        said = (
            f"{f'{name}: ' if name else ''}`{path}`{f' (split {split})' if split else ''}"
            for name, (path, split) in _held_out(run).items()
        )
        text = f"On {', '.join(said)}, held out:\n\n"
        heads = ("metric", f"step {first}", f"step {last}")
        text += table(heads, rows) if first < last else table(heads[::2], [row[::2] for row in rows])
    reached = [(title, name, _last(run, name, step)) for title, name in headlines([run]) if title != "Held-out"]
    rows = [(f"{title} (`{name}`)", _number(value)) for title, name, value in reached if value is not None]
    if rows:
        text += "\nIn training, at the last step:\n\n" + table(("", "value"), rows)
    return text or "The run kept no metrics.\n"


def _last(run: ReportedRun, name: str, step: int) -> float | None:
    values = [y for x, y in zip(run.steps, run.metrics[name], strict=True) if y is not None and x <= step]
    return values[-1] if values else None


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _held_out(run: ReportedRun) -> dict[str, tuple[str, str | None]]:
    """The data sets that were evaluated on, and their splits, by the names of `eval.sets`; "" is the only one."""
    if given := given_to(run.folder).get("eval_dataset"):
        return {"": (given, None)}
    sets: dict[str, list[Mapping[str, Any]]] = {}
    for item in run.settings.get("eval.sets") or ():
        name, _, source = eval_set(item)
        sets.setdefault(name, []).append(source)
    found = {name: evaluated_on(run.settings, own) for name, own in sets.items()} or {"": evaluated_on(run.settings)}
    return {name: (in_words(paths), split or None) for name, (paths, split) in found.items()}


def _usage(folder: Path, run: ReportedRun, base: Base, repo: str | None) -> str:
    library, kind, _ = LIBRARIES[_head(run)]
    if peft.is_adapter(folder) and "model" in given_to(run.folder):
        return "The model that it adapts was given in memory and kept nowhere; the run's folder `hf` is whole.\n"
    if peft.is_adapter(folder):
        library, kind = "peft", kind.replace("AutoModel", "AutoPeftModel")
    name = json.dumps(repo or "FOLDER")
    tokenizer = json.dumps(base.hub_id or "BASE") if peft.is_adapter(folder) else name
    score = _head(run) != "lm"
    asked = "model(**inputs).logits" if score else "tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0])"
    here = 'model([model.tokenizer("Hello")["input_ids"]])' if score else 'jaxrl_llm.generate(model, ["Hello"])[0]'
    imports = ["from transformers import AutoTokenizer", f"from {library} import {kind}"]
    if library == "transformers":
        imports = [f"from transformers import {kind}, AutoTokenizer"]
    head = f', head="{_head(run)}"' if score and not peft.is_adapter(folder) else ""
    lines = [
        "```python",
        *imports,
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({tokenizer})",
        f"model = {kind}.from_pretrained({name})",
        'inputs = tokenizer("Hello", return_tensors="pt")',
        f"print({asked})",
        "```",
        "",
        "or",
        "",
        "```python",
        "import jaxrl_llm",
        "",
        f"model = jaxrl_llm.load_model({name}{head})",
        f"print({here})",
        "```",
        "",
    ]
    return "\n".join(lines)


def _settings(run: ReportedRun) -> dict[str, str]:
    """The settings that differ from the defaults and shape the model, `shareable`."""
    usual, shown = flat(default().to_dict()), {}
    for key in KEYS:
        value = run.settings.get(key.name)
        if key.name.startswith(OF_THE_MACHINE) or key.name not in run.settings:
            continue
        if value != (list(usual[key.name]) if isinstance(usual[key.name], tuple) else usual[key.name]):
            shown[key.name] = in_words(value)
    return shown


def _license(base: Base) -> str:
    if not base.license:
        return (
            f"The licence of the base model is unknown: no card or licence file came with `{base.name}`. Find out "
            "before you pass this model on.\n"
        )
    name = base.license.get("license_name") or base.license["license"]
    return f"That of the base model: {shareable(name)}" + (
        f", see [{base.license['license_link']}]({base.license['license_link']}).\n"
        if base.license.get("license_link")
        else ".\n"
    )
