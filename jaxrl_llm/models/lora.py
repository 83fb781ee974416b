"""LoRA (arXiv 2106.09685): trained matrices of low rank beside frozen ones. Parameter trees in, parameter trees out.

A linear map with an adapter holds `lora_a [in, r]` and `lora_b [r, out]` beside its kernel and computes
`x W + scale (dropout(x) A) B`. With B = 0, as it starts, that is the map without adapter, bit for bit. With DoRA
(arXiv 2402.09353) it also holds `lora_m [out]`, the lengths of the columns, and these are rescaled to them.

The matrices of experts have an A and a B each, stacked as they are: `lora_a [E, in, r]`, `lora_b [E, r, out]`. Those of
gate and up are an adapter of both together, `gate_up`, with one A and the columns of B side by side, gate's first: that
of the one tensor in which transformers has them, which PEFT adapts (`target_parameters`).

Modules that are trained whole beside the adapters (PEFT's modules_to_save) stay as they are in the tree; their trained
copies are under `saved`, at the same paths, and the net computes with those.

The parameters decide what a net computes: without adapters it is the base model, and dropout is where `with_dropout`
has put keys.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import closest
from jaxrl_llm.models.quantize import as_matrix

Params = dict[str, Any]

# The linear maps of a layer, and what Hugging Face calls them. Heads and embeddings have no adapters.
HF_NAMES = {
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "gate": "gate_proj", "up": "up_proj",
    "down": "down_proj", "q_a": "q_a_proj", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa", "kv_b": "kv_b_proj",
    "qkvz": "in_proj_qkvz", "ba": "in_proj_ba", "qkv": "in_proj_qkv", "z": "in_proj_z", "b": "in_proj_b",
    "a": "in_proj_a", "into": "in_proj", "out": "out_proj", "narrow": "fc1_latent_proj", "widen": "fc2_latent_proj",
    "f_a": "f_a_proj", "f_b": "f_b_proj", "g_a": "g_a_proj", "g_b": "g_b_proj", "fc1": "fc1", "fc2": "fc2",
}  # fmt: skip
TARGETS = tuple(HF_NAMES)
# The matrices of experts, by the ends of PEFT's target_parameters. They are no linear maps, and not in `all-linear`.
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
# Which of them a module is, by the last word of its name in files; some families have words of their own.
MODULES = {word: name for name, word in HF_NAMES.items()} | {
    "linear_fc1": "fc1", "linear_fc2": "fc2", "projection_layer": "out", "w1": "gate", "w3": "up", "w2": "down",
    "a_proj": "a", "b_proj": "b", "g_proj": "z",
}  # fmt: skip
WITHIN = ".linear"  # ends the names of maps within modules of these names, which may clip (Gemma 4's encoder)
ADAPTER = ("lora_a", "lora_b", "lora_m")
SAVED = "saved"


class Adapted(NamedTuple):
    """The adapter of a linear map of a layer."""

    target: str  # of TARGETS
    path: str  # of the map in the layer's parameters, attention/q
    rank: int
    alpha: float


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """The shape of the adapters. Hashable: it is part of a ModelConfig.

    Raises ConfigError for dropout and DoRA of the matrices of experts, which PEFT has neither of.
    """

    rank: int
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = TARGETS
    rslora: bool = False
    dora: bool = False
    saved: tuple[str, ...] = ()  # paths of the parameters that are trained whole, see `peft.with_modules`
    # The adapters of each group of layers (`ModelConfig.layer_groups`), see peft_patterns.py; (): of all targets, with
    # this rank and this alpha.
    groups: tuple[tuple[Adapted, ...], ...] = ()

    def __post_init__(self):
        if self.experts and (self.dora or self.dropout):
            setting, off = ("dora is true", "false") if self.dora else (f"dropout is {self.dropout}", "0")
            raise ConfigError(
                f"lora.{setting}, but adapters of experts ({', '.join(self.experts)}) have none, as in "
                f"PEFT: set it to {off}, or leave experts out of lora.targets"
            )

    @property
    def experts(self) -> tuple[str, ...]:
        """Those of the targets that are matrices of experts."""
        return tuple(name for name in self.targets if name in EXPERTS)

    @property
    def scale(self) -> float:
        """alpha / rank or, rank-stabilised, alpha / sqrt(rank) (arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def of_group(self, group: int, part: str = "") -> "LoraConfig":
        """The shape of the adapters of a layer of that group, or of a part of it, its mixer or its feed-forward."""
        own = tuple(adapted for adapted in self.groups[group] if adapted.path.startswith(part))
        return dataclasses.replace(self, targets=tuple(adapted.target for adapted in own), groups=(own,))

    def of(self, target: str) -> "LoraConfig | None":
        """The shape of the adapter of a linear map, None without one; of a map of a layer, that of `of_group`."""
        if target not in self.targets:
            return None
        return self._like(next(x for x in self.groups[0] if x.target == target)) if self.groups else self

    def at(self, path: Sequence[str]) -> "LoraConfig | None":
        """The shape of the adapter of the linear map at a path in the parameters, None where it has none of its own."""
        if not self.groups:
            return self
        group = re.match(r"group(\d+)_", path[0])
        own, within = self.groups[int(group[1]) if group else 0], "/".join(path[1:])
        found = next((x for x in own if x.path == within), None)
        return found and self._like(found)

    def _like(self, adapted: Adapted) -> "LoraConfig":
        return dataclasses.replace(self, rank=adapted.rank, alpha=adapted.alpha, groups=())


def parse_targets(names: Iterable[str]) -> tuple[str, ...]:
    """The targets that names mean: `q` or `q_proj`, ..., `all-linear`, and the matrices of experts.

    Those are `experts.gate_up_proj` and `experts.down_proj`, or with the name of their block as PEFT's
    target_parameters have them (`mlp.experts.down_proj`), and both are `experts`. Raises ConfigError for another name.
    """
    known = {"all-linear": TARGETS, **{name: (name,) for name in TARGETS}}
    known |= {word: (name,) for word, name in MODULES.items()}
    known |= {"experts": EXPERTS, **{name: (name,) for name in EXPERTS}}
    found: set[str] = set()
    for name in names:
        name = re.sub(r"^[a-z_]+\.(?=experts\.)", "", name)
        if name not in known:
            raise ConfigError(
                f"lora.targets names {name!r}, but there are {', '.join(known)}; the closest is {closest(name, known)}"
            )
        found |= set(known[name])
    if not found:
        raise ConfigError("lora.targets is empty: name linear maps, or all-linear")
    return tuple(name for name in (*TARGETS, *EXPERTS) if name in found)


def init_a(key, *shape: int) -> jax.Array:
    """A `[..., in, r]`, uniform between +-1/sqrt(in), in fp32: what PEFT's Kaiming initialisation draws from."""
    return jax.random.uniform(key, shape, jnp.float32, -1.0, 1.0) / math.sqrt(shape[-2])


def dropped(x, config: LoraConfig, key_data=None) -> jax.Array:
    """The inputs `[n, in]` of an adapter: x, of which entries are dropped with `key_data`."""
    if key_data is None:
        return x
    keep = jax.random.bernoulli(jax.random.wrap_key_data(key_data), 1.0 - config.dropout, x.shape)
    return jnp.where(keep, x / (1.0 - config.dropout), 0.0).astype(x.dtype)


def delta(x, a, b, config: LoraConfig, key_data=None) -> jax.Array:
    """The output `[n, out]` of an adapter, of x `[n, in]`; with `key_data` inputs are dropped."""
    x = dropped(x, config, key_data)
    return (x @ a.astype(x.dtype)) @ b.astype(x.dtype) * config.scale


def column_norms(matrix) -> jax.Array:
    """The lengths `[..., out]` of the columns of a kernel `[..., in, out]`, in fp32."""
    return jnp.linalg.norm(matrix.astype(jnp.float32), axis=-2)


def rescaling(kernel, a, b, m, config: LoraConfig) -> jax.Array:
    """DoRA's factors `[out]`: m over the column lengths of W + scale A B, of which no gradient is taken, as in PEFT."""
    matrix = kernel.astype(jnp.float32) + config.scale * (a.astype(jnp.float32) @ b.astype(jnp.float32))
    return m / jax.lax.stop_gradient(column_norms(matrix))


def has_adapters(params: Params) -> bool:
    """True when the parameters hold adapters."""
    return _holds(params, "lora_a")


def has_dropout(params: Params) -> bool:
    """True when the parameters hold keys of dropout."""
    return _holds(params, "lora_key")


def has_expert_adapters(params: Params) -> bool:
    """True when the parameters hold adapters of experts; those beside quantised matrices may hold the others alone."""
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(params) if path[-1].key == "lora_a")
    return any(step.key == "experts" for path in paths for step in path)


def _holds(params: Params, name: str) -> bool:
    return any(path[-1].key == name for path, _ in jax.tree_util.tree_leaves_with_path(params))


def split(params: Params, frozen: tuple[str, ...] = ()) -> tuple[Params, Params]:
    """The frozen and the trainable parameters: of a model with adapters those, whole modules and a score head are
    trainable; of another one all but what is `frozen` (`ModelConfig.frozen`)."""
    if has_adapters(params):
        return _select(params, lambda path: not _is_trainable(path)), _select(params, _is_trainable)
    if not frozen:
        return {}, params
    parts = set(frozen)

    def is_frozen(path: tuple[Any, ...]) -> bool:
        return path[0] in parts or "/".join(path) in parts

    return _select(params, is_frozen), _select(params, lambda path: not is_frozen(path))


def _is_trainable(path: tuple[Any, ...]) -> bool:
    return path[-1] in ADAPTER or path[0] in ("score", SAVED)


def with_saved(params: Params, config: LoraConfig | None) -> Params:
    """The parameters, or their shapes, with a copy in fp32 of those that `config` trains whole."""
    if config is None or not config.saved:
        return params

    def copy(x):
        shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        return shape if isinstance(x, jax.ShapeDtypeStruct) else jnp.array(x, jnp.float32, copy=True)

    chosen = _select(params, lambda path: "/".join(path) in config.saved)
    return {**params, SAVED: jax.tree.map(copy, chosen)}


def overlaid(params: Params) -> Params:
    """The parameters that the net computes with: modules trained whole in place of those they started from."""
    if SAVED not in params:
        return params
    return combine({name: x for name, x in params.items() if name != SAVED}, params[SAVED])


def with_magnitudes(params: Params) -> Params:
    """The parameters with each `lora_m` as it starts: the column lengths of its kernel, so that nothing is rescaled."""
    found = {name: with_magnitudes(value) if isinstance(value, dict) else value for name, value in params.items()}
    return {**found, "lora_m": column_norms(params["kernel"])} if "lora_m" in params else found


def _select(tree: Params, wanted: Callable[[tuple[Any, ...]], bool], path: tuple[Any, ...] = ()) -> Params:
    """The nested dict of the leaves whose paths are wanted, without empty dicts."""
    found = {}
    for name, value in tree.items():
        here = (*path, name)
        if isinstance(value, dict):
            value = _select(value, wanted, here)
            if value:
                found[name] = value
        elif wanted(here):
            found[name] = value
    return found


def adapters_of(params: Params) -> Params:
    """The adapters alone."""
    return _select(params, lambda path: path[-1] in ADAPTER)


def combine(frozen: Params, trainable: Params) -> Params:
    """All parameters: the inverse of `split`. No array is copied; where both have one it is the trainable."""
    merged = {**frozen, **trainable}
    for name in frozen.keys() & trainable.keys():
        if isinstance(frozen[name], dict):
            merged[name] = combine(frozen[name], trainable[name])
    return merged


def without_adapters(params: Params) -> Params:
    """The base model's parameters, not copied."""
    return _select(params, lambda path: path[-1] not in (*ADAPTER, "lora_key") and path[0] != SAVED)


def copied(params: Params) -> Params:
    """The parameters with arrays of their own for what is trainable: those of a state are donated."""
    frozen, trainable = split(params)
    return combine(frozen, _copies(trainable))


@jax.jit
def _copies(params: Params) -> Params:
    return jax.tree.map(jnp.copy, params)


def with_dropout(params: Params, key) -> Params:
    """The parameters with a key of dropout in every adapter, one for each layer; for a net whose LoraConfig drops."""
    count = iter(range(10**6))

    def visit(tree: Params) -> Params:
        found = {name: visit(value) if isinstance(value, dict) else value for name, value in tree.items()}
        if "lora_a" in tree:
            adapter_key = jax.random.fold_in(key, next(count))
            found["lora_key"] = jax.random.bits(adapter_key, (*tree["lora_a"].shape[:-2], 2), jnp.uint32)
        return found

    return visit(params)


def with_shared(params: Params) -> Params:
    """The parameters of experts whose gate and up each have their own columns of the adapter of both; others as they
    are."""
    if "gate_up" not in params:
        return params
    a, b = params["gate_up"]["lora_a"], params["gate_up"]["lora_b"]
    columns = zip(("gate", "up"), jnp.split(b, 2, axis=-1), strict=True)
    own = {name: {**params[name], "lora_a": a, "lora_b": half} for name, half in columns}
    return {**{name: x for name, x in params.items() if name != "gate_up"}, **own}


def merged_kernel(linear: Params, lora: LoraConfig | None, quantized: str = "none") -> jax.Array:
    """The kernel `[..., in, out]` of a linear map with its adapter in it: W + scale A B, computed in fp32.

    With DoRA its columns have the lengths that were learned. It has the dtype of W; fp32 where W is quantised.
    """
    kernel = linear["kernel"]
    if not isinstance(kernel, dict) and kernel.ndim > 3 and "lora_a" in linear:
        # Of experts those of one layer at a time: in fp32 those of all are most of a model, twice.
        return jax.lax.map(lambda layer: merged_kernel(layer, lora), linear)
    matrix = as_matrix(kernel, quantized, jnp.float32)
    if "lora_a" in linear and lora is not None:
        a, b = (linear[name].astype(jnp.float32) for name in ("lora_a", "lora_b"))
        matrix += lora.scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
        if "lora_m" in linear:
            matrix *= (linear["lora_m"] / column_norms(matrix))[..., None, :]
    return matrix if isinstance(kernel, dict) else matrix.astype(kernel.dtype)


def merge(params: Params, lora: LoraConfig | None, path: tuple[str, ...] = ()) -> Params:
    """The parameters without adapters, in which kernels W became W + scale A B; those on quantised kernels stay.

    Modules that were trained whole take the place of those they started from. `path` is that of `params` in those of
    the model.
    """
    params = with_shared(overlaid(params))
    found = {name: merge(x, lora, (*path, name)) if isinstance(x, dict) else x for name, x in params.items()}
    if "lora_a" in params and not isinstance(params["kernel"], dict):
        found["kernel"] = merged_kernel(params, None if lora is None else lora.at(path))
        for name in ADAPTER:
            found.pop(name, None)
    return found
