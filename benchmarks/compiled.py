"""What a step's programs move on accelerators, by their compilers, without having one: benchmarks/results/compiled.md.

    python -m benchmarks.compiled                       # the cells that are missing, half an hour to hours
    python -m benchmarks.compiled --only=0.6b,h100      # those whose names have all of these parts
    python -m benchmarks.compiled --again               # anew
    python -m benchmarks.compiled --page                # the page alone
    python -m benchmarks.compiled --only=0.6b,h100 --set='{"rollout.top_p": 0.9}'   # printed and not kept
    python -m benchmarks.compiled --only=tunix --tunix=PYTHON   # Tunix's decode step

Wants `pip install "jaxrl_llm[plan-cuda]"` for GPUs and libtpu for TPUs (docs/plan.md); cells whose compiler is missing
are left out. Each cell is a process of its own, which plans configs/grpo.py for the shape of a public model: 8 prompts
of 512 tokens, 8 completions of 1024 tokens each, `model.remat=block`; everything else is the default, so that
micro-batches are as large as memory allows. The bytes that a decode step must read are the sampler's parameters and all
keys and values, once; states of recurrent layers are read and written.

PYTHON is that of an environment with Tunix, this library and the GPU's compiler, where
`pip install google-tunix==0.1.7 jax==0.10.2 flax==0.12.8 transformers==5.12.1 ".[plan-cuda]"` was run.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cases import OURS, QWEN3, TUNIX
from benchmarks.meter import report, result_of
from benchmarks.page import table

ROOT = Path(__file__).parent.parent
STORE, PAGE = (ROOT / "benchmarks" / "results" / f"compiled.{kind}" for kind in ("json", "md"))
LLAMA3 = QWEN3 | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "rope_theta": 5e5, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip


def shape(family: dict[str, Any], width: int, layers: int, heads: int, hidden: int, **more: Any) -> dict[str, Any]:
    """The config.json of a model."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**family, **sizes, "intermediate_size": hidden, **more}


MODELS = {
    "0.6b": shape(QWEN3, 1024, 28, 16, 3072, tie_word_embeddings=True),  # Qwen3
    "1.7b": shape(QWEN3, 2048, 28, 16, 6144, tie_word_embeddings=True),
    "8b": shape(QWEN3, 4096, 36, 32, 12288, tie_word_embeddings=False),
    "70b": shape(LLAMA3, 8192, 80, 64, 28672),  # Llama 3
}
MODELS["0.8b-hybrid"] = {  # Qwen3.5: gated delta nets in three layers of four
    **shape(QWEN3, 1024, 24, 8, 3584, tie_word_embeddings=True), "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text", "vocab_size": 248320, "head_dim": 256, "num_key_value_heads": 2,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
MODELS["8b of 3 layers"] = MODELS["8b"] | {"num_hidden_layers": 3}
MODELS["0.6b of 2 layers"] = MODELS["0.6b"] | {"num_hidden_layers": 2}
MODELS["0.8b-hybrid of 4 layers"] = MODELS["0.8b-hybrid"] | {"num_hidden_layers": 4}  # ten minutes for v6e
# Layers of the kinds of Gemma 4 (its last three read the keys and values of the first) and Llama 4, not their number.
MODELS["gemma4 of 6 layers"] = {
    **shape(QWEN3, 2304, 6, 8, 9216, tie_word_embeddings=True), "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text", "vocab_size": 262144, "head_dim": 256, "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512, "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "rope_theta": None,
}  # fmt: skip
MODELS["llama4 of 4 layers"] = {
    **shape(LLAMA3, 5120, 4, 40, 8192), "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text",
    "vocab_size": 202048, "intermediate_size_mlp": 16384, "num_local_experts": 16, "num_experts_per_tok": 1,
}  # fmt: skip
# Mixtures of many experts, Qwen3-30B-A3B and gpt-oss-20b, of two of their layers.
MODELS["30b-a3b of 2 layers"] = {
    **shape(QWEN3, 2048, 2, 32, 6144, tie_word_embeddings=False), "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip
MODELS["gpt-oss-20b of 2 layers"] = {
    **shape(QWEN3, 2880, 2, 64, 2880, tie_word_embeddings=False), "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss", "vocab_size": 201088, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"], "rope_theta": 150000,
}  # fmt: skip
# Recurrent layers and latent attention of DeepSeek-V3, Nemotron-H-8B, Kimi-Linear-48B-A3B, LFM2-1.2B and Gemma-3-1B,
# not their number; where a family asks for experts, the last layer has one, as other cells count those.
MODELS["deepseek-v3 of 3 layers"] = {
    **shape(LLAMA3, 7168, 3, 128, 18432), "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "vocab_size": 129280, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 2,
    "n_routed_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 2048,
}  # fmt: skip
MODELS["nemotron-h of 4 layers"] = {
    **shape(QWEN3, 4096, 4, 32, 21504, tie_word_embeddings=False), "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h", "vocab_size": 131072, "hybrid_override_pattern": "M-M*", "n_groups": 8,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "conv_kernel": 4, "mlp_hidden_act": "relu2",
}  # fmt: skip
MODELS["kimi-linear of 4 layers"] = {
    **shape(LLAMA3, 2304, 4, 32, 9216), "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear",
    "vocab_size": 163840, "num_key_value_heads": 32, "head_dim": 72, "first_k_dense_replace": 3, "num_experts": 1,
    "num_experts_per_token": 1, "linear_attn_config": {
        "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
MODELS["lfm2 of 4 layers"] = {
    **shape(LLAMA3, 2048, 4, 32, 8192, tie_word_embeddings=True), "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2", "vocab_size": 65536, "norm_eps": 1e-5, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}  # fmt: skip
MODELS["gemma3 of 6 layers"] = {
    **shape(QWEN3, 1152, 6, 4, 6912, tie_word_embeddings=True), "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text", "vocab_size": 262144, "head_dim": 256, "num_key_value_heads": 1,
    "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512, "query_pre_attn_scalar": 256,
}  # fmt: skip
RECURRENT = tuple(MODELS)[-5:]  # and latent
DEVICES = ("h100", "v5e", "v5p", "v6e")
# How many devices hold the training of a model, all of them by fsdp.
COUNTS = {
    "0.6b": {"v5e": 1}, "1.7b": {}, "8b": dict.fromkeys(DEVICES, 8), "70b": {"h100": 64, "v5p": 64},
    "0.8b-hybrid": {"h100": 1, "v6e": 1}, "0.8b-hybrid of 4 layers": {"v6e": 1},
    "8b of 3 layers": {"h100": 1}, "0.6b of 2 layers": {"h100": 1, "v6e": 1}, "gemma4 of 6 layers": {"h100": 1},
    "llama4 of 4 layers": {"h100": 1},
    "30b-a3b of 2 layers": {"h100": 1, "v6e": 1}, "gpt-oss-20b of 2 layers": {"h100": 1},
    **{model: {"h100": 1} for model in RECURRENT},
}  # fmt: skip
SETTINGS = {
    "batch.prompts": 8, "rollout.group_size": 8, "rollout.max_prompt_length": 512,
    "rollout.max_completion_length": 1024, "algorithm.beta": 0.0, "model.remat": "block",
}  # fmt: skip
EIGHT_BITS = {
    "rollout.weights_dtype": "int8", "rollout.cache_dtype": "fp8", "algorithm.importance_correction": "token_truncate"
}  # fmt: skip
# Each phase, the programs of it that are shown, and the settings beside the common ones.
PHASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "rollout": ("rollout", ("rollout: prefill", "rollout: decode"), {}),
    "rollout, int8 and fp8": ("rollout", ("rollout: decode",), EIGHT_BITS),
    "update": ("update", ("update",), {}),
    "logps": ("logps", ("reference",), {"algorithm.beta": 0.04}),
}
# How a policy comes to the mesh that samples: how many devices train, all by fsdp, and `rollout.mesh` of as many others
# ("of others"), or of the same.
PUSHES: dict[str, tuple[int, str]] = {
    "push, fsdp=8 to tensor=8": (8, "tensor=8"),
    "push, fsdp=32 to data=4,tensor=8": (32, "data=4,tensor=8"),
    "push, fsdp=4 to tensor=4 of others": (4, "tensor=4"),
    "push, fsdp=32 to data=4,tensor=8 of others": (32, "data=4,tensor=8"),
}
LONG = 16_384  # tokens from which an array of length times length would be seen in a program of rows of 32k
ROWS_OF_8K = {"rollout.max_prompt_length": 1024, "rollout.max_completion_length": 7168}
ROWS_OF_32K = {"rollout.max_prompt_length": 1024, "rollout.max_completion_length": 31744}
OFFLOADED = {**ROWS_OF_32K, "model.remat": "offload"}
FOUR_ROWS = {**ROWS_OF_32K, "batch.prompts": 1, "rollout.group_size": 4, "algorithm.beta": 0.04}
SFT_OF_32K = {"algorithm.name": "sft", "data.max_length": 32_768, "batch.prompts": 4}
# The untuned GPU compiler splits the sums of narrow matmuls into parts that a second kernel adds; here it does not.
UNSPLIT = "--xla_gpu_experimental_force_split_k=1"
FURTHER = {
    "rollout, bfloat16, no split-K": ("rollout", ("rollout: decode",), {}),
    "rollout, int8 and fp8, no split-K": PHASES["rollout, int8 and fp8"],
    "update, rows of 8k": ("update", ("update",), ROWS_OF_8K),
    **{
        f"update, rows of 8k, batch.microbatch_tokens={n}": (
            "update",
            ("update",),
            {**ROWS_OF_8K, "batch.microbatch_tokens": n},
        )
        for n in (131_072, 65_536)
    },
    "update, rows of 8k, model.remat=offload, batch.microbatch_tokens=262144": (
        "update",
        ("update",),
        {**ROWS_OF_8K, "model.remat": "offload", "batch.microbatch_tokens": 262_144},
    ),
    "update, rows of 32k": ("update", ("update",), ROWS_OF_32K),
    "update, rows of 32k, model.remat=offload": ("update", ("update",), OFFLOADED),
    "update, rows of 32k, model.remat=offload, model.mlp_tile_tokens=16384": (
        "update",
        ("update",),
        {**OFFLOADED, "model.mlp_tile_tokens": 16_384},
    ),
    "update, 4 rows of 32k": ("update", ("update",), SFT_OF_32K),
    "logps, 4 rows of 32k": ("logps", ("reference",), FOUR_ROWS),
}
# Of models that have not all phases on all devices: theirs, on those of COUNTS.
FEW = {
    "70b": tuple(PHASES),
    "8b of 3 layers": ("rollout",),
    "0.6b of 2 layers": ("update, rows of 32k", "update, 4 rows of 32k", "logps, 4 rows of 32k"),
    "0.8b-hybrid": ("rollout", "update, 4 rows of 32k", "logps, 4 rows of 32k"),
    "0.8b-hybrid of 4 layers": ("update, 4 rows of 32k",),
    "gemma4 of 6 layers": ("rollout", "update"),
    "llama4 of 4 layers": ("rollout",),
    "30b-a3b of 2 layers": ("rollout", "update", "logps"),
    "gpt-oss-20b of 2 layers": ("rollout", "update"),
    **dict.fromkeys(RECURRENT, ("rollout",)),
}
PEERS = (f"0.6b | h100 | {TUNIX}",)  # model, device and library whose decode step is compiled too


def cells() -> list[tuple[str, str, str]]:
    """Model, device and phase of every cell."""
    found = [(m, d, p) for m in MODELS for d in (COUNTS[m] if m in FEW else DEVICES) for p in FEW.get(m, PHASES)]
    found += [("8b", "h100", phase) for phase in list(FURTHER)[:9]]
    return [*found, *(("8b", device, phase) for device in ("h100", "v6e") for phase in PUSHES)]


def state_bytes(model: dict[str, Any], rows: int) -> float:
    """What decoding must move of recurrent layers beside reading their caches once: states are written too.

    Neither the latest tokens that a row keeps, which are as many as it might take back, nor what the last one changes
    must be read.
    """
    from jaxrl_llm.models.files.hf import family_of
    from jaxrl_llm.models.mixers.delta_net import GatedDeltaNet
    from jaxrl_llm.models.mixers.short_conv import AT_ONCE, ShortConv

    c, total = family_of(model).to_config(model), 0
    for kind in c.layer_configs:
        if issubclass(kind.mixer, GatedDeltaNet):
            keys, values, k, v = c.delta_key_heads, c.delta_value_heads, c.delta_key_dim, c.delta_value_dim
            recent = 2 * keys * k + values * v + kind.mixer.inputs(keys, values // keys, k)
            change = values * kind.mixer.kept_size(k) + keys * k + values * v
            total += 4 * (values * k * v - change) - 2 * (2 * AT_ONCE + c.delta_conv - 1) * recent
        elif issubclass(kind.mixer, ShortConv):
            total -= 2 * (AT_ONCE + c.conv_size - 1) * c.width
    return rows * total


def squares(text: str, length: int) -> list[str]:
    """The arrays of a program, by type and shape, of which two dimensions are `length` or more."""
    shapes = set(re.findall(r"\b[a-z]+\d*\w*\[[\d,]+\]", text))
    return sorted(x for x in shapes if sum(int(n) >= length for n in re.findall(r"\d+", x[x.index("[") :])) > 1)


@contextlib.contextmanager
def target_of(config: Any, model: str, device: str, count: int) -> Iterator[Any]:
    """The devices to compile for; in the block `config.model.path` is a folder with the model's shape alone."""
    from jaxrl_llm.tools.plan.topology import target

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[model]))
        config.model.path = folder
        yield target(config, device, count)


def measured(model: str, device: str, phase: str, own: dict[str, Any] | None = None) -> dict[str, Any]:
    """The programs of one cell, of which settings may be one's own: for each GB moved, kernels, GB of temporaries and
    arguments, seconds to compile."""
    from benchmarks.traffic import step_and_rest, traffic
    from jaxrl_llm.config import batch_rows, default
    from jaxrl_llm.distributed.sharding import rollout_mesh
    from jaxrl_llm.tools.plan.planned import make_plan
    from jaxrl_llm.tools.plan.topology import traced_as_on

    only, names, more = (PHASES | FURTHER)[phase]
    config, count = default(), COUNTS[model].get(device, 1)
    for key, value in {**SETTINGS, **more, **(own or {})}.items():
        config.update_from_flattened_dict({key: value})
    if count > 1:
        config.mesh.fsdp, config.mesh.data = count, 1
    with target_of(config, model, device, count) as devices:
        if not devices.exact:
            return {"missing": devices.compiler}
        plan = make_plan(config, devices, only=only)
        with traced_as_on(devices):
            sampling = rollout_mesh(devices.mesh, config.rollout.mesh, MODELS[model]["num_key_value_heads"]).shape
        shards = sampling["fsdp"] * sampling["tensor"]  # of the table of embeddings, of which a step reads few rows
    found: dict[str, Any] = {"devices": count, "mesh": dict(plan.target.mesh.shape), "note": plan.note}
    for program in plan.programs:
        if program.name not in names or not plan.target.exact:
            continue
        row: dict[str, Any] = {"temporaries": program.temporaries, "arguments": program.arguments}
        row["seconds"] = round(program.seconds, 1)
        if "32k" in phase:
            row["squares"] = squares(program.text, LONG)
        if program.name == "rollout: decode":
            step, rest = step_and_rest(program.text)
            of_config = MODELS[model]
            table = 0 if of_config["tie_word_embeddings"] else of_config["vocab_size"] * of_config["hidden_size"] * 2
            least = sum(plan.sampling.values()) - table / shards + state_bytes(of_config, batch_rows(config)) / count
            row |= step._asdict() | {"beside": rest.moved, "least": least}
        else:  # of two loops over logits the second runs over what the first leaves
            trips = (*program.trips[:-1], (program.trips[-1], 1.0)) if program.trips else ()
            row |= traffic(program.text, trips)._asdict()
        found[program.name] = row
    return found


def pushed(model: str, device: str, phase: str, own: dict[str, Any] | None = None) -> dict[str, Any]:
    """The programs that bring a policy into the type that decodes and the shards of the mesh that samples.

    Of the same devices one program does both. To others shards are copied as they are: that is no program.
    """
    import jax
    from jax.sharding import Mesh

    from benchmarks.traffic import traffic
    from jaxrl_llm.config import default
    from jaxrl_llm.distributed.sharding import bytes_on_device, make_mesh, resharding, rollout_mesh, shardings
    from jaxrl_llm.models.cast import copied_to_decode, decoding_params
    from jaxrl_llm.tools.plan.compiler import Compiler
    from jaxrl_llm.tools.plan.planned import describe_for
    from jaxrl_llm.tools.plan.sampling import make_engine
    from jaxrl_llm.tools.plan.topology import traced_as_on
    from jaxrl_llm.training.update import merge_frozen

    count, text = PUSHES[phase]
    config = default()
    config.update_from_flattened_dict({**SETTINGS, "mesh.fsdp": count, "mesh.data": 1, **(own or {})})
    with target_of(config, model, device, count) as devices:
        if not devices.exact:
            return {"missing": devices.compiler}
        mesh, compiler = devices.mesh, Compiler(0, count, options=dict(devices.options))
        with jax.set_mesh(mesh), traced_as_on(devices):
            shapes = describe_for(config, devices)
            decoder = make_engine(config, shapes.net, False).decoder
            params = merge_frozen(shapes.state, shapes.frozen).params
            # As of one process: some hosts of these devices have fewer.
            sampling = rollout_mesh(make_mesh(devices=jax.devices()), text)
            if phase.endswith("others"):
                params = compiler.add("cast", copied_to_decode, (params, decoder))
                function = resharding(params, mesh, sampling)
            else:
                sampling = Mesh(mesh.devices.reshape(sampling.devices.shape), mesh.axis_names)
                cast = functools.partial(decoding_params, decoder=decoder)
                function = jax.jit(cast, out_shardings=shardings(jax.eval_shape(cast, params), sampling))
            held = compiler.add("push", function, (params,))
    found: dict[str, Any] = {"devices": count, "mesh": dict(mesh.shape), "policy": bytes_on_device(held)}
    for program in compiler.programs:
        counts = {x.kind: [x.group, x.count, x.sent] for x in program.collectives}
        row = {"temporaries": program.temporaries, "arguments": program.arguments, "seconds": round(program.seconds, 1)}
        found[program.name] = row | traffic(program.text)._asdict() | {"sends": counts}
    return found


def page(store: dict[str, Any]) -> str:
    """The tables of all cells that were measured."""

    def gb(size: float, digits: int) -> str:
        return f"{size / 1e9:,.{digits}f}"

    decode = [["model", "devices", "numbers", "GB moved", "over the least", "kernels", "temporaries, GB",
               "beside the steps of a chunk, GB", "collectives, GB", "s to compile"]]  # fmt: skip
    others = [["model", "devices", "program", "GB moved", "kernels", "temporaries, GB", "arguments, GB",
               "collectives, GB", "s to compile"]]  # fmt: skip
    pushes = [["model", "devices", "from and to", "policy of a device, GB", "collectives", "sent by a device, GB",
               "GB moved", "temporaries, GB", "s to compile"]]  # fmt: skip
    refused = []
    for name, cell in store["cells"].items():
        model, device, phase = name.split(" | ")
        on = f"{cell.get('devices', 1)} x {device}" if cell.get("devices", 1) > 1 else device
        if cell.get("note"):
            refused.append(f"- {model}, {on}, {phase}: {cell['note']}")
        for program in (x for x in cell if isinstance(cell[x], dict) and "moved" in cell[x]):
            row = cell[program]
            if program == "rollout: decode":
                bits = phase.partition(", ")[2] or "bfloat16"
                ratio = row["moved"] / row["least"]
                numbers = [gb(row["moved"], 2), f"{ratio:.2f}", f"{row['kernels']:.0f}", gb(row["temporaries"], 2)]
                numbers += [gb(row["beside"], 2), gb(row["exchanged"], 3)]
                decode.append([model, on, bits, *numbers, f"{row['seconds']:.0f}"])
            elif program == "push":
                kinds = ", ".join(f"{number:.0f} {kind}" for kind, (_, number, _) in row["sends"].items())
                sent = sum(sent for _, _, sent in row["sends"].values())
                sizes = [gb(sent, 2), gb(row["moved"], 1), gb(row["temporaries"], 2), f"{row['seconds']:.0f}"]
                pushes.append([model, on, phase.partition(", ")[2], gb(cell["policy"], 2), kinds, *sizes])
            elif phase not in PUSHES:
                numbers = [gb(row["moved"], 0), f"{row['kernels']:,.0f}", gb(row["temporaries"], 1)]
                numbers += [gb(row["arguments"], 1), gb(row["exchanged"], 1), f"{row['seconds']:.0f}"]
                own = program.removeprefix("rollout: ") + phase.removeprefix("rollout").removeprefix("logps")
                others.append([model, on, phase if program == "update" else own, *numbers])
    versions = ", ".join(f"{name} {number}" for name, number in store["versions"].items())
    parts = ["# Compiled programs", "", f"By `python -m benchmarks.compiled`, of one device; {versions}.", ""]
    parts += ["## A decode step", "", table(decode)]
    peers = _beside_peers(store)
    parts += ["## A decode step beside a peer's", "", BESIDE_PEERS, table(peers)] if len(peers) > 1 else []
    parts += ["## Other programs, whole runs", "", table(others)]
    parts += ["## A policy to the mesh that samples", "", table(pushes)] if len(pushes) > 1 else []
    parts += ["## Refused", "", *refused] if refused else []
    return "\n".join(parts)


BESIDE_PEERS = """\
The same work by the same compiler and counter: 64 rows of 512 + 1024 tokens, eight of each prompt, in bfloat16. Our
least is the matrices once, and the keys and values of 8 prompts and 64 completions once. Tunix keeps a prompt's keys
and values for each of its rows, so its own least is larger. Its caches have their full size from the first step; ours
grow to the size that is counted here. What lies beside the steps moves once a chunk of at most 32 steps here, and once
a rollout of 1024 in Tunix: its caches into another layout, which is its temporaries, and back. A step here also gives
the log-probs of its tokens; Tunix's, as benchmarks/peers/with_tunix.py calls it, does not.
"""


def _beside_peers(store: dict[str, Any]) -> list[list[str]]:
    """The decode step of each peer behind ours of the same model and device, and only where that was measured."""
    rows = [["model", "device", "library", "GB moved", "over our least", "over its own least", "kernels",
             "temporaries, GB", "beside the steps, GB", "s to compile"]]  # fmt: skip
    for name, peer in store.get("peers", {}).items():
        model, device, _ = name.split(" | ")
        ours = store["cells"].get(f"{model} | {device} | rollout", {}).get("rollout: decode")
        label = ", ".join(f"{package} {number}" for package, number in peer["versions"].items())
        for library, row in ((OURS, ours), (label, peer)) if ours else ():
            ratios = [f"{row['moved'] / least:.2f}" for least in (ours["least"], row["least"])]
            moved, temporaries, beside = (f"{row[size] / 1e9:.2f}" for size in ("moved", "temporaries", "beside"))
            numbers = [moved, *ratios, f"{row['kernels']:.0f}", temporaries, beside, f"{row['seconds']:.0f}"]
            rows.append([model, device, library, *numbers])
    return rows


def main() -> None:
    """The command line: see above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of names, by commas")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--tunix", metavar="PYTHON", help="an interpreter that has Tunix, whose step is compiled too")
    parser.add_argument(
        "--set", metavar="JSON", type=json.loads, default={}, help="further settings, for cells that are printed"
    )
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # the child's: model, device and phase
    options = parser.parse_args()
    if options.cell:
        model, device, phase = options.cell.split(" | ")
        if phase.endswith("no split-K"):
            os.environ["XLA_FLAGS"] = UNSPLIT
        report((pushed if phase in PUSHES else measured)(model, device, phase, options.set))
        return
    store = json.loads(STORE.read_text()) if STORE.is_file() else {"versions": {}, "cells": {}}
    command = [sys.executable, "-m", "benchmarks.compiled", f"--set={json.dumps(options.set)}"]
    lines = {name: [*command, f"--cell={name}"] for name in map(" | ".join, cells())}
    for name in PEERS if options.tunix else ():
        model, device, _ = name.split(" | ")
        lines[name] = [options.tunix, "-m", "benchmarks.peers.compiled_tunix", f"--model={model}", f"--device={device}"]
    for name, line in () if options.page else lines.items():
        stored = store.setdefault("peers" if name in PEERS else "cells", {})
        wanted = all(part in name for part in options.only.split(","))
        if not wanted or (name in stored and not (options.again or options.set)):
            continue
        done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False)
        found = result_of(done.stdout)
        if found is None:
            print(f"{name}: failed\n{done.stderr[-2000:]}", flush=True)
            continue
        print(f"{name}: {found}", flush=True)
        if "missing" not in found and not options.set:
            if name not in PEERS:  # whose versions are in their rows
                names = [x for x in ("jax", "jax-cuda12-plugin", "libtpu") if _version(x)]
                store["versions"] |= {x: _version(x) for x in names}
            stored[name] = found
            STORE.write_text(json.dumps(store, indent=1) + "\n")
    PAGE.write_text(page(store))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
