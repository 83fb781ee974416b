"""Adapters of experts in PEFT's files: `target_parameters`, the stacked matrices of a layer and two tensors of factors.

PEFT wraps the module of the experts once for each parameter, gate_up_proj first, whose factors are those of its
`base_layer` where down_proj is wrapped too. A `[E r, in]` has the ranks of an expert one after another, B `[out, r E]`
the experts of a rank.
"""

import re
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.adapters.lora import EXPERTS, MODULES
from jaxrl_llm.models.families.decoder import TensorName
from jaxrl_llm.models.net import Net

FACTOR = re.compile(r"\.experts(\.base_layer)?\.lora_[AB]\.weight$")  # the end of such a tensor's name
# Families whose class has matrices `[E, in, out]` without saying so: PEFT takes them for `[E, out, in]`, and A for B.
SWAPPED = ("llama4_text",)
# Families that PEFT 0.21 reads as a qwen2_moe of transformers 4: linear maps gate_proj, up_proj and down_proj beside
# experts, which target_modules names, it takes for those of experts.
MISREAD = (
    "afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe",
    "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum",
    "olmoe", "qwen3_moe", "qwen3_next", "sarvam_mla", "solar_open",
)  # fmt: skip


class Layout(NamedTuple):
    """The arrangement of a factor in its file: as PEFT's A or B, of the transposed matrix, gate and up interleaved."""

    experts: int
    is_a: bool
    swapped: bool
    interleaved: bool

    def in_file(self, x: np.ndarray) -> np.ndarray:
        """The tensor `[E r, in]` or `[out, r E]` of a layer's factor, `[E, in, r]` or `[E, r, out]`."""
        if self.interleaved:
            x = x.reshape(*x.shape[:2], 2, -1).swapaxes(2, 3).reshape(x.shape)
        x = x.swapaxes(1, 2) if self.swapped else x
        return x.swapaxes(1, 2).reshape(-1, x.shape[1]) if self.is_a else x.transpose(2, 1, 0).reshape(x.shape[2], -1)

    def in_parameters(self, x: np.ndarray) -> np.ndarray:
        """The layer's factor of a tensor: the inverse of `in_file`."""
        by_expert = (self.experts, -1, x.shape[1]) if self.is_a else (x.shape[0], -1, self.experts)
        x = x.reshape(by_expert).swapaxes(1, 2) if self.is_a else x.reshape(by_expert).transpose(2, 1, 0)
        x = x.swapaxes(1, 2) if self.swapped else x
        return x.reshape(*x.shape[:2], -1, 2).swapaxes(2, 3).reshape(x.shape) if self.interleaved else x


def stacked_key(family) -> TensorName | None:
    """The key of gate in the stacked matrices of transformers' class, None for a family that has no such table."""
    tables = (getattr(family, "MODULE_KEYS", ()), family.KEYS, *getattr(family, "OTHER_KEYS", ()))
    keys = (key for table in tables for key in table if key.path.endswith("/experts/gate/kernel"))
    return next((key for key in keys if key.tensor.endswith(f".{EXPERTS[0]}")), None)


def tensors_of(path: str, net: Net, family) -> tuple[list[str], Layout]:
    """The tensors, one per layer, of the factor at `path` in the parameters, and the arrangement of each."""
    key, lora = stacked_key(family), net.config.lora
    assert key is not None
    assert lora is not None
    stack, *_, matrix, leaf = path.split("/")
    swapped, of_both = family.MODEL_TYPE in SWAPPED, matrix == "gate_up"
    is_a = (leaf == "lora_a") != swapped
    module = key.tensor.removesuffix(".gate_up_proj") + ".base_layer" * (of_both and len(lora.experts) == 2)
    names = [f"{module.format(layer=layer)}.lora_{'A' if is_a else 'B'}.weight" for layer in net.config.stacks[stack]]
    return names, Layout(net.config.experts, is_a, swapped, key.interleaved and of_both and leaf == "lora_b")


def targets_of(entries: dict[str, Any], file: object) -> list[str]:
    """The targets `experts.gate_up_proj`, `experts.down_proj` that `target_parameters` in the entries of `file` means.

    The weight of a linear map means none: its adapter is that of the map. Raises ConfigError for other parameters.
    """
    known = {target.rpartition(".")[2]: target for target in EXPERTS}
    found = []
    for name in entries.get("target_parameters") or []:
        module, _, parameter = name.rpartition(".")
        if parameter in known:
            found.append(known[parameter])
        elif parameter != "weight" or module.rpartition(".")[2] not in MODULES:
            raise ConfigError(
                f"{file}: target_parameters names {name!r}, but parameters with adapters are those of experts here, "
                f"{', '.join(known)}, and the weights of linear maps. Merge the adapter with PEFT's merge_and_unload "
                "and load the result as a model"
            )
    return found
