"""Sample completions of prompts.

    python -m jaxrl_llm generate --model=runs/grpo/hf --prompt="sort:4821="
    python -m jaxrl_llm generate --model=runs/grpo/hf --prompts_file=prompts.jsonl --samples=4

One completion is printed as it is; several as JSON, one object {"prompt", "completion"} a line. To talk to a model, see
`python -m jaxrl_llm chat`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_options
from jaxrl_llm.config.schema import Setting
from jaxrl_llm.data import sources
from jaxrl_llm.data.collate import pad_prompts
from jaxrl_llm.data.templates import Prompt, decode_completion, is_conversational, render_prompt
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.compilation_cache import keep_compiled
from jaxrl_llm.distributed.sharding import make_mesh, row_shards, rows_to_global
from jaxrl_llm.models.model import Model, check_positions, load_model
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.training.evaluation.run import full_batches
from jaxrl_llm.training.logging.console import stderr_console, waiting
from jaxrl_llm.training.setup.specs import WIDTH_MULTIPLE, eos_ids

ROWS_AT_ONCE = 256  # bounds the memory that many prompts take

SAMPLING = (
    Setting("max_new_tokens", 128, "Longest completion, in tokens.", int, minimum=1),
    Setting("temperature", 1.0, "Sampling temperature; 0 takes the most likely token every time.", float, minimum=0),
    Setting("top_p", 1.0, "Sample from the smallest set of tokens with this probability.", float, above=0, maximum=1),
    Setting("top_k", 0, "Sample from this many most likely tokens; 0 is off.", int, minimum=0),
    Setting("min_p", 0.0, "Drop tokens less likely than this fraction of the likeliest.", float, minimum=0, maximum=1),
    Setting("seed", 0, "Root of the random numbers.", int, minimum=0),
)
SAMPLES = Setting("samples", 1, "Completions per prompt.", int, minimum=1)
MODEL = (
    Setting("model", "", "Hugging Face hub id, local folder (such as RUN/hf) or `embedded:<name>`."),
    Setting(
        "dtype",
        "auto",
        "Compute type of the network; auto is float32 on CPU and bfloat16 on accelerators.",
        choices=("auto", "float32", "bfloat16", "float16"),
    ),
    Setting("tensor", 1, "Tensor-parallel size; the model is replicated over the other devices.", int, minimum=1),
)
FLAGS = (
    *MODEL,
    Setting("prompt", "", "Text to continue."),
    Setting("prompts_file", "", "Prompts: .txt with one a line, or .jsonl, .json, .csv, .parquet with `prompt`."),
    Setting("chat", False, "Send each text as a user's message, in the model's chat template.", bool),
    *SAMPLING,
    SAMPLES,
)
CHAT_FLAGS = ("interactive", "against", "system")


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
    """The completion of each prompt, as text: one a prompt, or a list of `samples` of them when samples > 1.

    A prompt is text, or a list of messages, which the tokenizer's chat template renders; the completion is then the
    assistant's message. Special tokens are left out. temperature 0 is greedy. A completion ends with an end-of-text
    token or after max_new_tokens. Completion i of all draws from `fold_in(key(seed), i)`: the same arguments give the
    same texts. In a run of several processes all pass the same prompts, share the work and get all texts.

    Raises ConfigError: no list of prompts, a setting out of range, or a model without tokenizer.
    """
    values = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "samples": samples,
        "seed": seed,
    }
    for setting in (*SAMPLING, SAMPLES):
        setting.check(values[setting.name])
    ids = prompt_ids(model, prompts)
    if not ids:
        return []
    longest = max(map(len, ids))
    check_positions(model, longest + max_new_tokens, f"{longest} of a prompt, and max_new_tokens = {max_new_tokens}")
    sampling = SamplingParams(temperature, top_p, top_k, min_p)
    engine = Engine(model.net, sampling, samples, max_new_tokens, eos_ids(model))
    texts = [str(decode_completion(model.tokenizer, row, False)) for row in sample_ids(model, engine, ids, seed)]
    return texts if samples == 1 else [texts[i : i + samples] for i in range(0, len(texts), samples)]


def prompt_ids(model: Model, prompts: Any) -> list[list[int]]:
    """The token ids of each prompt; raises ConfigError for a model without tokenizer and an empty prompt."""
    if model.tokenizer is None:
        raise ConfigError(
            f"the model {model.path} has no tokenizer, so it cannot read text; add its files to the folder"
        )
    if isinstance(prompts, str) or is_conversational(prompts):
        raise ConfigError("prompts is one prompt; it takes a list of them: generate(model, [prompt])")
    ids = [render_prompt(model.tokenizer, prompt) for prompt in prompts]
    if [] in ids:
        raise ConfigError(f"prompt {ids.index([])} has no tokens; a completion needs something to continue")
    return ids


def sample_ids(
    model: Model, engine: Engine, ids: list[list[int]], seed: int, width: int = 0, first_row: int = 0
) -> list[list[int]]:
    """The completion ids of each row, `engine.group_size` rows a prompt.

    Prompts are padded to `width`, without it to the longest; row i draws from `fold_in(key(seed), first_row + i)`.
    """
    mesh = model.mesh or make_mesh(devices=jax.devices()[:1])
    width = width or -(-max(map(len, ids)) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    completions = []
    with jax.set_mesh(mesh):
        for start, count, batch in full_batches(ids, ROWS_AT_ONCE // engine.group_size, row_shards(mesh)):
            prompts, segments = rows_to_global(pad_prompts(batch, width), mesh)
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
    prompts = [prompt]
    if file:
        path = Path(file).expanduser()
        if not path.is_file():
            raise ConfigError(f"--prompts_file: there is no file {path} (looked in {Path.cwd()})")
        if path.suffix == ".txt":
            prompts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            if not prompts:
                raise ConfigError(f"{path} has no prompts: write one a line")
        else:
            rows = sources.load(path)
            columns = rows.column_names or []
            if "prompt" not in columns:
                raise ConfigError(f"{path} has no column prompt; it has {', '.join(columns)}")
            prompts = list(rows["prompt"])
    return [[{"role": "user", "content": p}] if chat and isinstance(p, str) else p for p in prompts]


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    for argument in argv:
        if (name := argument.removeprefix("--").partition("=")[0]) in CHAT_FLAGS and argument.startswith("--"):
            raise ConfigError(f"--{name} is for conversations, which are a command of their own: jaxrl-llm chat")
    options = load_options(argv, __doc__ or "", FLAGS)
    processes.join()
    keep_compiled()
    if not options["model"]:
        raise ConfigError("--model is missing; write --model=PATH, such as embedded:sort or RUN/hf")
    prompts = read_prompts(options["prompt"], options["prompts_file"], options["chat"])
    with waiting(f"loading {options['model']}", stderr_console(), lines=False):
        model = load_model(options["model"], options["dtype"], mesh=make_mesh(tensor=options["tensor"]))
    with waiting("sampling; the first time its programs are compiled", stderr_console(), lines=False):
        completions = generate(model, prompts, **{flag.name: options[flag.name] for flag in (*SAMPLING, SAMPLES)})
    if jax.process_index() > 0:
        return
    if len(completions) == 1 and isinstance(completions[0], str):
        print(completions[0])
        return
    for prompt, texts in zip(prompts, completions, strict=True):
        for text in [texts] if isinstance(texts, str) else texts:
            print(json.dumps({"prompt": prompt, "completion": text}, ensure_ascii=False))
