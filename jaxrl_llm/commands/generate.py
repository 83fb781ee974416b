"""Sample completions of prompts.

    python -m jaxrl_llm generate --model=runs/grpo/hf --prompt="sort:4821="
    python -m jaxrl_llm generate --model=runs/grpo/hf --prompts_file=prompts.jsonl --samples=4
    python -m jaxrl_llm generate --model=runs/vision/hf --prompt="How many?" --chat --image=circles.png

One completion is printed as it is; several as JSON, one object {"prompt", "completion"} a line. To talk to a model, see
`python -m jaxrl_llm chat`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.checks.sampling import check_structured
from jaxrl_llm.config.entries import logit_bias as read_logit_bias
from jaxrl_llm.config.flags import load_options
from jaxrl_llm.config.resolve import split_options
from jaxrl_llm.config.schema import sampling_option
from jaxrl_llm.config.setting import Setting
from jaxrl_llm.data import Row, sources
from jaxrl_llm.data.collate import pad_prompts
from jaxrl_llm.data.detokenize import Detokenizer
from jaxrl_llm.data.diagnose import encoding_fault
from jaxrl_llm.data.image_rows import ImageReader
from jaxrl_llm.data.images import HeldImage, ImageLimits
from jaxrl_llm.data.templates import (
    SYSTEM_ROLES,
    TEMPLATE_COLUMNS,
    Prompt,
    is_conversational,
    render_prompt,
    template_options,
    without_absent_keys,
)
from jaxrl_llm.data.tokenize import PIXELS
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.compilation_cache import keep_compiled
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.distributed.sharding import make_mesh, row_shards, rows_to_global
from jaxrl_llm.models.model import Model, check_loaded, check_positions, check_tokenizer
from jaxrl_llm.rollout.constraints import Guide, bad_word_ids, build_automata, check_tokens
from jaxrl_llm.rollout.engine import COMPILE_WORK, Engine
from jaxrl_llm.rollout.grammar import build_grammar
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.training.evaluation.run import full_batches
from jaxrl_llm.training.images import IMAGES, prompt_images
from jaxrl_llm.training.logging.console import stderr_console, waiting
from jaxrl_llm.training.setup.run_models import load_named
from jaxrl_llm.training.setup.specs import WIDTH_MULTIPLE
from jaxrl_llm.training.setup.worker import eos_ids

ROWS_AT_ONCE = 256  # bounds the memory that many prompts take

SAMPLING = (
    Setting("max_new_tokens", 128, "Longest completion, in tokens.", int, minimum=1),
    sampling_option("temperature", 1.0, "Sampling temperature; 0 takes the most likely token every time."),
    sampling_option("top_p", 1.0, "Sample from the smallest set of tokens with this probability."),
    sampling_option("top_k", 0, "Sample from this many most likely tokens; 0 is off."),
    sampling_option("min_p", 0.0, "Drop tokens less likely than this fraction of the likeliest."),
    sampling_option("repetition_penalty", 1.0, "Penalty on tokens of prompt and completion; 1 is off."),
    sampling_option("frequency_penalty", 0.0, "Penalty for each time a token was sampled."),
    sampling_option("presence_penalty", 0.0, "Penalty on tokens that were sampled."),
    Setting("logit_bias", (), "Numbers added to the logits of tokens, each `ID=BIAS`."),
    Setting("bad_words", (), "Texts that are not sampled."),
    Setting("min_new_tokens", 0, "Shortest completion, in tokens.", int, minimum=0),
    Setting("stop", (), "Texts that end a completion, and stay in it; \\n in them is a line break.", escapes=True),
    Setting("stop_token_ids", (), "Tokens that end a completion beside the end of text.", int, minimum=0),
    Setting("ignore_eos", False, "Sample past the end of text.", bool),
    Setting("structured_regex", "", "Regular expression that whole completions match."),
    Setting("structured_choice", (), "Texts of which each completion is one."),
    Setting("structured_json", "", "JSON schema, a file or the schema itself, that completions are values of."),
    Setting("structured_grammar", "", "Grammar that completions follow, a file or its text: Lark's syntax, or GBNF."),
    Setting("seed", 0, "Root of the random numbers.", int, minimum=0),
)
SAMPLES = Setting("samples", 1, "Completions per prompt.", int, minimum=1)
MODEL = (
    Setting("model", "", "Hugging Face hub id, folder, URL, `embedded:<name>`, or a run: RUN, RUN/checkpoints/STEP."),
    Setting(
        "dtype",
        "auto",
        "Compute type of the network; auto is float32 on CPU and GPUs before Ampere, else bfloat16.",
        choices=("auto", "float32", "bfloat16", "float16"),
    ),
    Setting("tensor", 1, "Tensor-parallel size; the model is replicated over the other devices.", int, minimum=1),
    Setting("trust_remote_code", False, "Run the Python code that a tokenizer's folder may contain.", bool),
)
CONVERSATION = (
    Setting("system", "", "System message that opens each conversation."),
    Setting("chat_template_kwargs", "", "Options of the chat template, `enable_thinking=False`."),
)
FLAGS = (
    *MODEL,
    Setting("prompt", "", "Text to continue."),
    Setting("prompts_file", "", "Prompts: .txt, one a line; .jsonl, .json, .csv, .parquet with `prompt` and `tools`."),
    Setting(
        "image", (), "Images of the prompt, files; `<image>` in it says where. Files of prompts have a column images."
    ),
    Setting("chat", False, "Send each text as a user's message, in the model's chat template.", bool),
    *CONVERSATION,
    *SAMPLING,
    SAMPLES,
)
CHAT_FLAGS = ("interactive", "against")


def generate(
    model: Model,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    samples: int = 1,
    seed: int = 0,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    logit_bias: Sequence[str] = (),
    bad_words: Sequence[str] = (),
    min_new_tokens: int = 0,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    structured_regex: str = "",
    structured_choice: Sequence[str] = (),
    structured_json: str = "",
    structured_grammar: str = "",
    images: Sequence[Any] | None = None,
    columns: Sequence[Mapping[str, Any]] | None = None,
) -> list[str] | list[list[str]]:
    """The completion of each prompt, as text: one per prompt, or a list of `samples` of them when samples > 1.

    A prompt is text, or a list of messages, which the tokenizer's chat template renders; the completion is then the
    assistant's message. Special tokens are left out. temperature 0 is greedy. A completion ends with an end-of-text
    token or after max_new_tokens; docs/sampling.md explains the other settings. `images` has those of each prompt, a
    list of paths, bytes or PIL images, as rows of data do (docs/vision.md); messages may have them in their parts.
    `columns` has `tools` and `chat_template_kwargs` of each prompt, for its chat template (docs/data.md). Completion i
    of all draws from `fold_in(key(seed), i)`: the same arguments give the same texts. In a run of several processes all
    pass the same prompts, share the work and get all texts.

    Raises ConfigError: no list of prompts, settings out of range or in contradiction, or a model without tokenizer.
    """
    values = dict(locals())
    check_loaded(model, "generate")
    for setting in (*SAMPLING, SAMPLES):
        setting.check(values[setting.name])
    rows = prompt_rows(model, prompts, images, columns)
    if not rows:
        return []
    ids = [row["prompt_ids"] for row in rows]
    engine = engine_of(model, values, samples)
    longest = max(map(len, ids))
    check_positions(model, longest + max_new_tokens, f"{longest} of a prompt, and max_new_tokens = {max_new_tokens}")
    sampled = sample_ids(model, engine, ids, seed, tiles=[row.get(PIXELS) for row in rows])
    texts = [
        completion_text(model, prompts[number // samples], ids[number // samples], row)
        for number, row in enumerate(sampled)
    ]
    return texts if samples == 1 else [texts[i : i + samples] for i in range(0, len(texts), samples)]


def engine_of(model: Model, values: Mapping[str, Any], samples: int = 1) -> Engine:
    """The engine that samples with these values of `SAMPLING`, or its defaults, `samples` completions a prompt.

    Raises ConfigError for settings that contradict each other, or that the model's tokens cannot meet.
    """
    values = {setting.name: setting.default for setting in SAMPLING} | dict(values)
    if values["min_new_tokens"] > values["max_new_tokens"]:
        raise ConfigError(
            f"min_new_tokens is {values['min_new_tokens']}, more than max_new_tokens = {values['max_new_tokens']}"
        )
    check_structured(values, "", "min_new_tokens")
    guide = Guide.of(*(values[f"structured_{kind}"] for kind in ("regex", "choice", "json")), prefix="")
    bias, vocab = read_logit_bias("logit_bias", values["logit_bias"]), model.net.config.vocab_size
    check_tokens("logit_bias", [token for token, _ in bias], vocab)
    check_tokens("stop_token_ids", values["stop_token_ids"], vocab)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    sampling = SamplingParams(
        **{name: values[name] for name in names},
        logit_bias=bias,
        bad_words=bad_word_ids("bad_words", values["bad_words"], model.tokenizer),
        min_tokens=values["min_new_tokens"],
    )
    eos = (*(() if values["ignore_eos"] else eos_ids(model)), *values["stop_token_ids"])
    automata = build_automata(tuple(values["stop"]), guide, model.tokenizer, vocab, eos, "")
    grammar = build_grammar(values["structured_grammar"], model.tokenizer, vocab, eos, "structured_grammar")
    return Engine(sampling, samples, values["max_new_tokens"], compile_work=COMPILE_WORK, net=model.net, eos=eos,
                  automata=automata, grammar=grammar)  # fmt: skip


def completion_text(model: Model, prompt: Prompt, prompt_ids: list[int], ids: list[int]) -> str:
    """The text of sampled ids, without special tokens, decoded as a turn of its own, or behind the text that they
    continue."""
    continues = isinstance(prompt, str) or prompt[-1]["role"] == "assistant"
    return Detokenizer(model.tokenizer, prompt_ids if continues else ()).add(ids, final=True)


def prompt_rows(
    model: Model,
    prompts: Any,
    images: Sequence[Any] | None = None,
    columns: Sequence[Mapping[str, Any]] | None = None,
) -> list[Row]:
    """The `prompt_ids` of each prompt and, where it has images, its tiles `pixels`.

    Raises ConfigError: a model without tokenizer, an empty prompt, or images or columns that it cannot be given.
    """
    check_tokenizer(model)
    if isinstance(prompts, str) or is_conversational(prompts):
        raise ConfigError("prompts is one prompt; it takes a list of them: generate(model, [prompt])")
    for name, given, kind in (("images", images, "a list"), ("columns", columns, "an object")):
        if given is not None and len(given) != len(prompts):
            raise ConfigError(f"{name} has {len(given)} entries for {len(prompts)} prompts; give {kind} for each")
    reader, rows = ImageReader(model.tokenizer), []
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not is_conversational(prompt):
            raise ConfigError(
                f"prompt {number} is {prompt!r:.200}; it takes a text, or a list of messages with role and content"
            )
        given = {} if images is None or not images[number] else {IMAGES: images[number]}
        rendered, found = reader.read({"prompt": prompt, **given}, ("prompt",))
        options = template_options({} if columns is None else columns[number])
        expand = None if found is None else found.expand
        ids = render_prompt(model.tokenizer, rendered["prompt"], **options, expand=expand)
        if not ids:
            raise ConfigError(f"prompt {number} has no tokens; a completion needs something to continue")
        if found is None:
            reader.check_none(ids)
        else:
            found.check(ids)
        rows.append({"prompt_ids": ids} | ({} if found is None else {PIXELS: found.tiles}))
    return rows


def sample_ids(
    model: Model,
    engine: Engine,
    ids: list[list[int]],
    seed: int,
    width: int = 0,
    first_row: int = 0,
    tiles: Sequence[Any] | None = None,
) -> list[list[int]]:
    """The completion ids of each row, `engine.group_size` rows per prompt; `tiles` are of the images of each prompt.

    Prompts are padded to `width`, without it to the longest; row i draws from `fold_in(key(seed), first_row + i)`.
    """
    mesh = model.mesh or make_mesh(devices=jax.devices()[:1])
    width = width or -(-max(map(len, ids)) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    completions = []
    examples = [
        {"prompt_ids": own, PIXELS: of_row} for own, of_row in zip(ids, tiles or [None] * len(ids), strict=True)
    ]
    with jax.set_mesh(mesh):
        at_once, shards = ROWS_AT_ONCE // engine.group_size, row_shards(mesh)
        for start, count, batch, _ in full_batches(examples, at_once, shards, RowGroup.of(mesh)):
            padded = pad_prompts([example["prompt_ids"] for example in batch], width)
            prompts, segments = rows_to_global(padded, mesh)
            images = prompt_images(batch, model.net.config.vision) if tiles is not None else None
            images = rows_to_global(images, mesh)
            first = first_row + start * engine.group_size
            rollout = engine.generate(
                model.params, prompts, segments, jax.random.key(seed), first_row=first, images=images
            )
            tokens, lengths = multihost_utils.process_allgather((rollout.tokens, rollout.lengths), tiled=True)
            rows = range(count * engine.group_size)
            completions += [tokens[row, width : width + lengths[row]].tolist() for row in rows]
    return completions


class GivenPrompts(NamedTuple):
    """The prompts of a command line, with the images of each and its columns for the chat template (None: without)."""

    prompts: list[Any]
    images: list[Any] | None
    columns: list[dict[str, Any]] | None


def read_prompts(prompt: str, file: str, chat: bool, system: str = "", image: Sequence[str] = ()) -> GivenPrompts:
    """The prompts of a command line: `prompt` with the images `image`, or the rows of `file`.

    Texts become a user's message with `chat`; messages open with `system`, unless they have a system message
    themselves. Paths of images in a file start beside it. Raises ConfigError unless exactly one of `prompt` and `file`
    is given, for an `image` beside a file, and when the file cannot be read or has no prompts.
    """
    if bool(prompt) == bool(file):
        raise ConfigError("give --prompt=TEXT or --prompts_file=FILE, one of them")
    if file and image:
        raise ConfigError("--image is of --prompt; a file of prompts has a column images")
    path = Path(file).expanduser()
    prompts, images, columns = [prompt], [list(image)] if image else None, None
    if file and not path.is_file():
        raise ConfigError(f"--prompts_file: there is no file {path} (looked in {Path.cwd()})")
    if file and path.suffix == ".txt":
        if fault := encoding_fault(str(path), "csv"):  # which has a text a line too
            raise ConfigError(f"cannot load {path}: {fault}")
        prompts = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        if not prompts:
            raise ConfigError(f"{path} has no prompts: write one a line")
    elif file:
        rows: Any = sources.load(path)
        names = rows.column_names or []
        if "prompt" not in names:
            raise ConfigError(f"{path} has no column prompt; it has {', '.join(names)}")
        prompts = [without_absent_keys({"prompt": prompt})["prompt"] for prompt in rows["prompt"]]
        if IMAGES in names:
            limits = ImageLimits()
            listed = [own if isinstance(own, list) else [own] if own is not None else [] for own in rows[IMAGES]]
            images = [[HeldImage.of(value, limits, path.parent).held for value in own] for own in listed]
        if given := [name for name in TEMPLATE_COLUMNS if name in names]:
            columns = [without_absent_keys(row) for row in rows.select_columns(given)]
    asked: list[Any] = [[{"role": "user", "content": p}] if chat and isinstance(p, str) else p for p in prompts]
    opening = [{"role": "system", "content": system}] if system else []
    asked = [[*opening, *p] if is_conversational(p) and p[0]["role"] not in SYSTEM_ROLES else p for p in asked]
    return GivenPrompts(asked, images, columns)


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    for argument in argv:
        if (name := argument.removeprefix("--").partition("=")[0]) in CHAT_FLAGS and argument.startswith("--"):
            raise ConfigError(f"--{name} is for conversations, which are a command of their own: jaxrl-llm chat")
    options = load_options(argv, __doc__ or "", FLAGS)
    processes.join()
    keep_compiled()
    if not options["model"]:
        raise ConfigError("--model is missing; write --model=PATH, such as embedded:sort or RUN")
    prompts, images, columns = read_prompts(
        options["prompt"], options["prompts_file"], options["chat"], options["system"], options["image"]
    )
    given = [flag.name for flag in CONVERSATION if options[flag.name]]
    if given and not all(map(is_conversational, prompts)):
        raise ConfigError(f"--{given[0]} is for conversations, but a prompt is text: add --chat, or leave it out")
    if kwargs := split_options(f"chat_template_kwargs({options['chat_template_kwargs']})")[1]:
        merged = [template_options(row, kwargs) for row in columns or [{}] * len(prompts)]
        columns = [{"tools": row["tools"], "chat_template_kwargs": row["template_kwargs"]} for row in merged]
    with waiting(f"loading {options['model']}", stderr_console(), lines=False):
        model = load_named(
            options["model"],
            options["dtype"],
            mesh=make_mesh(tensor=options["tensor"]),
            trust_remote_code=options["trust_remote_code"],
        )
    with waiting("sampling; the first time its programs are compiled", stderr_console(), lines=False):
        settings = {flag.name: options[flag.name] for flag in (*SAMPLING, SAMPLES)}
        completions = generate(model, prompts, **settings, images=images, columns=columns)
    if jax.process_index() > 0:
        return
    if len(completions) == 1 and isinstance(completions[0], str):
        print(completions[0])
        return
    for prompt, texts in zip(prompts, completions, strict=True):
        for text in [texts] if isinstance(texts, str) else texts:
            print(json.dumps({"prompt": prompt, "completion": text}, ensure_ascii=False))
