"""Sample completions, or talk to a model.

    python -m jaxrl_llm generate --model=runs/grpo/hf --prompt="sort:4821="
    python -m jaxrl_llm generate --model=runs/grpo/hf --interactive --against=embedded:sort

One completion is printed as it is; several as JSON, one object {"prompt", "completion"} a line. `--interactive` reads
lines, from a terminal or a pipe, and answers each; `--against` shows the answers of two models side by side.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxrl_llm.commands.chat import Speaker, bucket, check_alone, converse
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_options
from jaxrl_llm.config.schema import Key
from jaxrl_llm.data import sources
from jaxrl_llm.data.collate import pad_prompts
from jaxrl_llm.data.templates import Prompt, decode_completion, is_conversational, render_prompt
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.compilation_cache import keep_compiled
from jaxrl_llm.distributed.sharding import make_mesh, row_shards, rows_to_global
from jaxrl_llm.models.model import Model, load_model
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.training.evaluation.run import full_batches
from jaxrl_llm.training.setup import WIDTH_MULTIPLE, eos_ids

ROWS_AT_ONCE = 256  # bounds the memory that many prompts take

SETTINGS = (
    Key("max_new_tokens", 128, "Longest completion, in tokens.", int, minimum=1),
    Key("temperature", 1.0, "Sampling temperature; 0 takes the most likely token every time.", float, minimum=0),
    Key("top_p", 1.0, "Sample from the smallest set of tokens with this probability.", float, above=0, maximum=1),
    Key("top_k", 0, "Sample from this many most likely tokens; 0 is off.", int, minimum=0),
    Key("min_p", 0.0, "Drop tokens less likely than this fraction of the likeliest.", float, minimum=0, maximum=1),
    Key("samples", 1, "Completions per prompt.", int, minimum=1),
    Key("seed", 0, "Root of the random numbers.", int, minimum=0),
)
FLAGS = (
    Key("model", "", "Hugging Face hub id, local folder (such as RUN/hf) or `embedded:<name>`."),
    Key("prompt", "", "Text to go on from."),
    Key("prompts_file", "", "File of prompts: .txt with one a line, or .jsonl, .json, .csv, .parquet with `prompt`."),
    Key("chat", None,
        "Send each text as a user's message, in the model's chat template; none is false, or, with --interactive, true "
        "where the model has one.", bool),
    Key("interactive", False, "Read one line after the other and answer each.", bool),
    Key("against", "", "With --interactive: a second model, whose answers are shown beside."),
    Key("system", "", "With --interactive: a system message that opens each conversation."),
    *SETTINGS,
    Key("dtype", "auto", "Type the network computes in; auto is float32 on CPU and bfloat16 on accelerators.",
        choices=("auto", "float32", "bfloat16", "float16")),
    Key("tensor", 1, "Devices that share the model; the others hold copies.", int, minimum=1),
)  # fmt: skip


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
) -> list[str] | list[list[str]]:
    """The text that the model writes after each prompt: one a prompt, or a list of `samples` of them when samples > 1.

    A prompt is text, or a list of messages, which the tokenizer's chat template renders; then the text is the
    assistant's. Special tokens are left out. temperature 0 is greedy. A text ends with an end-of-text token or after
    max_new_tokens. Sample i of all draws from `fold_in(key(seed), i)`: the same arguments give the same texts.
    With many processes all give the same prompts, share the work and get all texts.

    Raises ConfigError: no list of prompts, a setting out of range, or a model without tokenizer.
    """
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k,
                "min_p": min_p, "samples": samples, "seed": seed}  # fmt: skip
    for key in SETTINGS:
        key.check(settings[key.name])
    ids = _prompt_ids(model, prompts)
    if not ids:
        return []
    sampling = SamplingParams(temperature, top_p, top_k, min_p)
    engine = Engine(model.net, sampling, samples, max_new_tokens, eos_ids(model))
    texts = [str(decode_completion(model.tokenizer, row, False)) for row in _sample(model, engine, ids, seed)]
    return texts if samples == 1 else [texts[i : i + samples] for i in range(0, len(texts), samples)]


def _prompt_ids(model: Model, prompts: Any) -> list[list[int]]:
    if model.tokenizer is None:
        raise ConfigError(
            f"the model {model.path} has no tokenizer, so it cannot read text; add its files to the folder"
        )
    if isinstance(prompts, str) or is_conversational(prompts):
        raise ConfigError("prompts is one prompt; it takes a list of them: generate(model, [prompt])")
    ids = [render_prompt(model.tokenizer, prompt) for prompt in prompts]
    if [] in ids:
        raise ConfigError(f"prompt {ids.index([])} has no tokens; a completion needs something to go on from")
    return ids


def _sample(
    model: Model, engine: Engine, ids: list[list[int]], seed: int, width: int = 0, first_row: int = 0
) -> list[list[int]]:
    """The completion ids of each row, `engine.group_size` rows a prompt.

    Prompts are padded to `width`, without it to the longest; row i draws from `fold_in(key(seed), first_row + i)`.
    """
    mesh = model.mesh or make_mesh(devices=jax.devices()[:1])
    width = width or -(-max(map(len, ids)) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    completions = []
    with jax.set_mesh(mesh):
        for start, count, own in full_batches(ids, ROWS_AT_ONCE // engine.group_size, row_shards(mesh)):
            prompts, segments = rows_to_global(pad_prompts(own, width), mesh)
            first = first_row + start * engine.group_size
            rollout = engine.generate(model.params, prompts, segments, jax.random.key(seed), first_row=first)
            tokens, lengths = multihost_utils.process_allgather((rollout.tokens, rollout.lengths), tiled=True)
            rows = range(count * engine.group_size)
            completions += [tokens[row, width : width + lengths[row]].tolist() for row in rows]
    return completions


def read_prompts(prompt: str, file: str, chat: bool) -> list[Any]:
    """The prompts of the command line: `prompt`, or those in `file`; texts become a user's message with `chat`.

    Raises ConfigError unless exactly one of them is given, or when the file cannot be read or has no prompts.
    """
    if bool(prompt) == bool(file):
        raise ConfigError("give --prompt=TEXT or --prompts_file=FILE, one of them")
    prompts = _in_file(Path(file).expanduser()) if file else [prompt]
    return [[{"role": "user", "content": p}] if chat and isinstance(p, str) else p for p in prompts]


def _in_file(file: Path) -> list[Any]:
    if not file.is_file():
        raise ConfigError(f"--prompts_file: there is no file {file} (looked in {Path.cwd()})")
    if file.suffix == ".txt":
        prompts = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not prompts:
            raise ConfigError(f"{file} has no prompts: write one a line")
        return prompts
    rows = sources.load(file)
    columns = rows.column_names or []
    if "prompt" not in columns:
        raise ConfigError(f"{file} has no column prompt; it has {', '.join(columns)}")
    return list(rows["prompt"])


def _talk(options: dict[str, Any]) -> None:
    """The loop of --interactive; raises ConfigError for flags that have no meaning in it."""
    check_alone()
    for name in ("prompt", "prompts_file"):
        if options[name]:
            raise ConfigError(f"--{name} is given with --interactive, which reads lines: leave it out")
    if options["samples"] != 1:
        raise ConfigError("--samples is more than 1, but a conversation goes on from one answer: leave it out")
    paths = [options["model"], *([options["against"]] if options["against"] else [])]
    speakers = [_speaker(path, options) for path in paths[::-1]]  # the one before training on the left
    converse(speakers)


def _speaker(path: str, options: dict[str, Any]) -> Speaker:
    model = load_model(path, options["dtype"], mesh=make_mesh(tensor=options["tensor"]))
    template = bool(getattr(model.tokenizer, "chat_template", None))
    chat = template if options["chat"] is None else options["chat"]
    if options["system"] and not chat:
        raise ConfigError(f"--system is given, but {path} is not asked through a chat template: leave it out")
    return Speaker(path, answerer(model, **{key.name: options[key.name] for key in SETTINGS}), chat, options["system"])


def answerer(
    model: Model,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    samples: int = 1,
    seed: int = 0,
) -> Callable[[Prompt, int], str]:
    """A function that gives the text after a prompt; the settings are those of `generate`, with one sample.

    Its second argument is the number of the turn, from 1, which draws random numbers of its own. Prompts are padded to
    few widths (`interactive.bucket`), so that a conversation compiles one program for each and not one for each turn.
    The function raises ConfigError for a prompt that with its completion is longer than the model's positions.
    """
    assert samples == 1
    engine = Engine(model.net, SamplingParams(temperature, top_p, top_k, min_p), 1, max_new_tokens, eos_ids(model))
    positions = (model.hf_config or {}).get("max_position_embeddings")

    def answer(prompt: Prompt, turn: int) -> str:
        (ids,) = _prompt_ids(model, [prompt])
        width = bucket(len(ids))
        if positions is not None and len(ids) + max_new_tokens > positions:
            raise ConfigError(
                f"the conversation has {len(ids)} tokens; with --max_new_tokens={max_new_tokens} that is more than the "
                f"{positions} that {model.path} was made for"
            )
        width = width if positions is None else min(width, positions - max_new_tokens)
        (row,) = _sample(model, engine, [ids], seed, width, turn - 1)
        return str(decode_completion(model.tokenizer, row, False))

    return answer


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    options = load_options(argv, __doc__ or "", FLAGS)
    processes.join()
    keep_compiled()
    if not options["model"]:
        raise ConfigError("--model is missing; write --model=PATH, such as embedded:sort or RUN/hf")
    if options["interactive"]:
        _talk(options)
        return
    for name in ("against", "system"):
        if options[name]:
            raise ConfigError(f"--{name} is for --interactive: write that too")
    prompts = read_prompts(options["prompt"], options["prompts_file"], bool(options["chat"]))
    model = load_model(options["model"], options["dtype"], mesh=make_mesh(tensor=options["tensor"]))
    found = generate(model, prompts, **{key.name: options[key.name] for key in SETTINGS})
    if jax.process_index() > 0:
        return
    if len(found) == 1 and isinstance(found[0], str):
        print(found[0])
        return
    for prompt, texts in zip(prompts, found, strict=True):
        for text in [texts] if isinstance(texts, str) else texts:
            print(json.dumps({"prompt": prompt, "completion": text}, ensure_ascii=False))
