"""Hugging Face model folders: find, read and write config.json, safetensors and tokenizer, through the family tables.

Weights are read leaf by leaf, each device reading only its own shards, and written tensor by tensor, so that a model is
never twice in memory.
"""

import contextlib
import difflib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.files import read_json, write_json
from jaxrl_llm.config.resolve import naming
from jaxrl_llm.models.families import FAMILIES, family_for, family_of, llava, rotary
from jaxrl_llm.models.families.decoder import DTYPES, LAYER, settings
from jaxrl_llm.models.files import quantized, remote, safetensors, text_part
from jaxrl_llm.models.net import Net, Params

EMBEDDED = Path(__file__).parent.parent / "embedded"
DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken", "README.md", "LICENSE*"]
# Patterns of the files of an export: a new export replaces these, and no others.
EXPORTED = (
    "*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.py", "merges.txt", "vocab.txt", "README.md",
    "LICENSE*", "curves.svg", "*.vocab", "*.codes", "*.bpe", "*.spm", "*.dict",
)  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
TEMPLATES = "additional_chat_templates"  # the one folder that a tokenizer writes
HUB_NAME = r"[A-Za-z0-9][\w.-]*"
STEPS = "hf_steps"  # of a run, with the models of earlier steps
CRITIC = "critic"  # of a run, and of each of those, with PPO's critic


def locate(
    path: str | os.PathLike[str], allow_pickle: bool = False, config_only: bool = False, revision: str | None = None
) -> Path:
    """The folder of a model: `embedded:<name>` (comes with the package), a local folder, a Hugging Face hub id, or the
    URL of a folder.

    A hub id (`Qwen/Qwen3-0.6B`) is downloaded once, of a `revision` (branch, tag or commit) if one is named, and a URL
    (`gs://bucket/model`) as `remote.fetch` says: only json, safetensors and tokenizer files, and pickles if allowed;
    with `config_only` its config.json and the settings of its image processor alone. Raises ConfigError when there is
    no such model, for the folder of a run or of a checkpoint, and for the revision of a folder.
    """
    name = os.fspath(path)
    if revision is not None and is_folder(name):
        raise ConfigError(f"model.revision is {revision!r}, but {name} is a folder, which has no revisions")
    if name.startswith("embedded:"):
        folder = EMBEDDED / name.removeprefix("embedded:")
        if not (folder / "config.json").is_file():
            known = sorted(f"embedded:{file.parent.name}" for file in EMBEDDED.glob("*/config.json"))
            raise ConfigError(f"there is no embedded model {name}; there are: {', '.join(known) or 'none'}.")
        return folder
    patterns = [*DOWNLOADED, "pytorch_model*.bin"] if allow_pickle else DOWNLOADED
    patterns = ["config.json", *PROCESSOR_FILES] if config_only else patterns
    url = remote.is_url(name)
    folder = remote.fetch(name, patterns, "model path") if url else Path(name).expanduser()
    if folder.is_dir():
        entries = read_json(folder / "config.json") or {}
        if "output_dir" in entries and "model_type" not in entries:  # the record of a run, of the same name
            folders = (folder / "hf", *reversed(step_folders(folder).values()))
            here = next((x for x in folders if (x / "config.json").is_file()), None)
            trained = f"{name.rstrip('/')}/hf" if url else here
            way_out = f"give {trained}" if trained else f"jaxrl-llm export --run={name} writes that of a checkpoint"
            raise ConfigError(f"{name} is the folder of a run, which has its model in a folder of its own: {way_out}")
        if not entries and folder.name.isdecimal() and folder.parent.name == "checkpoints":
            run = folder.parent.parent
            raise ConfigError(
                f"{name} is a checkpoint, which is no model yet: jaxrl-llm export --run={run} --step={folder.name} "
                "--output=FOLDER writes it as one"
            )
        if url and not entries:
            raise ConfigError(f"model path {name!r} has no config.json: it is not a Hugging Face model folder.")
        return folder
    if not re.fullmatch(rf"{HUB_NAME}/[\w.-]+", name):
        raise ConfigError(
            f"model path {name!r}: there is no such folder{_nearest(name)}, and it is neither a Hugging Face hub id "
            "(`owner/name`) nor `embedded:<name>`."
        )
    return _download(name, patterns, revision)


def _nearest(name: str) -> str:
    """` (the closest is ...)`, of the folders beside the first part of a path that is not there; empty without any."""
    missing = Path(name).expanduser()
    while not missing.parent.is_dir():
        missing = missing.parent
    with contextlib.suppress(OSError):  # of a folder that cannot be listed
        beside = [path.name for path in missing.parent.iterdir() if path.is_dir()]
        if near := difflib.get_close_matches(missing.name, beside, 1):
            return f" (the closest is {missing.with_name(near[0])})"
    return ""


def is_folder(name: str) -> bool:
    """True for a model that is no hub id: of the package, here or behind a URL."""
    return name.startswith("embedded:") or remote.is_url(name) or Path(name).expanduser().is_dir()


def step_folders(run: Path) -> dict[int, Path]:
    """The folders of models in `run/hf_steps`, each by its step, oldest first."""
    found = (run / STEPS).iterdir() if (run / STEPS).is_dir() else ()
    return dict(sorted((int(path.name), path) for path in found if path.name.isdecimal() and path.is_dir()))


def _download(name: str, patterns: list[str], revision: str | None, setting: str = "model path") -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and of no use for local folders

    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*", remote.LEFT_OUT]
            )
        )
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{setting} {name!r}{f', revision {revision!r}' if revision else ''}: there is no such folder here"
            f"{_nearest(name)}, and the Hugging Face hub did not give it ({reason}). "
            "Check the name and the connection (or HF_TOKEN, for a gated model)."
        ) from error


def read_config(folder: str | os.PathLike[str], entries: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The entries of the folder's config.json; `entries` take the place of those of the same name, of a model with a
    vision part those of its text part. Of a model whose text part alone is read they are that part's.

    Raises ConfigError when it is missing or no JSON object.
    """
    config = read_json(Path(folder) / "config.json")
    if config is None:
        raise ConfigError(f"{folder} has no config.json: it is not a Hugging Face model folder.")
    config = text_part.entries_of(config)
    if config.get("model_type") in llava.TIED_BY_FILES and config.get("tie_word_embeddings") is None:
        tied = safetensors.head_is_embedding(Path(folder), quantized.entry_of(config))
        config |= {} if tied is None else {"tie_word_embeddings": tied}
    if entries and isinstance(config.get("text_config"), dict):  # of a model whose vision part is read too
        return {**config, "text_config": rotary.overridden(config["text_config"], entries)}
    return rotary.overridden(config, entries or {})


def has_tokenizer(folder: str | os.PathLike[str]) -> bool:
    """True when the folder has tokenizer files."""
    return any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)


def remember_images(tokenizer: Any, folder: str | os.PathLike[str]) -> None:
    """Sets `tokenizer.image_folder` to the folder of a model that reads images, or None.

    `data/image_rows.py` reads there how images become tokens, and writes these into the texts that the tokenizer gets.
    """
    config = read_config(folder)
    tokenizer.image_folder = Path(folder) if "vision_config" in config else None
    own = getattr(FAMILIES.get(str(config.get("model_type"))), "CHAT_TEMPLATE", None)
    if own is not None and not getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = own


def load_tokenizer(folder: str | os.PathLike[str], trust_remote_code: bool = False):
    """The folder's tokenizer (`transformers.AutoTokenizer`); raises ConfigError when it is missing or unreadable.

    Python code that the folder brings is run with `trust_remote_code` only.
    """
    if not has_tokenizer(folder):
        raise ConfigError(f"{folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}).")
    try:
        if _is_generic_tokenizer(Path(folder)):
            from transformers import PreTrainedTokenizerFast

            return _quiet(PreTrainedTokenizerFast.from_pretrained(os.fspath(folder)))
        from transformers import AutoTokenizer  # seconds to import: it imports torch where that is installed

        return _quiet(AutoTokenizer.from_pretrained(os.fspath(folder), trust_remote_code=trust_remote_code))
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the tokenizer in {folder} cannot be read: {reason}") from error


def _quiet(tokenizer: Any) -> Any:
    """The tokenizer without its warning that a text is longer than model_max_length.

    A text may be: a limit truncates or drops it, and rows beyond the model's positions are refused (`check_positions`).
    """
    if hasattr(tokenizer, "deprecation_warnings"):  # the notices that were given, as transformers keeps them
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def find_tokenizer(
    path: str, trust_remote_code: bool = False, revision: str | None = None, setting: str = "model.path"
) -> Any:
    """The tokenizer of a model, or a folder, hub id or URL of a tokenizer alone, without reading or fetching weights.

    Raises ConfigError, which names the setting, when there is none.
    """
    if is_folder(path):
        if remote.is_url(path):
            code = ["*.py"] if trust_remote_code else []
            folder = remote.fetch(path, {*DOWNLOADED, *code} - {"*.safetensors"}, f"{setting} =")
        else:
            folder = locate(path, revision=revision)
        if not has_tokenizer(folder):
            raise ConfigError(
                f"{setting} = {path!r} has no tokenizer files; add them to the folder, or name another with "
                "model.tokenizer"
            )
        return load_tokenizer(folder, trust_remote_code)
    if not re.fullmatch(rf"(?:{HUB_NAME}/)?{HUB_NAME}", path):
        raise ConfigError(
            f"{setting} = {path!r}: there is no such folder{_nearest(path)}, and it is neither a Hugging Face hub id "
            "(`owner/name`) nor `embedded:<name>`"
        )
    # transformers would ask for each file by itself, six times where the hub is out of reach: two minutes of waiting.
    patterns = {*DOWNLOADED, *EXPORTED} - {"*.safetensors", *(() if trust_remote_code else ("*.py",))}
    folder = _download(path, sorted(patterns), revision, f"{setting} =")
    with naming(f"cannot load the tokenizer of {setting} = {path!r}"):
        return load_tokenizer(folder, trust_remote_code)


def _is_generic_tokenizer(folder: Path) -> bool:
    """True where `AutoTokenizer` would choose the class that is made of tokenizer.json alone.

    For models of other types it may choose a class of theirs, whatever tokenizer_config.json says.
    """
    settings = read_json(folder / "tokenizer_config.json") or {}
    model = read_json(folder / "config.json") or {}
    return (
        settings.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
        and model.get("model_type") in ("llama", "smollm3", "smolvlm", "idefics3")
        and "auto_map" not in settings
        and (folder / "tokenizer.json").is_file()
    )


def load(
    folder: str | os.PathLike[str],
    mesh: Mesh | None = None,
    dtype: str = "float32",
    param_dtype: str = "float32",
    seed: int = 0,
    allow_pickle: bool = False,
    entries: Mapping[str, Any] | None = None,
    **overrides,
) -> tuple[Net, Params]:
    """The net of a model folder and its parameters, each created already sharded over `mesh` (or on one device).

    `dtype` is that of the computation, `param_dtype` that of the parameters; `overrides` are other ModelConfig fields
    (`remat="block"`, or `quantize="nf4"`, which stores the layers' matrices so), `entries` those of config.json.
    With `head="score"` or "step" a language model's checkpoint gets a new such head, drawn from `seed`. Parameters of
    adapters are not here; see peft.py. With `allow_pickle` a folder without safetensors is read from
    pytorch_model.bin; see pickles.py.

    Raises ConfigError, before any weight is read, for an unsupported model and for tensors that are missing, unexpected
    or of another shape than config.json says.
    """
    folder = Path(folder)
    hf = read_config(folder, entries)
    family = family_of(hf)
    net = Net(family.to_config(hf, dtype=dtype, param_dtype=param_dtype, **overrides))
    with contextlib.ExitStack() as stack:
        files = _opened(folder, hf, stack, allow_pickle)
        tensors = files.stored_tensors(net, family)
        own_head = net.config.head != "lm"
        if own_head and not any(name.startswith("score.") for name in files.where):
            tensors = [tensor for tensor in tensors if not tensor.leaf.startswith("score/")]
        unused = getattr(family, "unused_tensors", lambda _: set())(net.config)
        heads = safetensors.HEADS if net.config.tie_embeddings or own_head else ()
        # DeepSeek's and GLM's files hold the layers of multi-token prediction behind those of the model.
        count = (hf.get("text_config") or hf).get("num_nextn_predict_layers") or 0
        beyond = range(net.config.layers, net.config.layers + count)
        models = ("model.", "model.language_model.", "language_model.model.")
        starts = [LAYER.replace("model.", model) for model in models]
        passed = tuple(start.format(layer=layer) for start in starts for layer in beyond)
        passed += getattr(family, "UNREAD", ())
        constants = safetensors.constants_of(family, net.config)
        spare = {*unused, *heads, *constants, *(name for name in files.where if name.startswith(passed))}
        files.check(tensors, spare)
        files.check_constants(constants)
        if net.config.tie_embeddings and net.config.head == "lm":
            files.check_tied(next(tensor.name for tensor in tensors if tensor.leaf == "embed/weight"))
        return net, safetensors.read_params(net, files, tensors, mesh, seed)


def _opened(folder: Path, hf: dict[str, Any], stack: contextlib.ExitStack, allow_pickle: bool) -> safetensors.Files:
    files = safetensors.Files(folder, stack, allow_pickle, quantized.entry_of(hf))
    if "text_part_of" in hf:
        files.where = text_part.tensors_of(files.where)
    return files


@contextlib.contextmanager
def opened_kernels(
    folder: Path, net: Net, allow_pickle: bool = False, entries: Mapping[str, Any] | None = None
) -> Iterator[Callable[[str, int | None], np.ndarray]]:
    """A function that reads a kernel `[in, out]` of a layer from the model's files, in fp32, by its path in `net`."""
    hf = read_config(folder, entries)
    with contextlib.ExitStack() as stack:
        files = _opened(folder, hf, stack, allow_pickle)
        stored = {(tensor.leaf, tensor.layer): tensor for tensor in files.stored_tensors(net.base, family_of(hf))}
        yield lambda path, layer: files.read(stored[path, layer], (slice(None), slice(None)), np.dtype(np.float32))


def load_net(folder: str | os.PathLike[str], entries: Mapping[str, Any] | None = None, **overrides) -> Net:
    """The net that the folder's config.json describes, with other ModelConfig fields as `overrides` say."""
    hf = read_config(folder, entries)
    return Net(family_of(hf).to_config(hf, **overrides))


def save(
    net: Net,
    params: Params,
    folder: str | os.PathLike[str],
    tokenizer=None,
    hf_config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    dtype: str | None = None,
    max_shard_bytes: float = 5e9,
) -> None:
    """Writes a folder that transformers, vLLM and `load` read: config.json, safetensors, tokenizer.

    Adapters are merged into the matrices they belong to, and quantised matrices written as numbers.

    `hf_config` is the config.json the net was loaded from: its other entries are kept, and it names the family.
    `generation` goes to generation_config.json. `dtype` None keeps the parameters' own, bit for bit.

    The folder appears complete or not at all: it is written beside, and renamed in place of an earlier export.
    With many processes all must call; the first one writes.
    Raises ConfigError when no family fits the net or `folder` holds something other than a model.
    """
    folder = Path(folder).absolute()
    family = family_for(net.config) if hf_config is None else family_of(hf_config)
    hf = _exported_config(net.plain, family, hf_config, dtype)
    refuse_foreign(folder, "config.json")
    with replacing(folder) as partial:
        safetensors.write(partial, net, family, params, hf["dtype"], max_shard_bytes)
        with safetensors.by_the_first():
            if jax.process_index() == 0:
                write_json(partial / "config.json", hf)
                if generation is not None:
                    write_json(partial / "generation_config.json", generation)
                if tokenizer is not None:
                    tokenizer.save_pretrained(os.fspath(partial))
                    if net.config.vision is not None:
                        _write_processor(tokenizer, partial)


def _write_processor(tokenizer: Any, folder: Path) -> None:
    """Copies to `folder` the files that say how images become tokens, with the settings that the tokenizer holds."""
    source: Path | None = getattr(tokenizer, "image_folder", None)
    if source is None:
        return
    settings = getattr(tokenizer, "image_settings", {})
    for name in PROCESSOR_FILES:
        entries = read_json(source / name)
        if entries is None:
            continue
        # Version 5 of transformers may write the image processor's entries among those of the whole.
        part = entries.get("image_processor") if name == "processor_config.json" else entries
        if settings and isinstance(part, dict):
            part.update(settings)
            write_json(folder / name, entries)
        else:
            shutil.copyfile(source / name, folder / name)


def _exported_config(net: Net, family, hf_config: dict[str, Any] | None, dtype: str | None) -> dict[str, Any]:
    """The config.json to write; raises ConfigError where the family cannot describe the net."""
    config = net.config
    hf = family.from_config(config, hf_config)
    # Matrices are written as numbers, a text part as a model of its own, and no code that auto_map would name.
    left_out = ("quantization_config", "expert_dtype", "text_part_of", "auto_map")
    hf = {name: x for name, x in hf.items() if name not in left_out}
    if isinstance(hf.get("text_config"), dict):
        hf["text_config"] = {name: x for name, x in hf["text_config"].items() if name not in left_out}
    hf["dtype"] = dtype or config.param_dtype
    if hf["dtype"] not in DTYPES:
        raise ConfigError(f"dtype = {dtype!r} is not one of {', '.join(DTYPES)}.")
    if hf_config is None or "torch_dtype" in hf_config:
        hf["torch_dtype"] = hf["dtype"]
    described = family.to_config(hf, **settings(config))
    if described != config:
        raise ConfigError(
            f"a {family.MODEL_TYPE} config.json cannot describe this model: {config} would be read as {described}."
        )
    return hf


def refuse_foreign(folder: Path, sign: str) -> None:
    """Raises ConfigError when `folder` holds anything that an export would destroy, or not the file `sign`."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file; the model is written to a folder.")
    entries = sorted(folder.iterdir())
    other = [
        entry.name
        for entry in entries
        if (entry.name != TEMPLATES if entry.is_dir() else not any(fnmatch(entry.name, name) for name in EXPORTED))
    ]
    if other or (entries and not (folder / sign).is_file()):
        named = f" ({', '.join(other[:3])})" if other else f", and no {sign}"
        raise ConfigError(f"{folder} holds other files than an exported model's{named}; choose a new folder.")


def put_right(folder: Path) -> None:
    """Removes what a killed `replacing` left beside `folder`, which comes back where it had been moved away."""
    name = re.escape(folder.name)
    left = [path for path in folder.parent.iterdir() if re.fullmatch(rf"\.{name}\.(partial|earlier)-\d+", path.name)]
    moved = [path for path in left if path.name.startswith(f".{folder.name}.earlier-")]
    if moved and not folder.exists():
        max(moved, key=lambda path: path.stat().st_mtime).rename(folder)
    for path in left:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A folder to write to, which takes the place of `folder` when the block ends well and vanishes when it fails."""
    first = jax.process_index() == 0
    partial, earlier = (folder.with_name(f".{folder.name}.{word}-{os.getpid()}") for word in ("partial", "earlier"))
    with safetensors.by_the_first():
        if first:
            folder.parent.mkdir(parents=True, exist_ok=True)
            put_right(folder)
            partial.mkdir()
    try:
        yield partial
        with safetensors.by_the_first():
            if first:
                if folder.exists():
                    folder.rename(earlier)
                partial.rename(folder)
    finally:
        if first:
            put_right(folder)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"saved {folder.name}")  # its parent may have another name on each machine
