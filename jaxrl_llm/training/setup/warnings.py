"""Warnings that a run begins with: settings that are allowed, and not what their user may think."""

import jax
import jax.numpy as jnp

from jaxrl_llm.config.checks.values import ENVIRONMENTS, value_of
from jaxrl_llm.config.schema import BY_NAME, OFFLINE
from jaxrl_llm.config.unread import unread
from jaxrl_llm.data.templates import called_turn
from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.environments.agents import Agents
from jaxrl_llm.environments.factory import Environments
from jaxrl_llm.environments.tool_calls import PROBE_CALL, PROBE_TOOL, ToolCall, parse_tool_calls
from jaxrl_llm.models.adapters.lora import has_adapters, without_adapters
from jaxrl_llm.models.cast import in_precision
from jaxrl_llm.models.families import rotary
from jaxrl_llm.models.files import hf, quantized
from jaxrl_llm.models.model import Model, config_folder
from jaxrl_llm.models.quantize import BYTES
from jaxrl_llm.training.advantages import AdvantageStep
from jaxrl_llm.training.setup import specs
from jaxrl_llm.training.setup.data import model_entries
from jaxrl_llm.training.setup.worker import played_environments

SMALL_RATE = 5e-6  # the smallest at which 16-bit parameters were seen to follow float32 ones (docs/scaling.md)


def warnings_of(
    config, model: Model, advantages: AdvantageStep | None, environments: Environments | Agents | None
) -> list[str]:
    """The warnings of a run's settings and model, a sentence each; `advantages` are those of an online algorithm."""
    return [
        *unread(config, has_adapters(model.params), environments is not None),
        *unread_entries(config),
        *unmatched_names(config, model),
        *rotary.unread(model.hf_config or {}),
        *narrow_updates(config, model),
        *untrained_policy(config),
        *([] if advantages is None else left_out_prompts(config, advantages)),
        *([] if advantages is None else equal_completions(config, advantages)),
        *unread_calls(config, model, environments),
        *experts_left_out(config, model),
        *read_as_numbers(config, model),
    ]


def unread_entries(config) -> list[str]:
    """A warning for entries of model.overrides without which the network is the same, and which its file has not."""
    if not (entries := model_entries(config)):
        return []
    folder = config_folder(config.model.path, config.model.revision)
    held, net = hf.read_config(folder), hf.load_net(folder, entries).config
    known = {*held, *(held.get("text_config") or {}), "bos_token_id", "eos_token_id", "pad_token_id"}
    unread = [
        name
        for name in entries.keys() - known
        if hf.load_net(folder, {key: value for key, value in entries.items() if key != name}).config == net
    ]
    shown = f"of {config.model.path}, and the network reads no such entry"
    return [f"model.overrides: {', '.join(sorted(unread))} is not in config.json {shown}"] if unread else []


def unmatched_names(config, model: Model) -> list[str]:
    """A warning for names of optimizer.no_decay, beside the usual ones, that no parameter has: they decay."""
    key = BY_NAME["optimizer.no_decay"]
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(model.params)]
    unmatched = [x for x in config.optimizer.no_decay if x not in key.default and not any(p.endswith(x) for p in paths)]
    last = ", ".join(sorted({path.rpartition("/")[2] for path in paths}))
    said = f"ends the path of no parameter, so that nothing is left out by it; the last names are {last}"
    return [f"{key.name}: {', '.join(unmatched)} {said}"] if unmatched else []


def narrow_updates(config, model: Model) -> list[str]:
    """A warning where updates are far smaller than the spacing of the numbers that they are added to."""
    dtype, rate = config.model.param_dtype, config.optimizer.learning_rate
    if dtype == "float32" or has_adapters(model.params) or rate >= SMALL_RATE:
        return []
    return [
        f"model.param_dtype is {dtype} and optimizer.learning_rate {rate:g}: an update is far smaller than the spacing "
        f"of {dtype}, so that most parameters stay and some, drawn at random, move a whole spacing: right on average, "
        "and noisy. float32 is exact (docs/scaling.md)"
    ]


def untrained_policy(config) -> list[str]:
    """A warning where the critic's warm-up leaves the policy no step."""
    alone, steps = config.critic.warmup_steps, config.total_steps
    if config.algorithm.name != "ppo" or not 0 < steps <= alone:
        return []
    return [
        f"critic.warmup_steps is {alone}, and total_steps {steps}: the critic alone is trained, and the policy stays "
        "as it is. Set warmup_steps lower than total_steps to train it"
    ]


def left_out_prompts(config, advantages: AdvantageStep) -> list[str]:
    """A warning where dynamic sampling leaves out prompts that the advantage rule would learn from."""
    c = config.algorithm
    rule = next((rule for rule in advantages.rules if not rule.compares_groups), None)
    if rule is None or not c.dynamic_sampling or c.dynamic_sampling_metric is not None:
        return []
    return [
        "algorithm.dynamic_sampling leaves out prompts whose completions score alike, as verl does under any rule, but "
        f"{rule.setting} = {rule.name!r} would learn from these too: set it to false to keep them"
    ]


def equal_completions(config, advantages: AdvantageStep) -> list[str]:
    """A warning where the completions of a prompt are the same, and the advantage rule compares them."""
    c, rule = config.rollout, next((rule for rule in advantages.rules if rule.compares_groups), None)
    only = {"rollout.temperature": c.temperature == 0, "rollout.top_k": c.top_k == 1, "rollout.min_p": c.min_p == 1}
    key = next((key for key, greedy in only.items() if greedy), None)
    others = (value_of(config, name) for name in ENVIRONMENTS)  # which may answer equal turns differently
    if rule is None or key is None or any(others) or config.total_steps == 0:
        return []
    return [
        f"{key} is {value_of(config, key):g}, with which the completions of a prompt are the same, but "
        f"{rule.setting} = {rule.name!r} compares their rewards: where these are equal too, nothing is learned"
    ]


def experts_left_out(config, model: Model) -> list[str]:
    """Warnings where experts, most of a mixture of them, stay as they are beside fewer bits or adapters."""
    leaves, net = jax.tree_util.tree_leaves_with_path(model.params), model.net.config
    experts = [x for path, x in leaves if "/experts/" in path_name(path)]
    if not experts:
        return []
    held = f"{sum(x.nbytes for x in experts) / 1e9:.3g} of {sum(x.nbytes for _, x in leaves) / 1e9:.3g} GB"
    found = []
    if net.quantize != "none" and net.expert_quantize == "none":
        smaller = ", model.param_dtype=bfloat16 halves them" if experts[0].dtype == jnp.float32 else ""
        found.append(f"model.quantize_experts is none, which leaves the experts as they are: {held}{smaller}")
    if net.lora is not None and not net.lora.experts and {"gate", "up", "down"} & set(net.lora.targets):
        found.append(
            f"lora.targets: experts have no adapters and are not trained: {held}. With experts beside "
            f"{', '.join(config.lora.targets)} they are"
        )
    if net.matmul_dtype != "auto":
        found.append(f"model.matmul_dtype = {net.matmul_dtype!r} leaves the matmuls of experts in {net.dtype}: {held}")
    weights_dtype = config.rollout.weights_dtype
    narrow = config.algorithm.name not in OFFLINE and weights_dtype in BYTES
    if narrow and in_precision(model.net, weights_dtype).config.expert_quantize == "none":
        sampled = sum(x.size for x in experts) * jnp.dtype(net.dtype).itemsize
        found.append(
            f"rollout.weights_dtype = {weights_dtype!r} leaves the experts in {net.dtype}: {sampled / 1e9:.3g} GB "
            "of the sampler's parameters"
        )
    return found


def read_as_numbers(config, model: Model) -> list[str]:
    """A warning where adapters are trained on a base that takes more memory than its folder, which has few bits."""
    method = quantized.entry_of(model.hf_config or {}).get("quant_method")
    if method is None or model.net.config.quantized != "none" or not has_adapters(model.params):
        return []
    held = sum(x.nbytes for x in jax.tree.leaves(without_adapters(model.params))) / 1e9
    return [
        f"model.path = {config.model.path!r} has matrices in few bits ({method}), which are read as numbers: "
        f"{held:.3g} GB with the rest. model.quantize keeps them few (docs/models.md says which keep every number)"
    ]


def unread_calls(config, model: Model, environments: Environments | Agents | None) -> list[str]:
    """A warning where there are tools, and the chat template writes calls of them in a form that is not read."""
    played, tokenizer = played_environments(environments), model.tokenizer
    if played is None or not any(played.schemas.values()) or not getattr(tokenizer, "chat_template", None):
        return []
    turn = called_turn(tokenizer, [PROBE_CALL], [PROBE_TOOL], specs.data_spec(config).template_kwargs)
    found = [] if turn is None else parse_tool_calls(turn, [PROBE_TOOL])
    if turn is None or [call._replace(id=None) for call in found] == [ToolCall(**PROBE_CALL)]:
        return []
    return [
        f"the chat template writes calls of tools as {turn.strip()!r:.200}, a form that is not read: no tool will be "
        "called. docs/environments.md has the forms that are"
    ]
