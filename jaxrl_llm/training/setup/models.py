"""The models of a run, built from its configuration: the policy, and PPO's critic."""

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.algorithms.random_streams import ADAPTERS, VALUE_HEAD
from jaxrl_llm.config import ConfigDict, ConfigError
from jaxrl_llm.config.entries import makes_up
from jaxrl_llm.config.resolve import naming
from jaxrl_llm.models.adapters.lora import LoraConfig, has_adapters, parse_targets
from jaxrl_llm.models.adapters.peft import read_config
from jaxrl_llm.models.adapters.peft_patterns import AdapterPatterns
from jaxrl_llm.models.model import Model, add_adapters, check_same_vocabulary, copied_model, load_model, make_up
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.models.trained import Trained
from jaxrl_llm.training.objectives.value import shared_critic
from jaxrl_llm.training.reward_models import right_label
from jaxrl_llm.training.setup.agreed import check_same_model
from jaxrl_llm.training.setup.data import model_entries, tokenizer_of


def build_model(
    config, mesh: Mesh, head: str | None = None, tokenizer: Any = None, given: Model | None = None
) -> Model:
    """The model of the configuration, sharded over `mesh`, or a copy of one in memory that is `given`.

    A model in memory that has adapters is trained on by them or, where `lora.rank` asks for new ones, with its own
    merged. Raises ConfigError when there is no tokenizer.
    """
    c, options = config.model, {**net_options(config, head), "trained": trained_parts(config)}
    tokenizer = tokenizer_of(config, model=given) if tokenizer is None else tokenizer
    if given is not None:
        merge = bool(config.lora.rank)
        model = copied_model(given, mesh, c.dtype, c.param_dtype, merge, **options)
        model = replace(model, tokenizer=tokenizer, changed=True)
    else:
        init_key = jax.random.key(config.seed) if c.random_init else None
        check_same_model(c.path, c.revision, c.allow_pickle, config.lora.path)
        model = load_model(
            c.path, c.dtype, c.param_dtype, mesh, init_key, config.lora.path, c.allow_pickle, c.trust_remote_code,
            c.revision, tokenizer, model_entries(config), **options,
        )  # fmt: skip
    if config.lora.rank:
        key = jax.random.fold_in(jax.random.key(config.seed), ADAPTERS)
        model = add_adapters(model, build_lora(config), key, config.lora.modules_to_save, adapter_patterns(config))
        if makes_up(config.lora.init):
            if given is not None:
                raise ConfigError(
                    f"lora.init is {config.lora.init}, which reads the matrices from the model's files as they are "
                    "before model.quantize, and the model is given in memory: set model.path, or lora.init to kaiming"
                )
            model = make_up(model, jax.random.fold_in(key, 1), c.allow_pickle, c.revision, model_entries(config))
    elif (given is not None or config.lora.path is not None) and model.net.config.lora is not None:
        model = replace(model, net=model.net.with_lora(replace(model.net.config.lora, dropout=config.lora.dropout)))
    return model


def net_options(config, head: str | None = None, on_cpu: bool | None = None) -> dict[str, Any]:
    """The fields of ModelConfig that the configuration sets, besides the types; `on_cpu` None is this process's."""
    c = config.model
    on_cpu = jax.default_backend() == "cpu" if on_cpu is None else on_cpu
    remat = ("dots" if on_cpu else "none") if c.remat == "auto" else c.remat
    head = head or {"reward_model": "score", "process_reward_model": "step"}.get(config.algorithm.name, "lm")
    options = {
        "remat": remat, "scan_layers": c.scan_layers, "head": head, "quantize": c.quantize, "fp32_head": c.fp32_head,
        "quantize_experts": c.quantize_experts,
        "freeze_router": c.freeze_router, "attention": c.attention, "vision_training": c.vision, "qat": c.qat,
        "mlp_tile_tokens": c.mlp_tile_tokens, "matmul_dtype": c.matmul_dtype,
    }  # fmt: skip
    return options if c.router_aux_loss_coef is None else options | {"router_aux_loss_coef": c.router_aux_loss_coef}


def trained_parts(config) -> Trained:
    """The parameters that the configuration trains: those that it names, or those of new adapters."""
    c, new = config.model, config.lora.rank
    return Trained(tuple(c.trainable), tuple(c.frozen), build_lora(config) if new else None, adapter_patterns(config))


def adapter_patterns(config) -> AdapterPatterns:
    """The modules that the configuration says more of than that they have new adapters."""
    c = config.lora
    return AdapterPatterns(
        tuple(c.layers_to_transform), tuple(c.exclude_modules), tuple(c.rank_pattern), tuple(c.alpha_pattern)
    )


def build_lora(config) -> LoraConfig:
    """The adapters that the configuration asks for; raises ConfigError for an unknown target."""
    c = config.lora
    return LoraConfig(c.rank, c.alpha, c.dropout, parse_targets(c.targets), c.rslora, c.dora, c.init, c.bias)


def check_prompts(config, has_environment: bool) -> None:
    """Raises ConfigError for what does not know where the prompt of a row ends, for a model in which the tokens of
    prompts see each other."""
    reasons = {
        "there is an environment, whose turns": has_environment,
        "environment.agent is set, whose calls": config.environment.agent is not None,
        "rollout.partial_prompts is set, with which continued rows": bool(config.rollout.partial_prompts),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(
                f"{reason} are sampled behind longer prompts than they are trained with, but the tokens of a prompt "
                f"see each other in {config.model.path}: leave it out, or use another model"
            )


def check_trainable(config, model: Model) -> None:
    """Raises ConfigError for a model that cannot be trained as the configuration says."""
    lora = config.lora
    if has_adapters(model.params) and not (lora.rank or lora.path):
        raise ConfigError(
            f"model.path = {config.model.path!r} is an adapter. Set lora.path to it and model.path to {model.path!r} "
            "to train it on; or merge it first, with jaxrl_llm.save_hf(jaxrl_llm.load_model(path), folder)"
        )
    if config.algorithm.name == "process_reward_model" and right_label(model.hf_config or {}, config.model.path) != 1:
        raise ConfigError(
            f"model.path = {config.model.path!r} gives right steps the label 0 (id2label of its config.json), and "
            "process_reward_model trains label 1 to be that of right ones: swap the rows of its head and the names"
        )
    if config.model.vision != "frozen" and model.net.config.vision is None:
        raise ConfigError(
            f"model.vision is {config.model.vision}, but {config.model.path} reads text alone: leave it at frozen"
        )
    check_quantized(model.net, model.params)


def check_quantized(net: Net, params: Params) -> None:
    """Raises ConfigError for quantised matrices without adapters beside them; `params` may be shapes."""
    if net.config.quantized != "none" and not has_adapters(params):
        raise ConfigError(
            f"{net.config.quantize_setting} is {net.config.quantized}, and quantised matrices are not trained: set "
            "lora.rank, 16 for example, to train adapters beside them"
        )


def build_critic(config, policy: Model, mesh: Mesh, given: Model | None = None) -> Model:
    """PPO's critic: the model of critic.path (or model.path, or the one in memory that is `given`) with a score head,
    and new adapters of `critic.lora_rank` or where the policy has adapters; or, with critic.shared, a score head on the
    policy's own network.

    Raises ConfigError for quantised matrices without adapters, and for another vocabulary than the policy's.
    """
    if config.critic.shared:
        return shared_critic(policy, jax.random.fold_in(jax.random.key(config.seed), VALUE_HEAD), mesh)
    own = critic_config(config)
    has_path = config.critic.path is not None
    tokenizer, given = (None, None) if has_path else (policy.tokenizer, given)
    key = "critic.path" if has_path else "model.path"
    with naming(f"the critic, of {key} = {own.model.path!r}"):
        critic = build_model(own, mesh, "score", tokenizer, given)
    check_same_vocabulary(policy, critic, f"critic.path = {own.model.path!r}:")
    if critic.net.config.quantized != "none" and not has_adapters(critic.params):
        raise ConfigError(
            f"critic.lora_rank is 0, but {key} = {own.model.path!r} is read as {critic.net.config.quantized}, and "
            "quantised matrices are not trained: give the critic adapters (critic.lora_rank)"
        )
    return critic


def critic_config(config) -> ConfigDict:
    """The configuration whose `model` and `lora` are those of a critic that is a network of its own."""
    own, critic = config.copy_and_resolve_references(), config.critic
    if not critic.shared:  # names are those of the policy's network
        own.model.trainable = own.model.frozen = own.lora.rank_pattern = own.lora.alpha_pattern = ()
        own.lora.layers_to_transform = own.lora.exclude_modules = ()
        own.model.qat = "none"
    if critic.path is not None:
        own.model.path, own.model.revision, own.model.overrides, own.model.tokenizer = critic.path, None, "", None
        own.model.eos_token = None
        own.data.chat_template = None
    if config.lora.path is not None:
        adapter = read_config(config.lora.path)
        shape, own.lora.path, own.lora.modules_to_save = adapter.lora, None, adapter.modules_to_save
        for name in ("rank", "alpha", "rslora", "dora", "targets", "bias"):
            own.lora[name] = getattr(shape, name)
    if critic.lora_rank is not None:
        own.lora.rank, own.lora.alpha = critic.lora_rank, critic.lora_alpha or own.lora.alpha
        own.lora.targets = critic.lora_targets or own.lora.targets
        own.lora.modules_to_save = own.lora.modules_to_save if critic.lora_rank else ()
        own.lora.bias = own.lora.bias if critic.lora_rank else "none"
    return own
