"""The data of a run, read before its weights: tokenizer, training rows, evaluation rows, and the number of steps."""

import contextlib
import functools
import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl_llm.config import ConfigDict, ConfigError, validate
from jaxrl_llm.config.files import read_json
from jaxrl_llm.config.resolve import import_file, import_module, naming, split_options
from jaxrl_llm.config.wording import amount
from jaxrl_llm.data import image_processors, loading, opening
from jaxrl_llm.data.loading import Tokenized
from jaxrl_llm.data.named_templates import with_chat_template, with_eos_token
from jaxrl_llm.data.opening import DataSource
from jaxrl_llm.data.splits import is_stream
from jaxrl_llm.models import families
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.model import Model, base_and_adapter, check_ids, config_folder
from jaxrl_llm.training.packing.documents import packed_rows
from jaxrl_llm.training.setup.agreed import check_same_rows, check_same_streams
from jaxrl_llm.training.setup.evaluation import NamedSet, eval_sets, open_eval
from jaxrl_llm.training.setup.given import NO_OBJECTS, Given
from jaxrl_llm.training.setup.specs import data_spec

log = logging.getLogger(__name__)


class RunData(NamedTuple):
    """The data of a run."""

    config: ConfigDict  # with the number of steps that `num_epochs` comes to
    tokenizer: Any
    sources: list[DataSource]
    tokens: Tokenized | None  # None where rows are streamed
    held_out: list[tuple[NamedSet, list[DataSource]]]  # empty: nothing is evaluated on
    notes: list[str]  # lines on what is used of the data


def read_data(config, given: Given = NO_OBJECTS) -> RunData:
    """The rows of a run, and what follows from their number; objects that are `given` take the place of names.

    Raises ConfigError for data that cannot be read, and for settings that need an evaluation where there is none.
    """
    train_dataset, eval_dataset = given.train_dataset, given.eval_dataset
    tokenizer, spec = tokenizer_of(config, given.tokenizer, given.model), data_spec(config)
    check_vocabulary(config, tokenizer, given.model)
    if given.tokenizer is not None or config.model.tokenizer is not None:
        _tell_of_other_tokens(config, tokenizer, given.model)
    seen: set[bytes] = set()
    sources, tokens = opening.open_sources(spec, tokenizer, train_dataset, seen=seen), None
    notes: list[str] = []
    if spec.streaming:
        check_same_streams(sources)
    else:
        tokens = loading.tokenized(spec, sources, spec.kind, tokenizer)
        check_same_rows("rows of the data", spec.kind, tokens.rows)
        config, notes = with_total_steps(config, tokens)
    if config.eval.fraction and eval_dataset is not None:
        raise ConfigError(
            f"eval.fraction is {config.eval.fraction}, to hold training rows out, but eval_dataset is given: use one"
        )
    held_out = []
    nothing_asked = (
        train_dataset is not None and eval_dataset is None and config.data.eval_path is None
        and not config.eval.sets and not config.eval.fraction
    )  # fmt: skip
    if config.eval.every >= 0 and not nothing_asked:
        rows = train_dataset if config.eval.fraction and eval_dataset is None else eval_dataset
        held_out, more = open_held_out(config, tokenizer, rows, sources, seen)
        notes += more
    if not held_out and config.eval.every > 0:
        without = config.copy_and_resolve_references()
        without.eval.every, without.num_epochs = -1, None
        with naming("there is no data to evaluate on (eval.fraction holds some out)"):
            validate(without)
    return RunData(config, tokenizer, sources, tokens, held_out, notes)


def with_total_steps(config, tokens: Tokenized) -> tuple[Any, list[str]]:
    """The configuration with the steps that `num_epochs` of the rows take, and notes on the rows that are used.

    Raises ConfigError for settings that do not go with so many steps.
    """
    count, prompts, unit = len(tokens.rows), config.batch.prompts, "row"
    read = sum(report.read for report in tokens.reports)
    used, packed = f"all {count}" if count == read else f"{count}", ""
    if config.data.overlong == "split" and count > read:
        used = f"in {amount(count, 'piece')} of at most {amount(config.data.max_length, 'token')}"
    if config.data.packing:
        c = config.data
        count = len(packed_rows(tokens.rows, c.max_length, c.packing_strategy))
        unit, packed = "packed row", f" as {amount(count, 'packed row')}"
    if config.num_epochs is not None:
        config = config.copy_and_resolve_references()
        # Rounded, as 1.1 * 10 is more than 11 in floating point.
        config.total_steps = math.ceil(round(config.num_epochs * count / prompts, 6))
        checked = config.copy_and_resolve_references()
        checked.num_epochs = None
        validate(checked)
    steps = config.total_steps
    notes = [
        f"data: {amount(read, 'row')}, {used} used{packed}; {amount(f'{count / prompts:.4g}', 'step')} an epoch of "
        f"{amount(prompts, unit)}; {amount(steps, 'step')} {'is' if steps == 1 else 'are'} "
        f"{amount(f'{steps * prompts / count:.3g}', 'epoch')}"
    ]
    if count < prompts:
        notes.append(
            f"data: a step takes {amount(prompts, unit)}, more than there are, so that it has some of them twice"
        )
    return config, notes


def open_held_out(
    config, tokenizer: Any, dataset: Any, sources: list[DataSource], seen: set[bytes]
) -> tuple[list[tuple[NamedSet, list[DataSource]]], list[str]]:
    """The sets to evaluate on, each with the first rows of its sources, and notes on them.

    `sources` are trained on, of rows with the digests `seen`; `dataset` is given in the place of names.
    """
    held_out, notes = [], []
    for named in eval_sets(config, dataset):
        # Rows that are held out were among those that were seen.
        own = open_eval(config, tokenizer, named, trained_on=() if config.eval.fraction else seen)
        counts = [len(source.rows) for source in own if not is_stream(source.rows)]
        if len(counts) == len(own) and (total := sum(counts)) > named.prompts:
            of = f"{named.name}: " if named.name else ""
            notes.append(f"evaluation: {of}the first {named.prompts} of {total} rows (eval.prompts)")
        if {_kept_as(source.rows) for source in sources} & {_kept_as(source.rows) for source in own} - {None}:
            ways = "do so with eval.fraction and data.eval_split=none, or name others in data.eval_path"
            ways = ways if named.sources is None else "name others in eval.sets"
            of = named.name or ", ".join(source.name for source in own)
            notes.append(f"evaluation: {of} has the rows that are trained on, and nothing is held out: {ways}")
        held_out += [(named, loading.first_rows(own, named.prompts))] if own else []
    if not held_out:
        notes.append(
            f"no evaluation: {', '.join(source.name for source in sources)} has no split 'test'. Name what to evaluate "
            "on with data.eval_path or data.eval_split, or hold rows out with eval.fraction"
        )
    return held_out, notes


def tokenizer_of(config, tokenizer: Any = None, model: Model | None = None) -> Any:
    """The tokenizer of a run, with its chat template: one in memory, that of `model.tokenizer`, or the model's.

    Raises ConfigError when there is none, and for one that does not fit the model.
    """
    c = config.model
    register(c.register)
    if tokenizer is None:
        if c.tokenizer is not None:
            tokenizer = hf.find_tokenizer(c.tokenizer, c.trust_remote_code, setting="model.tokenizer")
        elif model is not None:
            tokenizer = model.tokenizer
        else:
            path, _, revision = base_and_adapter(c.path, revision=c.revision)
            tokenizer = hf.find_tokenizer(path, c.trust_remote_code, revision)
    if tokenizer is None:
        raise ConfigError(f"the model in memory ({c.path}) has no tokenizer: give tokenizer, or set model.tokenizer")
    if config.data.chat_template is not None:
        find = functools.partial(hf.find_tokenizer, trust_remote_code=c.trust_remote_code, setting="data.chat_template")
        tokenizer = with_chat_template(tokenizer, config.data.chat_template, find)
    if c.eos_token is not None:
        tokenizer = with_eos_token(tokenizer, c.eos_token)
    if model is not None:
        tokenizer.image_folder = getattr(model.tokenizer, "image_folder", None)
    else:
        hf.remember_images(tokenizer, config_folder(c.path, c.revision))
    tokenizer.image_settings = getattr(model.tokenizer, "image_settings", {}) if model is not None else {}
    if options := split_options(f"_({config.data.image_processor})")[1]:
        if tokenizer.image_folder is None:
            raise ConfigError(
                f"data.image_processor is {config.data.image_processor!r}, but the model reads text alone: remove it"
            )
        tokenizer.image_settings = image_processors.settings_of(tokenizer.image_folder, options)
    return tokenizer


def model_entries(config) -> Mapping[str, Any]:
    """The entries of `model.overrides`, by their names in config.json."""
    return split_options(f"_({config.model.overrides})")[1]


def register(names: Any) -> None:
    """Imports the modules and files of `model.register`, and adds those that are families of models."""
    for name in names:
        module = import_file(name) if name.endswith(".py") else import_module(name, "model.register")
        if hasattr(module, "MODEL_TYPE"):
            families.register(module)


def check_vocabulary(config, tokenizer: Any, model: Model | None) -> None:
    """Raises ConfigError where the tokenizer has ids that the model's embedding has no row for."""
    if model is not None:
        check_ids(tokenizer, model.net.config.embeddings, model.generation, model.path)
        return
    path, _, revision = base_and_adapter(config.model.path, revision=config.model.revision)
    folder = hf.locate(path, revision=revision, config_only=True)
    size = hf.load_net(folder, model_entries(config)).config.embeddings
    check_ids(tokenizer, size, read_json(folder / "generation_config.json"), path)


def _tell_of_other_tokens(config, tokenizer: Any, model: Model | None) -> None:
    """Log a warning where many tokens of a tokenizer have other ids in the model's own: it would learn to read anew."""
    own, path = None if model is None else model.tokenizer, config.model.path
    if model is None and not config.model.random_init:
        path, _, revision = base_and_adapter(path, revision=config.model.revision)
        with contextlib.suppress(ConfigError):  # a model without one
            own = hf.find_tokenizer(path, config.model.trust_remote_code, revision)
    if own is None:
        return
    ids, own_ids = tokenizer.get_vocab(), own.get_vocab()
    # Those behind the model's own are new tokens, and a few may have taken the places of reserved ones.
    others = sum(number < len(own_ids) and own_ids.get(token) != number for token, number in ids.items())
    if others > len(ids) / 10:
        log.warning(
            "the tokenizer is not that of %s: %d of its %d tokens have other ids there, so the model reads other texts "
            "than the data has", path, others, len(ids),
        )  # fmt: skip


def _kept_as(rows: Any) -> str | None:
    """The name by which `datasets` keeps rows, the same for the same rows of the same source; None for other rows."""
    return getattr(rows, "_fingerprint", None)
