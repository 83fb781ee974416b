"""The rules for prime-rl: the TOML of its commands `rl` and `sft`, with the flags after them.

Its `rl` has a section of its own for the trainer, and sections that trainer and sampler share; both are read under the
names that `sft` has, `model` and `optim`, and what the file says of the trainer has the last word.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config import flat
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate import shared
from jaxrl_llm.tools.migrate.draft import OURS, Draft, Options, RefusedError, Source, renamed, shown
from jaxrl_llm.tools.migrate.losses import set_loss, with_options
from jaxrl_llm.tools.migrate.table import rules
from jaxrl_llm.tools.migrate.trees import file_named, parsed

RULES = rules("prime-rl")
ORCHESTRATOR = "orchestrator."
ALGORITHMS = ("grpo", "max_rl", "rae", "hierarchical_grpo", "echo", "opd", "opsd", "sft")


def read_toml(file: Path, path: str, trainer: str) -> Source:
    """Return the keys of a TOML; raises ConfigError for one that is none of prime-rl's."""
    tree = _loaded(file)
    if not tree.keys() & {"orchestrator", "trainer", "optim", "data"}:
        raise ConfigError(
            f"{path} has none of the sections orchestrator, trainer, optim and data, by which TOML of prime-rl's rl "
            "and sft is known; its other commands train nothing"
        )
    return Source("prime-rl", trainer, flat(tree), path)


def _loaded(file: Path) -> dict[str, Any]:
    """Return the tree of a TOML file; raises ConfigError for another content."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def read_command(words: Sequence[str], path: str) -> Source:
    """Return the keys of `uv run rl @ FILE.toml --section @ OTHER.toml --trainer.optim.lr 1e-5`.

    A later file replaces what an earlier one says of a key, and a flag both. Numbers in a flag count the tables of a
    list, `--orchestrator.train.source.0.group-size 8`.
    """
    start = next(place for place, word in enumerate(words) if Path(word).name in ("rl", "sft"))
    trees: list[dict[str, Any]] = []
    flags: dict[str, Any] = {}
    checks: list[str] = []
    section, place = "", start + 1
    while place < len(words):
        word = words[place]
        place += 1
        if word == "@" and place < len(words):
            file = file_named(words[place], path)
            if file is None:
                checks.append(f"the command reads {words[place]}, which is not there: its keys are missing")
            else:
                tree = _loaded(file)
                for name in reversed(section.split(".") if section else []):
                    tree = {name: tree}
                trees.append(tree)
            section, place = "", place + 1
        elif word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            section, values = name.replace("-", "_"), [text] if equals else []
            while not equals and place < len(words) and not words[place].startswith("--") and words[place] != "@":
                values.append(words[place])
                place += 1
            if place < len(words) and words[place] == "@" and not values:  # a file of this section
                continue
            off = section.startswith("no_") and not values
            several = [parsed(value) for value in values]
            flags[section.removeprefix("no_") if off else section] = (
                False if off else several[0] if len(several) == 1 else several or True
            )
            section = ""
    tree: dict[str, Any] = {}
    for one in trees:
        tree = _merged(tree, one)
    for key, value in flags.items():
        tree = _with(tree, key.split("."), value)
    return Source("prime-rl", Path(words[start]).name, flat(tree), path, tuple(checks))


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of both trees, of one in both that of the second."""
    both = {
        key: _merged(first[key], value) if isinstance(value, Mapping) and isinstance(first[key], Mapping) else value
        for key, value in second.items()
        if key in first
    }
    return {**first, **second, **both}


def _with(tree: Any, names: Sequence[str], value: Any) -> Any:
    """Return the tree with the value at the place `names`, of which numbers count the entries of lists."""
    if not names:
        return _merged(tree, value) if isinstance(tree, Mapping) and isinstance(value, Mapping) else value
    name, *rest = names
    if isinstance(tree, list) and name.isdigit() and int(name) < len(tree):
        return [_with(one, rest, value) if place == int(name) else one for place, one in enumerate(tree)]
    tree = tree if isinstance(tree, Mapping) else {}
    return {**tree, name: _with(tree.get(name), rest, value)}


def convert(source: Source, options: Options) -> Draft:
    """Return our settings for a TOML of prime-rl, or for a command that reads some."""
    sections = {key.partition(".")[0] for key in source.settings}
    trainer = source.trainer or ("rl" if sections & {"orchestrator", "trainer"} else "sft")
    if trainer not in ("rl", "sft"):
        raise RefusedError(f"{source.path}: {trainer} of prime-rl trains nothing; its rl and sft do")

    def name_of(key: str) -> str:
        return key.removeprefix("trainer.")

    # Of the shared section and the trainer's own, the latter.
    ordered = dict(sorted(source.settings.items(), key=lambda item: item[0].startswith("trainer.")))
    # TOML has no none, for which prime-rl writes a text; of a norm it is no bound.
    told = {key: None if value == "None" else value for key, value in ordered.items()}
    told |= {key: 0.0 for key, value in told.items() if key.endswith("optim.max_norm") and value is None}
    named = renamed({key: value for key, value in told.items() if value is not None}, name_of)
    title = f"{trainer.upper()}, from FILE of prime-rl; what that leaves out is as in prime-rl."
    draft = Draft(source, title, RULES["both"] | RULES[trainer], named)
    if trainer == "rl":
        draft.names |= {
            key: f"trainer.{key}"
            for key in draft.defaults
            if key not in draft.names and key.partition(".")[0] in ("model", "optim", "scheduler", "loss")
        }
    devices = _model(draft, options)
    total = draft.get("max_steps")
    draft.set("total_steps", total and int(total), "max_steps")
    if not total:
        draft.check("max_steps is not set: prime-rl then trains until it is stopped; set total_steps")
    if trainer == "sft":
        _supervised(draft, devices)
    else:
        _rollouts(draft)
        _environments(draft)
        _algorithm(draft)
    _optimizer(draft, int(total or 0))
    _saving(draft, trainer)
    return draft


def _model(draft: Draft, options: Options) -> int:
    """Set the model, its adapters and the mesh; return the devices that have rows of their own."""
    draft.set("model.path", draft.first("model.name", "orchestrator.model.name"), "model.name")
    draft.use("orchestrator.model.name", "inference.vllm.model")
    shared.check_model(draft)
    names = ("tokenizer.name", "orchestrator.tokenizer.name")
    if (tokenizer := draft.first(*names)) != draft.values["model.path"]:
        draft.set("model.tokenizer", tokenizer, *names)
    templates = ("tokenizer.chat_template", "orchestrator.tokenizer.chat_template", "inference.vllm.chat_template")
    draft.set("data.chat_template", draft.first(*templates), *templates)
    draft.use(*names, *templates)
    trusts = [f"{part}trust_remote_code" for part in ("model.", "tokenizer.", f"{ORCHESTRATOR}model.")]
    trusts.append(f"{ORCHESTRATOR}tokenizer.trust_remote_code")
    draft.set("model.trust_remote_code", any(draft.get(key) for key in trusts) or None, *trusts)
    draft.set("model.param_dtype", draft.get("model.optimization_dtype"), "model.optimization_dtype")
    draft.set("model.dtype", "bfloat16")  # products; prime-rl has no key for their type
    if draft.sets("model.ac_offloading") or _under(draft, "model.ac_offloading"):
        draft.set("model.remat", "offload", "model.ac_offloading", *_under(draft, "model.ac_offloading"))
    elif draft.sets("model.ac") or _under(draft, "model.ac"):
        whole = draft.first("model.ac.mode", default="full") == "full"
        draft.set("model.remat", "block" if whole else "auto", "model.ac", *_under(draft, "model.ac"))
    if any(draft.get(key) for key in ("model.full_offload", "model.optim_cpu_offload")):
        draft.set("optimizer.offload", True, "model.full_offload", "model.optim_cpu_offload")
    draft.set("model.offload", draft.get("model.fsdp_cpu_offload") or None, "model.fsdp_cpu_offload")
    draft.set("model.freeze_router", draft.get("model.freeze_moe_router"), "model.freeze_moe_router")
    if draft.sets("model.quantization") or _under(draft, "model.quantization"):
        # Without a correction beside it (shared.fp8_matmuls): the ratio of these losses is with the sampler.
        draft.set("model.matmul_dtype", "fp8", "model.quantization.type", "model.quantization")
    if draft.get(key := "model.vlm.freeze_vision_encoder") is False:
        draft.set("model.vision", "trained", key)
    draft.set("rollout.router_replay", draft.get("enable_router_replay"), "enable_router_replay")
    if draft.sets("model.lora") or _under(draft, "model.lora"):
        draft.take("lora.rank", "model.lora.rank", default=16)
        draft.take("lora.alpha", "model.lora.alpha", default=32.0)
        draft.take("lora.dropout", "model.lora.dropout", default=0.0)
        targets = draft.first("model.lora.target_modules", default=RULES["targets"])
        draft.set("lora.targets", tuple(targets), "model.lora.target_modules")
        draft.set("lora.modules_to_save", tuple(draft.get("model.lora.modules_to_save") or ()))
        own = [f"orchestrator.model.lora.{name}" for name in ("rank", "alpha")]
        if any(draft.get(key) for key in own):
            draft.set("lora.rank", draft.first(own[0], default=draft.values["lora.rank"]), own[0])
            draft.set("lora.alpha", draft.first(own[1], default=draft.values["lora.alpha"]), own[1])
    sharing = {"mesh.context": "model.cp"}
    if draft.get("model.ep") not in (None, "auto"):
        sharing["mesh.expert"] = "model.ep"
    draft.use("model.ep")
    if (replicas := int(draft.get("model.dp_replicate") or 1)) > 1:
        draft.set("mesh.data", replicas, "model.dp_replicate")
        draft.set("mesh.fsdp", -1, "model.dp_replicate")
    else:
        draft.set("mesh.fsdp", -1, "model.dp_replicate")
        draft.set("mesh.data", 1, "model.dp_replicate")
    nodes, each = draft.get("deployment.num_train_nodes"), int(draft.get("deployment.gpus_per_node"))
    train = int(nodes) * each if nodes else int(draft.get("deployment.num_train_gpus"))
    draft.use("deployment.num_train_nodes", "deployment.gpus_per_node", "deployment.num_train_gpus", "deployment.type")
    return shared.shared_rows(draft, sharing, options.devices or train)


def _rollouts(draft: Draft) -> None:
    """Set the rows of a step, their lengths, the sampling, and who samples."""
    group, rows = int(draft.get("orchestrator.group_size")), "orchestrator.batch_size"
    sources = draft.get("orchestrator.train.source") or []
    own = {int(one["group_size"]) for one in sources if "group_size" in one}
    if len(own) == 1 and len(sources) == 1:
        group = own.pop()
    elif own - {group}:
        draft.check(f"orchestrator.train.source: groups of {own} completions; all have {group} (rollout.group_size)")
    draft.set("rollout.group_size", group, "orchestrator.group_size")
    if tokens := draft.get(key := "orchestrator.token_batch_size"):
        draft.check(f"{key} = {tokens}: a step here has a number of prompts (batch.prompts), not of tokens")
        draft.use(key)
    else:
        draft.set("batch.prompts", int(draft.get(rows)) // group, rows, "orchestrator.group_size")
    lengths = ("orchestrator.seq_len", "model.seq_len", "seq_len")
    known = [int(draft.get(key)) for key in lengths if draft.sets(key)] or [int(draft.get(lengths[0]))]
    served = draft.get("inference.vllm.max_model_len")
    whole = min([*known, *([int(served)] if served else [])])
    for ours in ("rollout.max_prompt_length", "rollout.max_completion_length"):
        draft.set(ours, whole, *lengths, "inference.vllm.max_model_len")
    draft.set("data.overlong", "filter")
    at = "orchestrator.train.sampling"
    sampling = {name.removeprefix(f"{at}."): draft.get(name) for name in _under(draft, at)}
    if len(sources) == 1:
        sampling |= flat(sources[0].get("sampling") or {})
    elif any(one.get("sampling") for one in sources):
        draft.check("orchestrator.train.source: sampling of one environment; here all are sampled alike (rollout.*)")
    _sampling(draft, "rollout", {name.removeprefix("extra_body."): value for name, value in sampling.items()}, at)
    draft.use(*_under(draft, at))
    draft.set_none("rollout.mesh")  # sessions of agents are sampled on the mesh of training
    infer = [f"deployment.num_infer_{what}" for what in ("gpus", "nodes", "replicas")]
    draft.use(*infer, "inference.vllm.tensor_parallel_size")
    draft.check("deployment: no devices sample alone, as agents are sampled on all of mesh (rollout.devices)")
    if "mesh.context" in draft.values:
        draft.drop("mesh.context")
        draft.check("model.cp: mesh.context is left out, as agents are sampled on the mesh of training")
    age = int(draft.get(key := "orchestrator.max_off_policy_steps"))
    draft.set("rollout.staleness", min(age, 1), key)
    if age > 1:
        shared.one_batch_ahead(draft, key, age, "agents play the next batch while one is trained on")


def _sampling(draft: Draft, ours: str, given: Mapping[str, Any], at: str) -> None:
    """Set the options of sampling of the section `ours`, rollout or eval, from those of a request to vLLM."""
    for name, value in given.items():
        key = f"{ours}.{name}"
        if name == "max_completion_tokens":
            continue
        if name.startswith("chat_template_kwargs."):
            written = draft.values.get(into := "data.chat_template_kwargs")
            option = f"{name.partition('.')[2]}={value!r}"
            draft.set(into, f"{written}, {option}" if written else option, f"{at}.extra_body.{name}")
        elif key in OURS and value is not None:
            draft.set(key, max(int(value), 0) if name == "top_k" else value, f"{at}.{name}", f"{at}.extra_body.{name}")
        elif value not in (None, {}) and name not in ("return_token_ids", "logprobs"):
            draft.check(f"{shown(f'{at}.{name}', value)} has no equivalent")


def _environments(draft: Draft) -> None:
    """Set the tasksets that are trained on and evaluated on, and the agents that play them."""
    trained, evaluated = (draft.get(f"orchestrator.{part}.source") or [] for part in ("train", "eval"))
    most = draft.get("orchestrator.train.sampling.max_completion_tokens")
    agents, sources = [], []
    for one in trained:
        name, env = _named(one), dict(one.get("env") or {})
        answer = (one.get("sampling") or {}).get("max_completion_tokens", most)
        agents.append((name, _agent(env, answer)))
        several = {"agent": name} if sources else {}  # rows of the first are without
        sources.append({"path": f"task:{_tasks(env, several)}", "weight": float(one.get("ratio", 1.0))})
        for key in ("curriculum", "serve"):
            if key in one:
                draft.check(f"orchestrator.train.source {name}: {key} has no equivalent: {RULES['absent'][key]}")
    key = "orchestrator.train.source"
    if len(sources) == 1:
        draft.set("data.path", sources[0]["path"], key)
        draft.set("environment.agent", agents[0][1], key)
    elif sources:
        draft.set("data.sources", tuple(sources), key)
        draft.set("environment.agent", agents[0][1], key)
        draft.set("environment.agents", tuple(f"{name}={agent}" for name, agent in agents[1:]), key)
    else:
        draft.check(f"{key} is not set: set data.path to the rows, and environment.agent or rewards.functions")
    draft.set("rewards.functions", ("environment",), key)
    tau = float(draft.get("loss.adv_tau"))
    draft.set("rewards.weights", None if tau == 1 else (tau,), "loss.adv_tau")
    draft.set("eval.every", int(draft.get("orchestrator.eval.interval")) if evaluated else -1)
    if not evaluated:
        return
    key, at = "orchestrator.eval.source", "orchestrator.eval"
    first = evaluated[0]
    # Played by the agent that trains on the same tasks, or else by the first.
    tasks = [_taskset(dict(one.get("env") or {})) for one in trained]
    place = next((i for i, one in enumerate(tasks) if one == _taskset(dict(first.get("env") or {}))), None)
    several = {"agent": agents[place][0]} if place else {}
    draft.set("data.eval_path", f"task:{_tasks(dict(first.get('env') or {}), several)}", key)
    if len(evaluated) > 1 or place is None:
        draft.check(
            f"{key}: {', '.join(map(_named, evaluated))}; the first is written (data.eval_path), and the agent that "
            "trains plays it: eval.sets takes more"
        )
    said = {name: first.get(name, draft.get(f"{at}.{name}")) for name in ("interval", "num_examples", "group_size")}
    draft.set("eval.every", int(said["interval"]), f"{at}.interval")
    if int(said["num_examples"]) > 0:
        draft.set("eval.prompts", int(said["num_examples"]), f"{at}.num_examples")
    else:
        draft.check(f"{at}.num_examples = -1 evaluates all tasks: set eval.prompts to their number")
    draft.set("eval.samples", int(said["group_size"]), f"{at}.group_size")
    draft.set("eval.greedy", False)
    draft.set("eval.at_start", not draft.get(f"{at}.skip_first_step"), f"{at}.skip_first_step")
    sampling = {name.removeprefix(f"{at}.sampling."): draft.get(name) for name in _under(draft, f"{at}.sampling")}
    _sampling(draft, "eval", sampling | flat(first.get("sampling") or {}), f"{at}.sampling")
    draft.use(*_under(draft, at))


def _under(draft: Draft, section: str) -> list[str]:
    """Return the names of a section's keys that the file sets."""
    return [key for key in draft.settings if key.startswith(f"{section}.")]


def _named(source: Mapping[str, Any]) -> str:
    """Return the name of a source, or else the id of its taskset."""
    env = source.get("env") or {}
    return str(source.get("name") or (env.get("taskset") or {}).get("id") or env.get("id") or "")


def _tasks(env: Mapping[str, Any], more: Mapping[str, Any]) -> str:
    """Return the built-in task whose rows are those of a taskset."""
    return with_options("verifiers", {"taskset": _taskset(env), **more})


def _taskset(env: Mapping[str, Any]) -> Any:
    taskset = dict(env.get("taskset") or {"id": str(env.get("id", ""))})
    return taskset["id"] if set(taskset) == {"id"} else taskset


def _agent(env: dict[str, Any], answer: Any) -> str:
    """Return the agent that plays a taskset, whose answers have up to `answer` tokens."""
    rest = {name: value for name, value in env.items() if name != "taskset"}
    if answer is not None:
        # The agent that is trained: the only one, or the one without a model of its own.
        names = [name for name, value in rest.items() if isinstance(value, Mapping) and "client" not in value]
        name = next((name for name in names if name not in ("retries", "interception")), "agent")
        agent = dict(rest.get(name) or {})
        rest[name] = {**agent, "sampling": {**(agent.get("sampling") or {}), "max_tokens": int(answer)}}
    return with_options("verifiers", {"taskset": _taskset(env), **({"env": rest} if rest else {})})


def _algorithm(draft: Draft) -> None:
    """Set the advantages, the loss and its signal."""
    at = "orchestrator.algo"
    kind = str(draft.first(f"{at}.type", default="grpo"))
    shared.check_known(f"{at}.type", kind, ALGORITHMS)
    draft.set("algorithm.name", "grpo")
    draft.set("algorithm.aggregation", "token")
    draft.set("algorithm.beta", 0.0)
    advantages = {
        "max_rl": "maxrl",
        "rae": with_options("rae", {"decay": float(draft.first(f"{at}.decay", default=0.95))}),
        "opd": "zero",
        "opsd": "zero",
        "sft": "raw_reward",
    }
    draft.set("algorithm.advantage", advantages.get(kind, "group"), f"{at}.type", f"{at}.decay")
    draft.set("algorithm.scale_rewards", "none", f"{at}.type")
    if kind == "max_rl" and "rewards.weights" in draft.values:
        draft.drop("rewards.weights")
        draft.check("loss.adv_tau: max_rl divides by the mean reward, so that no weight of rewards is a factor of it")
    draft.set(
        "algorithm.filter_zero_advantages",
        bool(draft.get(key := "orchestrator.train.filter_zero_advantages")) and kind not in ("opd", "opsd", "sft"),
        key,
    )
    if _under(draft, f"{at}.length_penalty"):
        draft.use(*_under(draft, f"{at}.length_penalty"))
        draft.check(f"{at}.length_penalty has no equivalent: {RULES['absent']['length_penalty']}")
    if kind in ("opd", "opsd"):
        draft.set("algorithm.loss", "opd", f"{at}.type")
        draft.set("teacher.coef", 1.0, f"{at}.type")
        url, model = (draft.get(f"{at}.teacher.{name}") for name in ("base_url", "name"))
        if kind == "opd":
            server = with_options("server", {"url": url, "model": model})
            draft.set("teacher.path", server, f"{at}.teacher.base_url", f"{at}.teacher.name")
        else:
            draft.set("teacher.path", "self", f"{at}.type")
            draft.set("teacher.context", "privileged", f"{at}.type")
            draft.set("teacher.privileged_column", str(draft.first(f"{at}.demo_key", default="demonstration")))
            draft.check(
                f"{at}.type = opsd shows the policy a demonstration as a system message; here teacher.template and its "
                "kin put the column teacher.privileged_column into the prompt (docs/distillation.md)"
            )
            draft.use(f"{at}.demo_key", f"{at}.template")
        draft.use(*_under(draft, f"{at}.teacher"))
    elif kind == "sft":
        raise RefusedError(
            f"{draft.source.path}: algo.type = sft learns what a served model answers to the tasks. Here write its "
            "answers first (python -m jaxrl_llm generate), then train with algorithm.name = sft on that file"
        )
    else:
        _loss(draft)
    if kind == "echo":
        roles = [key for key in _under(draft, f"{at}.roles") if key.endswith(".alpha")]
        alphas = {float(draft.get(key)) for key in roles} or {0.1}
        draft.set("algorithm.observation_coef", min(alphas), f"{at}.type", *roles)
        if len(alphas) > 1 or any(".tool." not in key for key in roles):
            draft.check(f"{at}.roles: observations of all roles weigh the same here (algorithm.observation_coef)")
        if _under(draft, f"{at}.filter"):
            draft.check(f"{at}.filter has no equivalent: all observation tokens are learned")
    elif kind == "hierarchical_grpo":
        draft.check(
            f"{at}.type = hierarchical_grpo: the solvers are sub-agents there, opened here with compared_in = session "
            "(docs/agents.md), which an environment of verifiers does not do"
        )
    draft.use(*_under(draft, at))
    for one in draft.get("orchestrator.train.source") or []:
        if own := one.get("algo"):
            draft.check(
                f"orchestrator.train.source {_named(one)}: algo = {own} is of its rows alone; environment.options "
                "gives some environments another advantage and weight"
            )


def _loss(draft: Draft) -> None:
    """Set the loss of reinforcement learning, of the sampler's log-probs."""
    kind = str(draft.get("loss.type"))
    if kind == "custom":
        draft.check(
            f"loss.import_path = {draft.get('loss.import_path')} takes other arguments than losses here: write it as "
            "docs/algorithms.md says, and name it in algorithm.loss"
        )
        draft.use("loss.type", *_under(draft, "loss"))
        return
    shared.check_known(draft.named("loss.type"), kind, ("default", "ipo"))
    if kind == "ipo":
        # Written here: preferences have another loss of this name.
        options = {"threshold": "loss.ipo_threshold", "kl_coef": "loss.kl_tau"}
        given = {name: float(draft.get(key)) for name, key in options.items()}
        draft.set("algorithm.loss", with_options("ipo", given), "loss.type", *options.values())
    else:
        set_loss(draft, [("dppo", {"kl_coef": "loss.kl_tau"})], "loss.type")
        draft.take("algorithm.epsilon_low", "loss.dppo_mask_low")
        draft.take("algorithm.epsilon_high", "loss.dppo_mask_high")
    draft.use("loss.type", *_under(draft, "loss"))


def _supervised(draft: Draft, devices: int) -> None:
    """Set the rows of supervised fine-tuning, their lengths and what of them is learned."""
    draft.set("algorithm.name", "sft")
    if draft.get("data.type") == "fake":
        raise RefusedError(f"{draft.source.path}: data.type = fake are random tokens; see --benchmark of our train")
    _read_rows(draft, "data", "")
    rows = int(draft.get("data.batch_size"))
    draft.set("batch.prompts", rows, "data.batch_size")
    each = int(draft.get("data.micro_batch_size")) * devices
    shared.microbatch_rows(draft, each, rows, "data.micro_batch_size")
    draft.take("data.max_length", "data.seq_len")
    draft.set("data.packing", True)
    draft.set("data.overlong", "truncate_right", "data.seq_len")
    draft.take("data.shuffle", "data.shuffle")
    draft.take("seed", "data.seed")
    at = "data.loss_mask"
    learned = {role for role in ("system", "user", "assistant", "tool") if draft.get(f"{at}.{role}")}
    draft.use(*(f"{at}.{role}" for role in ("system", "user", "assistant", "tool")))
    if learned == {"system", "user", "assistant", "tool"}:
        draft.set("data.loss_on", "all", *(f"{at}.{role}" for role in sorted(learned)))
    elif learned != {"assistant"}:
        draft.check(
            f"{at}: {', '.join(sorted(learned)) or 'no message'} learned there; here turns of the assistant are, or "
            "with data.loss_on = all everything: a weight of 0 on a message leaves it out (docs/data.md)"
        )
    draft.set("eval.every", -1)
    if _under(draft, "val"):
        _read_rows(draft, "val.data", "eval_")
        draft.set("eval.every", int(draft.first("val.interval", default=50)), "val.interval")
        draft.set("eval.at_start", bool(draft.get("val.eval_on_start")), "val.eval_on_start")
        draft.use(*_under(draft, "val"))
    if _under(draft, "eval") or draft.get("eval.source"):
        draft.use(*_under(draft, "eval"))
        draft.check(
            "eval: prime-rl plays environments while it fine-tunes; here the loss of held-out rows is measured, and "
            "python -m jaxrl_llm evaluate plays a checkpoint"
        )


def _read_rows(draft: Draft, at: str, part: str) -> None:
    """Set the data set of the section `at`, of evaluation where `part` is eval_."""
    subsets, splits = (draft.get(f"{at}.{name}") for name in ("subsets", "splits"))
    keys = [f"{at}.{name}" for name in ("name", "subsets", "splits", "probabilities", "stopping_strategy")]
    count = max(len(subsets or ()), len(splits or ()), 1)
    pairs = list(zip(subsets or [None] * count, splits or ["train"] * count, strict=True))
    path = str(draft.first(keys[0], default=RULES["sft"]["data.name"]))
    if count == 1:
        draft.set(f"data.{part}path", path, keys[0])
        draft.set(f"data.{part}split", pairs[0][1], keys[2])
        if pairs[0][0]:
            draft.set("data.name", pairs[0][0], keys[1])
    elif part:
        draft.check(f"{at}: {count} parts of {path}; set data.eval_path to one of them, or eval.sets to all")
    else:
        weights = draft.get(keys[3]) or [1 / count] * count
        sources = [
            {"path": path, "split": split, "weight": float(weight), **({"name": name} if name else {})}
            for (name, split), weight in zip(pairs, weights, strict=True)
        ]
        draft.set("data.sources", tuple(sources), *keys)
    draft.use(*keys)


def _optimizer(draft: Draft, total: int) -> None:
    """Set the optimizer and the schedule of its rate."""
    kind = str(draft.get("optim.type"))
    rate = float(draft.get("optim.lr"))
    draft.take("optimizer.learning_rate", "optim.lr")
    draft.take("optimizer.weight_decay", "optim.weight_decay")
    draft.set("optimizer.no_decay", ())
    draft.set("optimizer.eps", 1e-8)
    draft.take("optimizer.max_grad_norm", "optim.max_norm")
    names = {"adamw": "adamw", "muon": "muon", "sgd": "sgd", "sign_sgd": "adamw"}
    shared.check_known(draft.named("optim.type"), kind, names)
    draft.set("optimizer.name", names[kind], "optim.type")
    if kind == "sgd":
        draft.set("optimizer.b1", float(draft.first("optim.momentum", default=0.9)), "optim.momentum")
        if draft.first("optim.nesterov", default=True):
            draft.check("optim.nesterov: the momentum of sgd is the plain one here")
        if draft.values["optimizer.weight_decay"]:
            draft.check("optim.weight_decay of sgd is part of the gradient there, and taken off the parameters here")
        draft.use("optim.nesterov")
    elif kind == "sign_sgd":  # Adam without memory
        for name in ("b1", "b2"):
            draft.set(f"optimizer.{name}", 0.0, "optim.type")
    else:
        draft.take("optimizer.b1", "optim.betas1", default=0.9)
        draft.take("optimizer.b2", "optim.betas2", default=0.95 if kind == "muon" else 0.999)
        if kind == "muon" and float(draft.first("optim.mu", default=0.95)) != 0.95:
            draft.check(f"optim.mu = {draft.get('optim.mu')}: the momentum of muon is 0.95 here")
        draft.use("optim.mu")
    shape, least = str(draft.get("scheduler.type")), float(draft.first("scheduler.min_lr", default=0.0))
    shared.check_known(draft.named("scheduler.type"), shape, ("constant", "linear", "cosine"))
    warm, last = (int(draft.first(f"scheduler.{name}_steps", default=10)) for name in ("warmup", "decay"))
    keys = [f"scheduler.{name}" for name in ("warmup_steps", "decay_steps", "min_lr")]
    if shape != "constant":
        floor = least or 1e-8 * rate  # where torch's linear schedules begin and end
        draft.set("optimizer.warmup_steps", min(warm, total) if total else warm, keys[0])
        draft.set("optimizer.warmup_init", floor if warm else None, keys[2])
        if shape == "cosine":
            draft.set("optimizer.min_lr_ratio", least / rate, keys[2])
        elif last > 1:  # it is at its end in the last step, and not behind it
            shape = "wsd"
            draft.set("optimizer.min_lr_ratio", floor / rate, keys[2])
            draft.set("optimizer.decay_steps", last - 1, keys[1])
            draft.set("optimizer.schedule_steps", total - 1, "max_steps")
        else:
            shape = "constant"
    draft.set("optimizer.schedule", shape, "scheduler.type")
    draft.use(*keys)


def _saving(draft: Draft, trainer: str) -> None:
    """Set where the run is written, its checkpoints and its logs."""
    name = draft.first("run.dir", "run.name")
    folder = Path(str(draft.get("output_dir"))) / str(name or "")
    draft.set("output_dir", str(folder), "output_dir", "run.dir", "run.name")
    draft.set("checkpoint.folder", draft.get("ckpt.output_dir"), "ckpt.output_dir")
    every = draft.get("ckpt.interval")
    draft.set("checkpoint.every", int(every or 0), "ckpt.interval")
    kept, always = draft.get("ckpt.keep_last"), draft.get("ckpt.keep_interval")
    draft.set("checkpoint.keep", kept, "ckpt.keep_last")
    draft.set("checkpoint.keep_every", always or (None if kept or not every else 1), "ckpt.keep_interval")  # all
    draft.use("ckpt", *_under(draft, "ckpt"), *_under(draft, "orchestrator.ckpt"))
    if draft.sets("resume") or _under(draft, "resume"):
        draft.use("resume", *_under(draft, "resume"))
        draft.check("resume: a run continues from the newest checkpoint of its output_dir by itself")
    tracked = [f"{at}monitors.wandb" for at in ("", ORCHESTRATOR)]
    if any(draft.sets(key) or _under(draft, key) for key in tracked):
        keys = [key for at in tracked for key in (at, *_under(draft, at))]
        draft.set("logging.backends", ("console", "jsonl", "wandb"), *keys)
        draft.set("logging.project", draft.first(f"{tracked[0]}.project", default="prime-rl"), f"{tracked[0]}.project")
        draft.set("logging.run_name", draft.first(f"{tracked[0]}.name", "run.name"), f"{tracked[0]}.name", "run.name")
        draft.use(*keys)
