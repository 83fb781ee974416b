"""`Model`: a network with its parameters, tokenizer and Hugging Face entries, loaded and saved in one call."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Images
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.entries import makes_up
from jaxrl_llm.config.files import read_json
from jaxrl_llm.config.secrets import masked
from jaxrl_llm.distributed.devices import multiplies_fp8
from jaxrl_llm.distributed.processes import all_or_none
from jaxrl_llm.distributed.sharding import on_device, shardings
from jaxrl_llm.models.adapters import lora, lora_init, peft
from jaxrl_llm.models.adapters.peft_patterns import ALIKE, AdapterPatterns, with_patterns
from jaxrl_llm.models.families import family_for, family_of
from jaxrl_llm.models.families.rotary import max_positions
from jaxrl_llm.models.files import hf, safetensors
from jaxrl_llm.models.kernels.eight_bit_matmul import MATMUL_DTYPES, check_matmul_dtype
from jaxrl_llm.models.kernels.fused_attention import check_attention, is_before_ampere
from jaxrl_llm.models.net import Net, Params, restacked
from jaxrl_llm.models.quantize import KINDS
from jaxrl_llm.models.rate_factors import rate_factors
from jaxrl_llm.models.trained import EVERYTHING
from jaxrl_llm.models.transformer import segment_positions


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model: its net, its parameters, and what came with them. `model(tokens, segments, positions)` gives
    logits."""

    net: Net
    params: Params
    tokenizer: Any = None
    hf_config: dict[str, Any] | None = None
    generation: dict[str, Any] | None = None  # entries of generation_config.json
    path: str | None = None
    revision: str | None = None  # of a hub id
    mesh: Mesh | None = None
    changed: bool = False  # its parameters, adapters aside, may be others than those at `path`

    def __repr__(self) -> str:
        """A line without numbers: a notebook shows what a cell ends with, and those of all layers are no reading."""
        count = sum(x.size for x in jax.tree.leaves(self.net.plain.shapes()))
        family = (self.hf_config or {}).get("model_type", "model")
        return f"<Model {self.path or 'in memory'}: {family}, {count / 1e6:.2f} M parameters, {self.net.config.dtype}>"

    @property
    def max_positions(self) -> int | None:
        """The longest rows that it is made for, by its table of positions or its config.json; None: nothing says."""
        return self.net.config.position_limit or max_positions(self.hf_config or {})

    def __call__(
        self, tokens, segments=None, positions=None, images: Images | None = None, prompt_width: int = 0
    ) -> jax.Array:
        """Logits `[N,T,V]` in fp32 of tokens `[N,T]` (scores `[N,T]` with the score head, `[N,T,2]` with a step head).

        segments `[N,T]`: 0 is padding, other numbers tell packed documents apart (default: all 1);
        positions `[N,T]`: default counts from 0 in each segment; images: what the rows' image tokens stand for;
        prompt_width: the columns of prompts, whose tokens see each other in a PaliGemma; other models read it not.

        Raises ConfigError for tokens of another shape, and for positions behind those that the model has learned.
        """
        if isinstance(tokens, str) or np.ndim(tokens) != 2:
            shown = f"{tokens!r:.80}" if isinstance(tokens, str | list) else f"an array {np.shape(tokens)}"
            raise ConfigError(f"a model reads rows of token ids, [N,T], and not {shown}: one row is model([ids])")
        if (most := self.net.config.position_limit) is not None and not isinstance(tokens, Tracer):
            counted = positions
            if counted is None:
                ones = np.ones(np.shape(tokens), np.int32)
                counted = segment_positions(ones if segments is None else jnp.asarray(segments))
            if np.size(tokens) and (last := int(np.max(counted))) >= most:
                name = self.path or "the model"
                raise ConfigError(f"rows reach position {last}, but {name} has learned {most}, from 0 on")
        rows = (tokens, segments, positions, images)
        rows = jax.tree.map(jnp.asarray, rows, is_leaf=lambda x: isinstance(x, list))
        with jax.set_mesh(self.mesh) if self.mesh is not None else contextlib.nullcontext():
            return _apply(self.net, prompt_width, on_device(self.params), *rows)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _apply(net: Net, prompt_width: int, params: Params, tokens, segments, positions, images):
    return net.bind(params)(tokens, segments, positions, images, prompt_width)


def load_model(
    path: str | os.PathLike[str],
    dtype: str = "auto",
    param_dtype: str | None = None,
    mesh: Mesh | None = None,
    init_key: jax.Array | None = None,
    adapter: str | os.PathLike[str] | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
    tokenizer: Any = None,
    entries: Mapping[str, Any] | None = None,
    **overrides,
) -> Model:
    """The model at `path`: `embedded:<name>`, a local folder, a Hugging Face hub id or a URL that fsspec understands.

    `adapter` is the folder of a PEFT adapter of that model, or its URL; `path` may be one itself, and then the model is
    the one it names. The adapter stays apart from the matrices it belongs to; `save_hf` merges it.

    dtype, of the computation: "auto" is float32 on CPU and GPUs before Ampere, where bfloat16 is slower, else bfloat16.
    param_dtype None is that of the computation; training keeps float32 parameters. With `init_key` the parameters are
    drawn at random, and the folder needs no weights. `overrides` are other ModelConfig fields, and `trained`, what a
    run trains of the model (see `Trained`); `entries` take the place of those of config.json, and `tokenizer` that of
    the folder's, which is None when it has none. `revision` is of a hub id. `allow_pickle` reads pytorch_model.bin
    where there are no safetensors, and `trust_remote_code` runs a tokenizer's own code. Raises ConfigError; see
    `hf.locate`, `hf.load`, `peft.read` and `Trained.grouped`.
    """
    dtype = compute_dtype(dtype)
    model = describe(
        path, dtype, param_dtype, adapter, allow_pickle, trust_remote_code, revision, tokenizer, entries, **overrides
    )
    path, adapter, revision = base_and_adapter(path, adapter, revision)
    if init_key is None:
        config = model.net.config
        overrides |= {"dtype": dtype, "param_dtype": param_dtype or dtype, "head": config.head}
        overrides |= {"layer_groups": config.layer_groups, "frozen_leaves": config.frozen_leaves}
        overrides.pop("trained", None)
        folder = hf.locate(path, allow_pickle, revision=revision)
        _, params = hf.load(folder, mesh, allow_pickle=allow_pickle, entries=entries, **overrides)
    else:
        base = model.net.base
        params = base.init(init_key) if mesh is None else init_sharded(base, init_key, mesh)
    if adapter is not None:
        adapters = peft.read(adapter, model.net, _family(model), mesh)
        params = lora.combine(_fp32_score(params), adapters)
    return dataclasses.replace(model, params=params, mesh=mesh, changed=init_key is not None)


def describe(
    path: str | os.PathLike[str],
    dtype: str = "auto",
    param_dtype: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
    tokenizer: Any = None,
    entries: Mapping[str, Any] | None = None,
    **overrides,
) -> Model:
    """The model at `path` with shapes in place of parameters: all that is known without reading weights.

    Arguments and errors as in `load_model`.
    """
    dtype = compute_dtype(dtype)
    path, adapter, revision = base_and_adapter(path, adapter, revision)
    kinds = {"quantize": KINDS, "quantize_experts": ("same", *KINDS), "matmul_dtype": MATMUL_DTYPES}
    for name, known in kinds.items():
        if overrides.get(name, known[0]) not in known:
            raise ConfigError(f"{name} = {overrides[name]!r} is not one of {', '.join(known)}.")
    if adapter is not None:
        described, kind = peft.read_config(adapter), overrides.get("quantize", "none")
        if described.lora.dora and kind != "none":
            raise ConfigError(
                f"{os.fspath(adapter)} is a DoRA, which measures the matrices in every forward pass, and quantize is "
                f"{kind} (model.quantize, teacher.quantize), which keeps none as numbers: set it to none, or merge the "
                "adapter (jaxrl_llm.save_hf) and load the result"
            )
        overrides = {"head": described.head, **overrides, **described.fields}
    folder, trained = hf.locate(path, allow_pickle, revision=revision), overrides.pop("trained", EVERYTHING)
    hf_config = hf.read_config(folder, entries)
    family = family_of(hf_config)
    net = trained.grouped(
        hf.load_net(folder, entries, dtype=dtype, param_dtype=param_dtype or dtype, **overrides), family
    )
    if adapter is not None:
        net = peft.with_adapter_modules(net, family, adapter)
    check_attention(net.config, jax.default_backend())
    check_matmul_dtype(net.config, jax.local_devices()[0].device_kind, multiplies_fp8(jax.local_devices()[0]))
    if tokenizer is None and hf.has_tokenizer(folder):
        tokenizer = hf.load_tokenizer(folder, trust_remote_code)
    generation = read_json(folder / "generation_config.json")
    if tokenizer is not None:
        check_ids(tokenizer, net.config.embeddings, generation, os.fspath(path))
        hf.remember_images(tokenizer, folder)
    return Model(net, net.shapes(), tokenizer, hf_config, generation, os.fspath(path), revision)


def check_ids(tokenizer: Any, size: int, generation: Mapping[str, Any] | None, path: str | None) -> None:
    """Raises ConfigError for tokens without a row in the embedding, which would be read as other tokens.

    Special tokens that nothing names (Gemma 3 1B has one, of images) may be there: texts with them are refused (see
    `data/templates.py`).
    """
    beyond = {index: token for token, index in tokenizer.get_vocab().items() if index >= size}
    named: dict[str, int] = {}
    for role in ("eos_token_id", "bos_token_id", "pad_token_id"):
        given = (generation or {}).get(role)
        for index in (getattr(tokenizer, role), *(given if isinstance(given, list) else [given])):
            named |= {} if index is None else {f"{role} = {index}": index}
    wrong = [name for name, index in named.items() if index >= size]
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    if wrong or set(beyond) - special:
        tokens = [f"{token!r} {index}" for index, token in sorted(beyond.items())]
        examples = [*wrong, *tokens[:2], *(["..."] if len(tokens) > 3 else []), *tokens[2:][-1:]]
        raise ConfigError(
            f"{path}: the embedding has {size} rows (vocab_size of config.json), but the tokenizer has ids up to "
            f"{max([*named.values(), *beyond])}: {', '.join(examples)}. Use the model's own tokenizer, or give "
            "the embedding rows for its tokens"
        )
    if beyond:
        tokenizer.without_embedding = frozenset(beyond)


def check_same_vocabulary(model: Model, other: Model, role: str, otherwise: str = "") -> None:
    """Raises ConfigError unless every token id of `model` means the same in `other`, which is fed with them.

    `otherwise` says what may be done in place of using a model with the same tokenizer.
    """
    ids, others = model.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    taken, size, own_size = set(others.values()), other.net.config.vocab_size, model.net.config.vocab_size
    # The embedding of the policy may have fewer rows than its tokenizer has tokens: those are in no text.
    if (most := max(index for index in ids.values() if index < own_size)) >= size:
        raise ConfigError(
            f"{role} {other.path} has a vocabulary of {size} (vocab_size of its config.json), but reads the token ids "
            f"of {model.path}, whose vocabulary is {own_size} and whose tokenizer has ids up to {most}; use a model "
            f"with the same tokenizer{otherwise}"
        )
    for token, index in ids.items():
        if others.get(token) == index or (token not in others and index not in taken and index < size):
            continue
        theirs = next((name for name, at in others.items() if at == index), None)
        raise ConfigError(
            f"{role} {other.path} reads the token ids of {model.path}, but has another vocabulary: id {index} is "
            f"{token!r} there and {theirs!r} here; use a model with the same tokenizer{otherwise}"
        )


def check_positions(model: Model, length: int, cause: str) -> None:
    """Raises ConfigError where rows of `length` tokens, because of `cause`, exceed the positions of the model."""
    most = model.max_positions
    if most is not None and length > most:
        raise ConfigError(
            f"rows would have up to {length} tokens ({cause}), but {model.path} has positions for {most} "
            "(max_position_embeddings of config.json, model_max_length or n_positions): use shorter ones, or a model "
            "for longer rows"
        )


def base_and_adapter(
    path: str | os.PathLike[str], adapter: str | os.PathLike[str] | None = None, revision: str | None = None
) -> tuple[Any, Any, str | None]:
    """The path of the model itself, the folder of its adapter, None without one, and the revision of a hub id.

    An adapter in the place of the model names all of it; a `revision` that is given goes before its own. Raises
    ConfigError for such an adapter that names no base model.
    """
    if adapter is not None or not peft.is_adapter(path):
        return path, adapter, revision
    described = peft.read_config(path)
    if described.base is None:
        raise ConfigError(f"{os.fspath(path)}/{peft.CONFIG} names no base model: load that, with adapter={path!r}")
    own = None if hf.is_folder(described.base) else described.revision
    return described.base, path, revision or own


def config_folder(path: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder with config.json and the tokenizer of a model, or of the model that an adapter belongs to."""
    base, _, revision = base_and_adapter(path, revision=revision)
    return hf.locate(base, config_only=True, revision=revision)


def copied_model(
    model: Model, mesh: Mesh, dtype: str = "auto", param_dtype: str = "float32", merge: bool = False, **overrides
) -> Model:
    """A copy of a model in memory, as `load_model` would give it: arrays of its own, sharded over `mesh`.

    `overrides` are ModelConfig fields and `trained`, as in `load_model`. With `merge` its adapters are merged into the
    matrices they belong to. A language model that is to have a score or step head gets a new one.

    Raises ConfigError for a model whose matrices are stored in other bits than asked for, and for adapters that cannot
    be merged or a head that cannot be made.
    """
    config, params, name = model.net.config, model.params, model.path or "the model"
    if {config.head, head := overrides.get("head", config.head)} == {"score", "step"}:
        raise ConfigError(
            f"{name} in memory has the head {config.head}, which is no {head} head: give the language model"
        )
    kinds, trained = ("quantize", "quantize_experts"), overrides.pop("trained", EVERYTHING)
    asked = dataclasses.replace(config, **dict(zip(kinds, ("none", "same"), strict=True)))
    asked = dataclasses.replace(asked, **{kind: overrides.pop(kind) for kind in kinds if kind in overrides})
    if asked.quantized not in ("none", config.quantized):
        raise ConfigError(
            f"{asked.quantize_setting} is {asked.quantized}, but {name} in memory stores its matrices as "
            f"{config.quantized}: save it with jaxrl_llm.save_hf and set model.path to the folder"
        )
    if merge and lora.has_adapters(params):
        if config.quantized != "none":
            raise ConfigError(
                f"lora.rank is above 0, and {name} in memory has adapters on quantised matrices, which cannot be "
                "merged: set lora.rank to 0 to train these on"
            )
        params, config = lora.merge(params, config.lora), dataclasses.replace(config, lora=None)
    net = Net(dataclasses.replace(config, dtype=compute_dtype(dtype), param_dtype=param_dtype, **overrides))
    if config.lora is not None and (trained.trainable or trained.frozen):
        raise ConfigError(
            f"{name} in memory has adapters, which are what is trained of it: set model.trainable and model.frozen to "
            "nothing, or merge it first (jaxrl_llm.save_hf)"
        )
    if config.lora is None:  # the groups of an earlier run say nothing of this one
        net = trained.grouped(Net(dataclasses.replace(net.config, layer_groups=(), frozen_leaves=())), _family(model))
        params = restacked(params, config, net.config)
    check_attention(net.config, jax.default_backend())
    check_matmul_dtype(net.config, jax.local_devices()[0].device_kind, multiplies_fp8(jax.local_devices()[0]))
    shapes = net.shapes()
    if missing := [part for part in shapes if part not in params and part != "score"]:
        raise ConfigError(f"{name} in memory has no {', '.join(missing)}: a model with a score head writes no text")
    targets = shardings(shapes, mesh)
    old = jax.device_put(
        {part: params[part] for part in shapes if part in params}, {x: targets[x] for x in shapes if x in params}
    )

    @functools.partial(jax.jit, out_shardings=targets)
    def copied(old: Params) -> Params:
        new = {part: net.init(jax.random.key(0))[part] for part in shapes if part not in old}
        return {
            **jax.tree.map(lambda x, shape: jnp.copy(x).astype(shape.dtype), old, {x: shapes[x] for x in old}),
            **new,
        }

    return dataclasses.replace(model, net=net, params=copied(old), mesh=mesh)


def load_adapter(model: Model, folder: str | os.PathLike[str]) -> tuple[lora.LoraConfig, Params]:
    """The configuration and the parameters of a PEFT adapter of the model, which stays as it is.

    Raises ConfigError as `peft.with_adapter_modules` and `peft.read` do, for quantised matrices, and for another head.
    """
    described, config = peft.read_config(folder), model.net.config
    if config.quantized != "none":
        raise ConfigError(f"{model.path} stores its matrices as {config.quantized}: no adapter can be merged into them")
    if described.head != config.head:
        raise ConfigError(f"{os.fspath(folder)} has the head {described.head}, and {model.path} {config.head}")
    net = Net(dataclasses.replace(config, **described.fields))
    net = peft.with_adapter_modules(net, _family(model), folder)
    assert net.config.lora is not None
    if net.config.layer_groups != config.layer_groups:
        raise ConfigError(
            f"{os.fspath(folder)} has adapters that differ from layer to layer, which {model.path} cannot take beside "
            "others: merge it (jaxrl_llm.save_hf), or load it as the model"
        )
    return net.config.lora, peft.read(folder, net, _family(model), model.mesh)


def add_adapters(
    model: Model,
    config: lora.LoraConfig,
    key: jax.Array,
    modules_to_save: Iterable[str] = (),
    patterns: AdapterPatterns = ALIKE,
) -> Model:
    """The model with new adapters, as `lora_init.started` has them start: what it computes stays the same, bit for bit,
    with `orthogonal` up to rounding, and not with `random`.

    The arrays of the model are shared, not copied, unless `patterns` tell layers apart that it has stacked; a score
    head becomes fp32, as it is trained with them, and so are the copies of the modules that are to be trained whole
    (see `peft.with_modules`). Raises ConfigError when the model has no linear map that `config` names, for unknown
    modules, and as `peft_patterns.with_patterns`.
    """
    for name, own in model.net.config.lora_names:
        if name in config.targets and own not in config.targets:
            raise ConfigError(f"lora.targets has {name}, which is {own} in this model: name that")
    family = _family(model)
    net = with_patterns(model.net.with_lora(config), family, patterns)
    params = restacked(model.params, model.net.config, net.config)
    model = dataclasses.replace(model, net=net.base, params=params)
    net = peft.with_modules(net, family, modules_to_save, "lora.modules_to_save")
    shape = net.config.lora
    assert shape is not None
    shapes = lora.adapters_of(net.shapes())
    if not shapes:
        raise ConfigError(
            f"lora.targets are {', '.join(config.targets)}, but outside its experts this model has none of them: "
            "those of experts are named experts"
        )
    targets = None if model.mesh is None else shardings(shapes, model.mesh)

    def drawn(key, params: Params) -> Params:
        params = lora.combine(params, lora.adapters_of(net.init(key)))
        if config.init != "kaiming" and not makes_up(config.init):
            params = lora_init.started(params, shape, jax.random.fold_in(key, 1), net.config.quantize)
        return lora.adapters_of(lora.with_magnitudes(params) if config.dora else params)

    read = config.dora or config.subtracts
    adapters = jax.jit(drawn, out_shardings=targets)(key, model.params if read else {})
    params = lora.with_saved(lora.combine(_fp32_score(model.params), adapters), shape)
    return dataclasses.replace(model, net=net, params=params)


def make_up(
    model: Model,
    key: jax.Array,
    allow_pickle: bool = False,
    revision: str | None = None,
    entries: Mapping[str, Any] | None = None,
) -> Model:
    """The model, which has adapters on quantised matrices, with those that `lora_init.made_up` makes of its files.

    `revision` and `entries` are those that the model was loaded with.
    """
    config = model.net.config
    assert config.lora is not None
    assert model.path is not None  # as of a model that was read from files
    folder = hf.locate(model.path, allow_pickle, revision=revision)
    with hf.opened_kernels(folder, model.net, allow_pickle, entries) as original:
        params = lora_init.made_up(model.params, config.lora, key, config.quantize, original)
    shapes, adapters = lora.adapters_of(model.net.shapes()), lora.adapters_of(params)
    placed = adapters if model.mesh is None else jax.device_put(adapters, shardings(shapes, model.mesh))
    return dataclasses.replace(model, params=lora.combine(model.params, placed))


def _fp32_score(params: Params) -> Params:
    score = {name: jax.tree.map(lambda x: x.astype(jnp.float32), params[name]) for name in params if name == "score"}
    return {**params, **score}


def named_rate_factors(model: Model, entries: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """The factors of the learning rates of the model's parameters, by their paths, of entries PATTERN=FACTOR.

    See `rate_factors.rate_factors`.
    """
    return rate_factors(model.net, _family(model), entries)


def _family(model: Model):
    return family_for(model.net.config) if model.hf_config is None else family_of(model.hf_config)


def compute_dtype(dtype: str) -> str:
    """The type of the computation: for "auto" that of the machine, bfloat16 where it has units for it."""
    if dtype != "auto":
        return dtype
    return "float32" if jax.default_backend() == "cpu" or is_before_ampere() else "bfloat16"


def check_loaded(model: Any, function: str) -> None:
    """Raises ConfigError, which names the `function`, for a path or another object where it takes a loaded model."""
    if isinstance(model, str | os.PathLike):
        raise ConfigError(f"{function} takes a model, not {model!r}: load it first, jaxrl_llm.load_model({model!r})")
    if not isinstance(model, Model):
        kind = f"{type(model).__module__.partition('.')[0]} {type(model).__name__}"
        inner = isinstance(getattr(model, "model", None), Model)  # the Result of a run
        way_out = "give its .model" if inner else "load it with jaxrl_llm.load_model, from its folder or hub id"
        raise ConfigError(f"{function} takes a model of this library, not a {kind}: {way_out}")


def check_tokenizer(model: Model) -> None:
    """Raises ConfigError for a model that has no tokenizer."""
    if model.tokenizer is None:
        raise ConfigError(
            f"the model {model.path} has no tokenizer, so it cannot read text; add its files to the folder"
        )


def save_hf(
    model: Model,
    path: str | os.PathLike[str],
    dtype: str | None = None,
    max_shard_bytes: float = 5e9,
    *,
    overwrite: bool = False,
) -> None:
    """Writes the model as a Hugging Face folder that transformers and vLLM load; see `hf.save`.

    Adapters are merged into the matrices. A model without generation_config.json gets one that names the tokenizer's
    end-of-text and padding tokens; one that does not know the tokenizer's end of text, as after training with another
    chat template, gets it before its own, and config.json in place of its own. The config.json of a score model names
    the padding token, which transformers needs to find the last token of each row. Raises ConfigError where the folder
    holds a model already, unless `overwrite`.
    """
    check_loaded(model, "save_hf")
    path = Path(path).expanduser()
    with all_or_none():  # of many processes the first looks, before any writes
        if jax.process_index() == 0 and not overwrite and (path / "config.json").is_file():
            raise ConfigError(
                f"{path} holds a model already: save to another folder, or replace it with save_hf(..., overwrite=True)"
            )
    generation, hf_config = model.generation, model.hf_config
    if model.tokenizer is not None:
        known, end = (generation or {}).get("eos_token_id"), model.tokenizer.eos_token_id
        known = known if isinstance(known, list) else [] if known is None else [known]
        if generation is None:
            names = ("bos_token_id", "eos_token_id", "pad_token_id")
            generation = {name: getattr(model.tokenizer, name) for name in names}
        elif end is not None and end not in known:
            generation = {**generation, "eos_token_id": [end, *known] if known else end}
            hf_config = None if hf_config is None else {**hf_config, "eos_token_id": end}
    pad = getattr(model.tokenizer, "pad_token_id", None)
    if model.net.config.head == "score" and hf_config is not None and pad is not None:
        hf_config = {**hf_config, "pad_token_id": pad}
    hf.save(model.net, model.params, path, model.tokenizer, hf_config, generation, dtype, max_shard_bytes)


def file_tensors(model: Model, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that `save_hf` writes in this type, by name, one after another; all processes must take all."""
    return safetensors.file_tensors(model.net, _family(model), model.params, dtype)


def has_peft_adapter(model: Model) -> bool:
    """True when the model has adapters, and PEFT folders have a place for them."""
    return lora.has_adapters(model.params) and peft.fused(model.net, _family(model)) is None


def save_adapter(model: Model, path: str | os.PathLike[str]) -> None:
    """Writes the model's adapters, and its score head, as a PEFT folder; see `peft.write`.

    It names the model's path as their base, and none where the model is `changed`. The folder appears complete or not
    at all, and takes the place of an earlier one. With many processes all must call. Raises ConfigError for a model
    without adapters, and when `path` holds something other than an adapter.
    """
    check_loaded(model, "save_adapter")
    if not lora.has_adapters(model.params):
        raise ConfigError("the model has no adapters: all of it was trained. Save it with save_hf")
    folder = Path(path).expanduser().absolute()
    hf.refuse_foreign(folder, peft.CONFIG)
    with hf.replacing(folder) as partial:
        base, revision = (None, None) if model.changed else (masked(model.path), model.revision)
        peft.write(partial, model.net, _family(model), model.params, base, revision)


def init_sharded(net: Net, key: jax.Array, mesh: Mesh) -> Params:
    """Random parameters, each drawn in its shards: no device ever holds all of the model."""
    return jax.jit(net.init, out_shardings=shardings(net.shapes(), mesh))(key)
