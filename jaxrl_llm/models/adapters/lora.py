"""LoRA (arXiv 2106.09685): trained matrices of low rank beside frozen ones. Parameter trees in, parameter trees out.

A linear map with an adapter holds `lora_a [in, r]` and `lora_b [r, out]` beside its kernel and computes
`x W + scale (dropout(x) A) B`. With B = 0, as it starts, that is the map without adapter, bit for bit. With DoRA
(arXiv 2402.09353) it also holds `lora_m [out]`, the lengths of the columns, and these are rescaled to them.

The matrices of experts have an A and a B each, stacked as they are: `lora_a [E, in, r]`, `lora_b [E, r, out]`. Those of
gate and up are an adapter of both together, `gate_up`, with one A and the columns of B side by side, gate's first: that
of the one tensor in which transformers has them, which PEFT adapts (`target_parameters`).

Modules that are trained whole beside the adapters (PEFT's modules_to_save), and biases, stay as they are in the tree;
their trained copies are under `saved`, at the same paths, and the net computes with those.

Adapters may start from the matrices they are beside (PiSSA, OLoRA: lora_init.py), from A0 and B0. The map then
computes `x W + scale (dropout(x) A B - x A0 B0)`, in which W - scale A0 B0 is what stays of the matrix: A0 and B0 are
frozen beside it, `start_a` and `start_b`, so that W is what it was, for the reference policy and for whoever reads it
again.

The parameters decide what a net computes: without adapters it is the base model, and dropout is where `with_dropout`
has put keys.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.entries import makes_up, starts_from_matrices
from jaxrl_llm.config.resolve import closest
from jaxrl_llm.models.quantize import as_matrix

Params = dict[str, Any]
Path = tuple[str, ...]  # of a leaf, or of a part of the parameters

# The linear maps of a layer, and what Hugging Face calls them. Heads and embeddings have no adapters.
HF_NAMES = {
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "gate": "gate_proj", "up": "up_proj",
    "down": "down_proj", "q_a": "q_a_proj", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa", "kv_b": "kv_b_proj",
    "qkvz": "in_proj_qkvz", "ba": "in_proj_ba", "qkv": "in_proj_qkv", "z": "in_proj_z", "b": "in_proj_b",
    "a": "in_proj_a", "into": "in_proj", "out": "out_proj", "narrow": "fc1_latent_proj", "widen": "fc2_latent_proj",
    "f": "f_proj", "f_a": "f_a_proj", "f_b": "f_b_proj", "g_a": "g_a_proj", "g_b": "g_b_proj", "fc1": "fc1",
    "fc2": "fc2", "c_proj": "c_proj", "x": "x_proj", "kv": "kv_proj", "o_b": "o_b_proj",
}  # fmt: skip
TARGETS = tuple(HF_NAMES)
# The matrices of experts, by the ends of PEFT's target_parameters. They are no linear maps, and not in `all-linear`.
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
# Which of them a module is, by the last word of its name in files; some families have words of their own.
MODULES = {word: name for name, word in HF_NAMES.items()} | {
    "linear_fc1": "fc1", "linear_fc2": "fc2", "projection_layer": "out", "w1": "gate", "w3": "up", "w2": "down",
    "a_proj": "a", "b_proj": "b", "g_proj": "z", "c_attn": "qkv", "query_key_value": "qkv", "dense": "o", "c_fc": "up",
    "dense_h_to_4h": "up", "dense_4h_to_h": "down", "patch_dense": "fc1",
    "fc_in": "up", "fc_out": "down", "Wqkv": "qkv",
}  # fmt: skip
WITHIN = ".linear"  # ends the names of maps within modules of these names, which may clip (Gemma 4's encoder)
ADAPTER = ("lora_a", "lora_b", "lora_m")
START = ("start_a", "start_b")
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

    Raises ConfigError for dropout and DoRA of the matrices of experts, which PEFT has neither of, and for an `init`
    that experts, DoRA or the rank do not go with.
    """

    rank: int
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = TARGETS
    rslora: bool = False
    dora: bool = False
    init: str = "kaiming"  # see `lora_init.started`
    bias: str = "none"  # which biases are trained too: "all", or those of maps with an adapter, "lora_only"
    saved: tuple[str, ...] = ()  # paths of the parameters that are trained whole, see `peft_modules.with_modules`
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
        if (self.subtracts or makes_up(self.init)) and (self.experts or self.dora):
            named = f"experts ({', '.join(self.experts)})" if self.experts else "DoRA"
            raise ConfigError(
                f"lora.init is {self.init}, with which adapters start from the matrices beside them, but those of "
                f"{named} do not: set it to kaiming, or lora without them"
            )
        if self.init == "orthogonal" and self.rank % 2:
            raise ConfigError(f"lora.init is orthogonal, which takes an even rank, but the rank is {self.rank}")

    @property
    def experts(self) -> tuple[str, ...]:
        """Those of the targets that are matrices of experts."""
        return tuple(name for name in self.targets if name in EXPERTS)

    @property
    def subtracts(self) -> bool:
        """True where adapters start from the matrices, and what they started from is subtracted."""
        return starts_from_matrices(self.init)

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


def map_adapted(params: Params, change: Callable[[Params, Path], Params], path: Path = ()) -> Params:
    """The parameters in which `change` has replaced those of each linear map with an adapter, given them and its path.

    Maps are visited in the order of the tree. The adapter of both gate and up of experts counts as one, without kernel.
    """
    found = {name: map_adapted(x, change, (*path, name)) if isinstance(x, dict) else x for name, x in params.items()}
    return change(found, path) if "lora_a" in found else found


def plain_adapters(params: Params, config: LoraConfig) -> tuple[Params, LoraConfig]:
    """Parameters and shape of the adapters that add the same to the matrices with nothing subtracted.

    They are of twice the rank, with A and A0 beside each other and B over -B0, and of the same scale, as PEFT converts
    PiSSA and OLoRA to LoRA. Others are returned as they are.
    """
    if not config.subtracts:
        return params, config

    def plain(linear: Params, _) -> Params:
        a, b, a0, b0 = (linear[name] for name in ("lora_a", "lora_b", *START))
        factors = {"lora_a": jnp.concatenate([a, a0], axis=-1), "lora_b": jnp.concatenate([b, -b0], axis=-2)}
        return {name: x for name, x in linear.items() if name not in START} | factors

    factor = math.sqrt(2) if config.rslora else 2
    groups = tuple(tuple(x._replace(rank=2 * x.rank, alpha=factor * x.alpha) for x in group) for group in config.groups)
    shape = {"rank": 2 * config.rank, "alpha": factor * config.alpha, "groups": groups, "init": "kaiming"}
    return map_adapted(params, plain), dataclasses.replace(config, **shape)


def dropped(x, config: LoraConfig, key_data=None) -> jax.Array:
    """The inputs `[n, in]` of an adapter: x, of which entries are dropped with `key_data`."""
    if key_data is None:
        return x
    keep = jax.random.bernoulli(jax.random.wrap_key_data(key_data), 1.0 - config.dropout, x.shape)
    return jnp.where(keep, x / (1.0 - config.dropout), 0.0).astype(x.dtype)


def delta(x, a, b, config: LoraConfig, key_data=None, start: Sequence[jax.Array] = ()) -> jax.Array:
    """The output `[n, out]` of an adapter, of x `[n, in]`; with `key_data` inputs are dropped.

    That of the two matrices of a `start` is subtracted, of all inputs: before the scale, so that at first 0 is left.
    """

    def product(x, a, b):
        return (x @ a.astype(x.dtype)) @ b.astype(x.dtype)

    y = product(dropped(x, config, key_data), a, b)
    return (y - product(x, *start) if start else y) * config.scale


def column_norms(matrix) -> jax.Array:
    """The lengths `[..., out]` of the columns of a kernel `[..., in, out]`, in fp32; at least 1e-30, as DoRA divides by
    them, and layers that were added to a model may be zeros."""
    return jnp.maximum(jnp.linalg.norm(matrix.astype(jnp.float32), axis=-2), 1e-30)


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


def has_adapters_of(params: Params, experts: bool) -> bool:
    """True when the parameters hold adapters of experts, or of linear maps; where the matrices of one of the two alone
    are quantised, those of the other may have been merged."""
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(params) if path[-1].key == "lora_a")
    return any(experts == any(step.key == "experts" for step in path) for path in paths)


def _holds(params: Params, name: str) -> bool:
    return any(path[-1].key == name for path, _ in jax.tree_util.tree_leaves_with_path(params))


def split(params: Params, frozen: tuple[str, ...] = ()) -> tuple[Params, Params]:
    """The frozen and the trainable parameters: of a model with adapters those, whole modules and a score head are
    trainable; of another one all but what is `frozen` (`ModelConfig.frozen`)."""
    adapted, kept = has_adapters(params), set(frozen)
    if not adapted and not kept:
        return {}, params

    def is_trainable(path: Path) -> bool:
        if adapted:
            return path[-1] in ADAPTER or path[0] in ("score", SAVED)
        return path[0] not in kept and "/".join(path) not in kept

    return _select(params, lambda path: not is_trainable(path)), _select(params, is_trainable)


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
    return map_adapted(
        params, lambda linear, _: linear | ({"lora_m": column_norms(linear["kernel"])} if "lora_m" in linear else {})
    )


def _select(tree: Params, wanted: Callable[[Path], bool], path: Path = ()) -> Params:
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
    """The adapters alone, with what they started from where that is subtracted."""
    return _select(params, lambda path: path[-1] in (*ADAPTER, *START))


def combine(frozen: Params, trainable: Params) -> Params:
    """All parameters: the inverse of `split`. No array is copied; where both have one it is the trainable."""
    merged = {**frozen, **trainable}
    for name in frozen.keys() & trainable.keys():
        if isinstance(frozen[name], dict):
            merged[name] = combine(frozen[name], trainable[name])
    return merged


def without_adapters(params: Params) -> Params:
    """The base model's parameters, not copied."""
    return _select(params, lambda path: path[-1] not in (*ADAPTER, *START, "lora_key") and path[0] != SAVED)


def copied(params: Params) -> Params:
    """The parameters with arrays of their own for what is trainable: those of a state are donated."""
    frozen, trainable = split(params)
    return combine(frozen, _copies(trainable))


@jax.jit
def _copies(params: Params) -> Params:
    return jax.tree.map(jnp.copy, params)


def with_dropout(params: Params, key) -> Params:
    """The parameters with a key of dropout in every adapter, one for each layer; for a net whose LoraConfig drops."""
    count = itertools.count()

    def drop(linear: Params, _) -> Params:
        adapter_key = jax.random.fold_in(key, next(count))
        return {**linear, "lora_key": jax.random.bits(adapter_key, (*linear["lora_a"].shape[:-2], 2), jnp.uint32)}

    return map_adapted(params, drop)


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

    What the adapter started from is subtracted where it is in the net. With DoRA its columns have the lengths that
    were learned. It has the dtype of W; fp32 where W is quantised.
    """
    kernel = linear["kernel"]
    if not isinstance(kernel, dict) and kernel.ndim > 3 and "lora_a" in linear:
        # Of experts those of one layer at a time: in fp32 those of all are most of a model, twice.
        return jax.lax.map(lambda layer: merged_kernel(layer, lora), linear)
    matrix = as_matrix(kernel, quantized, jnp.float32)
    if "lora_a" in linear and lora is not None:
        a, b = (linear[name].astype(jnp.float32) for name in ("lora_a", "lora_b"))
        matrix += lora.scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
        if lora.subtracts:
            start = (linear[name].astype(jnp.float32) for name in START)
            matrix -= lora.scale * jnp.matmul(*start, precision=jax.lax.Precision.HIGHEST)
        if "lora_m" in linear:
            matrix *= (linear["lora_m"] / column_norms(matrix))[..., None, :]
    return matrix if isinstance(kernel, dict) else matrix.astype(kernel.dtype)


def merge(params: Params, lora: LoraConfig | None, path: Path = ()) -> Params:
    """The parameters without adapters, in which kernels W became W + scale A B; those on quantised kernels stay.

    Modules that were trained whole take the place of those they started from. `path` is that of `params` in those of
    the model.
    """
    params = overlaid(params)
    if not isinstance(params.get("up", {}).get("kernel"), dict):  # of quantised experts the adapter stays that of both
        params = with_shared(params)
    found = {name: merge(x, lora, (*path, name)) if isinstance(x, dict) else x for name, x in params.items()}
    if "lora_a" in params and isinstance(params.get("kernel"), jax.Array | jax.ShapeDtypeStruct):
        found["kernel"] = merged_kernel(params, None if lora is None else lora.at(path))
        for name in (*ADAPTER, *START):
            found.pop(name, None)
    return found
