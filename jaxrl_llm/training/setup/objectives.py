"""From the configuration to objectives: the losses that `algorithm.loss` names, with their options."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import policy_losses, preference_losses, sft_losses
from jaxrl_llm.algorithms.losses import LEVELS
from jaxrl_llm.algorithms.off_policy import Criterion, rejection_criteria
from jaxrl_llm.algorithms.preference_losses import bradley_terry
from jaxrl_llm.algorithms.step_losses import step_cross_entropy
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.checks.values import changed
from jaxrl_llm.config.entries import environment_options
from jaxrl_llm.config.resolve import is_own, naming, resolve_with_options, split_losses, split_options
from jaxrl_llm.config.schema import OFFLINE, ONLINE_PREFERENCE
from jaxrl_llm.config.tree import spec_of
from jaxrl_llm.models.chunked_divergences import UldOptions
from jaxrl_llm.models.net import Net
from jaxrl_llm.training.advantages import check_options, of_users
from jaxrl_llm.training.objectives.distillation import DivergenceSpec, UldSpec, distillation
from jaxrl_llm.training.objectives.neftune import with_neftune
from jaxrl_llm.training.objectives.objective import Aggregation, Objective
from jaxrl_llm.training.objectives.policy_gradient import PolicyLoss, PolicySpec, policy_gradient
from jaxrl_llm.training.objectives.preference import PreferenceLoss, PreferenceSpec, preference
from jaxrl_llm.training.objectives.process_reward_model import process_reward_model
from jaxrl_llm.training.objectives.reward_model import reward_model
from jaxrl_llm.training.objectives.router import with_router_loss
from jaxrl_llm.training.objectives.sft import SFTSpec, sft
from jaxrl_llm.training.objectives.value import CriticSpec, policy_and_values

# Arguments that objectives fill in, so no options of a loss.
OF_POLICY_LOSSES = (
    "logps", "old_logps", "advantages", "epsilon_low", "epsilon_high", "mask", "key", "importance_weights", "selected",
)  # fmt: skip
OF_PREFERENCE_LOSSES = (
    "policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected", "policy", "ref", "labels", "beta", "lengths",
    "kl", "reward_shift",
)  # fmt: skip
# Names that other libraries and papers have for losses that are here, with what to write for them.
POLICY_NAMES = {"geo_mean": "gmpo", "gpg": "reinforce"}
PREFERENCE_NAMES = {
    "aot_pair": "aot", "bco": "bco_pair", "cdpo": "dpo(label_smoothing=0.1)", "chosen_nll": "sft", "exo": "exo_pair",
    "kto_pair": "kto, which reads a pair as a desirable and an undesirable row", "nca": "nca_pair", "rpo": "dpo+sft",
    "slic": "hinge", "sppo": "sppo_hard",
}  # fmt: skip
OF_SCORE_LOSSES = ("chosen_scores", "rejected_scores", "margin")
OF_STEP_LOSSES = ("logits", "labels")


def objective_of(config, net: Net) -> Objective:
    """The objective that the configuration's algorithm minimises, with the router's loss of a mixture of experts and,
    in training, NEFTune's noise.

    Raises ConfigError for an unknown loss, options that it does not have, or settings of experts for a dense net.
    """
    of_experts = ("model.router_aux_loss_coef", "model.freeze_router", "model.quantize_experts")
    for key, value in changed(config, () if net.config.experts else of_experts):
        raise ConfigError(
            f"{key} is {value}, which is of mixtures of experts, and {config.model.path} has no experts: leave it at "
            "its default"
        )
    name, alpha = config.algorithm.name, config.algorithm.neftune_alpha
    teacher = divergence_spec(config)
    if teacher is not None and learns_from_teacher_alone(config):
        mode = "token" if name == "sft" else config.algorithm.aggregation
        make = partial(distillation, teacher, aggregation(config, mode), config.rollout.temperature or 1.0)
    elif name == "sft":
        make = partial(sft, sft_spec(config))
    elif name in ("preference", ONLINE_PREFERENCE):
        make = partial(preference, preference_spec(config))
    elif name == "reward_model":
        scores = jax.ShapeDtypeStruct((2,), jnp.float32)
        make = partial(reward_model, _loss_of(config, bradley_terry, OF_SCORE_LOSSES, scores, scores))
    elif name == "process_reward_model":
        logits, labels = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 3, 2), (2, 3)))
        make = partial(process_reward_model, _loss_of(config, step_cross_entropy, OF_STEP_LOSSES, logits, labels))
    elif name == "ppo" and critic_spec(config).shared:
        make = partial(policy_and_values, policy_spec(config), critic_spec(config))
    else:
        make = partial(policy_gradient, policy_spec(config))
    objective = with_router_loss(make, net)
    return with_neftune(objective, alpha, net.config.outer_width) if alpha else objective


def aggregation(config, mode: str) -> Aggregation:
    """The aggregation of that `mode`, with the sizes of the run that modes normalise by."""
    longest, size = config.rollout.max_completion_length, config.rollout.group_size
    return Aggregation(mode, longest, size, config.batch.microbatch_rows)


def policy_spec(config) -> PolicySpec:
    """The policy-gradient objective of the configuration; raises ConfigError for values that its loss does not take."""
    loss, c = policy_loss(config), config.algorithm

    def call(x):
        random = {"key": jax.random.key(0)} if "key" in loss.takes else {}
        return loss.function(x, x, x, c.epsilon_low, c.epsilon_high, mask=x, **loss.options, **random)

    check_options("algorithm.loss", _written(config, "ppo_clip"), call, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    return spec_of(
        PolicySpec,
        c,
        loss=loss,
        aggregation=aggregation(config, c.aggregation),
        kl=kl_estimator(config),
        rejection=rejection(config),
        old_logps_of_another=old_logps_setting(config) in ("sampler", "reference"),
        temperature=config.rollout.temperature or 1.0,  # greedy samples have log-probs too
        divergence=divergence_spec(config),
        kl_weights=any(options.get("beta") for options in environment_options(config.environment.options).values()),
    )


def rejection(config) -> tuple[Criterion, ...]:
    """The criteria of `algorithm.rejection`; raises ConfigError for those that cannot be read."""
    c = config.algorithm
    if c.rejection is None:
        return ()
    try:
        return rejection_criteria(c.rejection, c.rejection_bounds)
    except ValueError as error:
        raise ConfigError(f"algorithm.rejection is {c.rejection!r}: {error}") from error


def old_logps_setting(config) -> str:
    """`algorithm.old_logps`, of which auto is what the policy loss declares: sampler, reference, or auto again."""
    if config.algorithm.name == ONLINE_PREFERENCE:
        return "auto"
    declared = getattr(policy_loss(config).function, "old_logps", "auto")
    auto = config.algorithm.old_logps == "auto"
    return declared if auto and declared in ("sampler", "reference") else config.algorithm.old_logps


def kl_in_loss(config) -> bool:
    """True where the loss of an online algorithm has a KL term."""
    compares = old_logps_setting(config) == "reference"  # by its own formula
    return needs_reference(config) and not (config.algorithm.kl_in_reward or compares)


def divergence_spec(config) -> DivergenceSpec | UldSpec | None:
    """The divergence from the teacher that is a term of the loss; None without a teacher, or with one in the
    advantages."""
    c = config.teacher
    if c.path is None or c.form == "advantage":
        return None
    if c.form == "uld":
        weights = None if c.uld_matched_weight is None else (c.uld_matched_weight, c.uld_unmatched_weight)
        temperature = divergence_temperature(config)
        options = UldOptions(c.policy_temperature or temperature, temperature, c.beta, weights)
        return UldSpec(c.coef, options, c.nll_coef)
    top_k = c.top_k if c.top_of == "policy" else 0
    return DivergenceSpec(
        c.coef, c.beta, divergence_temperature(config), c.importance_max, top_k, c.tail, c.least_logp, c.limit
    )


def divergence_temperature(config) -> float:
    """The temperature of both distributions in the divergence from the teacher."""
    return config.teacher.temperature or config.rollout.temperature or 1.0


def learns_from_teacher_alone(config) -> bool:
    """True where the divergence from the teacher is all of the loss."""
    c = config.algorithm
    if c.name == "sft":
        return True
    others = c.beta or c.entropy_coef or c.observation_coef or c.positive_nll_coef or c.name == "ppo"
    others = others or c.entropy_controller != "fixed"
    others = others or bool(config.environment.options) or c.loss not in ("auto", "ppo_clip")
    return not others and (c.advantage == "zero" or not config.rewards.functions)


def policy_loss(config) -> PolicyLoss:
    """The policy loss that `algorithm.loss` names; auto is ppo_clip.

    Raises ConfigError for an unknown name or option, and for settings that the loss does not go with.
    """
    name = split_options(_written(config, "ppo_clip"))[0]
    if name in ("grpo", "dapo", "dr_grpo", "bnpo", "vanilla"):
        raise ConfigError(
            f"algorithm.loss is {name!r}, in other libraries the loss ppo_clip with an average of its own: write "
            "ppo_clip, and choose that by algorithm.aggregation; configs/grpo.py, dapo.py and dr_grpo.py have both"
        )
    if name == "stable_reinforce":
        raise ConfigError(
            "algorithm.loss is 'stable_reinforce', a name in Tinker's client whose formula is not public: use "
            "reinforce, topr, dro or cispo"
        )
    function, options = _resolve(config, "ppo_clip", policy_losses, OF_POLICY_LOSSES, others=POLICY_NAMES)
    asked_for = {"key", "importance_weights", "selected"} & inspect.signature(function).parameters.keys()
    _check_call(config, function, options, OF_POLICY_LOSSES[:5], ("mask", *asked_for))
    key, asked = "algorithm.importance_sampling_level", config.algorithm.importance_sampling_level
    level = getattr(function, "ratio", "token")
    if level == "level":
        level = options.get("level", asked or "token")
        if asked:
            options = {"level": level, **options}
    elif asked == "sequence" and function is policy_losses.ppo_clip:
        function, options = _resolve(
            config, "gspo", policy_losses, OF_POLICY_LOSSES, _written(config, "gspo").replace("ppo_clip", "gspo")
        )
        level = "sequence"
    if level not in LEVELS:
        raise ConfigError(f"algorithm.loss: level is {level!r}, but it takes one of {', '.join(LEVELS)}")
    if asked not in (None, level):
        raise ConfigError(
            f"{key} is {asked}, but algorithm.loss = {config.algorithm.loss} has the ratio of a {level}: leave one of "
            "them out, or take ppo_clip, cispo or sapo, which have either"
        )
    return PolicyLoss(
        function,
        options,
        takes=frozenset(inspect.signature(function).parameters),
        ratio=level,
        select=getattr(function, "select", None),
        reads_old_logps=getattr(function, "old_logps", None) != "unread",
    )


def sft_spec(config) -> SFTSpec:
    """The objective of supervised fine-tuning; the loss that `algorithm.loss` names, auto is nll.

    Raises ConfigError for label smoothing of another loss than nll.
    """
    algorithm = config.algorithm
    function, options = _resolve(config, "nll", sft_losses, ("logps", "entropy"))
    if algorithm.label_smoothing and function is not sft_losses.nll:
        raise ConfigError(
            f"algorithm.label_smoothing is {algorithm.label_smoothing}, but it smooths the targets of nll, and "
            f"algorithm.loss is {algorithm.loss!r}: set it to 0"
        )
    taken = [name for name in ("logps", "entropy") if name in inspect.signature(function).parameters]

    def call(x):
        return function(**dict.fromkeys(taken, x), **options)

    check_options("algorithm.loss", _written(config, "nll"), call, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    loss = partial(function, **options) if options else function
    return SFTSpec(algorithm.label_smoothing, loss)


def kl_estimator(config) -> str:
    """The KL estimator: `algorithm.kl`, or what its `auto` stands for."""
    if config.algorithm.kl != "auto":
        return config.algorithm.kl
    return "k1" if config.algorithm.kl_in_reward else "k3"


def preference_spec(config) -> PreferenceSpec:
    """The losses that `algorithm.loss` names, joined by +, with their weights and options; auto is dpo.

    Raises ConfigError for a loss beside others that reads other rows, and for one of rows that the algorithm does not
    have.
    """
    algorithm = config.algorithm
    written = split_losses(_written(config, "dpo"))
    weights = algorithm.loss_weights or (1.0,) * len(written)
    losses = tuple(_preference_loss(config, text, weight) for text, weight in zip(written, weights, strict=True))
    if len(losses) > 1:
        alone = [loss.name for loss in losses if loss.rows not in ("pair", "triple")]
        if alone:
            raise ConfigError(f"algorithm.loss is {algorithm.loss!r}, but {alone[0]} stands alone: it reads other rows")
    for loss in losses:
        if loss.rows == "triple" and not loss.weight * (loss.nll_weight or 0.0):
            raise ConfigError(
                f"algorithm.loss is {algorithm.loss!r}, but {loss.name} reads gold completions (the column reference) "
                "for their likelihood, and that has the weight 0: write cpo(nll_weight=0) for tpo, "
                "simpo(nll_weight=0) for tpo_l, and leave gold_sft out"
            )
        if algorithm.name == ONLINE_PREFERENCE and (loss.rows != "pair" or loss.running_mean):
            reads = "the mean of all rewards so far" if loss.rows == "pair" else "other rows than pairs of samples"
            raise ConfigError(
                f"algorithm.loss is {algorithm.loss!r}, but {loss.name} reads {reads}, which {ONLINE_PREFERENCE} has "
                "not: take another loss, dpo for example"
            )
    return PreferenceSpec(losses, algorithm.beta, algorithm.reference_free, algorithm.ld_alpha, algorithm.use_weighting)


def needs_reference(config, environments: Collection[str] = ()) -> bool:
    """True when the reference's log-probs are read: by a KL term, a policy loss that compares with it, or the objective
    of given pairs or labels.

    Where the names of all `environments` are known, not by the KL term of those of which each has a weight of 0.
    """
    c = config.algorithm
    if c.name not in (*OFFLINE, ONLINE_PREFERENCE):
        own = environment_options(config.environment.options)
        betas = {name: options["beta"] for name, options in own.items() if "beta" in options}
        others = not environments or c.reward_beta > 0 or any(name not in betas for name in environments)
        compares = old_logps_setting(config) == "reference"
        return compares or any(betas.values()) or (c.beta > 0 and others)
    return c.name in ("preference", ONLINE_PREFERENCE) and preference_spec(config).needs_reference


def _preference_loss(config, written: str, weight: float) -> PreferenceLoss:
    function, options = _resolve(
        config, written, preference_losses.LOSSES, OF_PREFERENCE_LOSSES, written, PREFERENCE_NAMES
    )
    if getattr(function, "rows", "pair") in ("pair", "triple"):
        form: tuple[str, ...] = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected", "beta")
        _check_call(config, function, options, form, ("lengths",))
    else:
        _check_call(config, function, options, ("policy", "ref", "labels", "beta"), ("kl",))
    declared = {**getattr(function, "options", {})}
    for name, default in declared.items():
        declared[name] = value = options.pop(name, default)
        if isinstance(value, bool) != isinstance(default, bool) or not isinstance(value, int | float):
            takes = "True or False" if isinstance(default, bool) else "a number"
            raise ConfigError(f"algorithm.loss is {written!r}, but {name} takes {takes}")

    def call(x):
        beta = config.algorithm.beta or 1.0  # the checks refuse 0
        if getattr(function, "rows", "pair") in ("pair", "triple"):
            return function(x, x, x, x, beta, lengths=(x, x), **options)
        return function(x, x, x, beta, kl=x[0], **options)

    check_options("algorithm.loss", written, call, jax.ShapeDtypeStruct((2,), jnp.float32))
    if len(split_losses(config.algorithm.loss)) == 1:  # one beside others may be given what these read
        _check_reference(written, function, options, config.algorithm.beta)
    facts = ("rows", "reference", "compares_pairs", "mean_logps", "reward")
    declared |= {name: getattr(function, name) for name in facts if hasattr(function, name)}
    return PreferenceLoss(split_options(written)[0], weight, function, options, **declared)


def _check_reference(written: str, function: Callable[..., Any], options: Mapping[str, Any], beta: float) -> None:
    """Raises ConfigError for a user's own loss of pairs that computes with a reference and does not say that it reads
    one: it would be given None."""
    if not is_own(split_options(written)[0]) or hasattr(function, "reference") or hasattr(function, "rows"):
        return

    def call(x, ref=None):
        return function(x, x, ref, ref, beta or 1.0, lengths=(x, x), **options)

    sums = jax.ShapeDtypeStruct((2,), jnp.float32)
    try:
        jax.eval_shape(lambda x: call(x, x), sums)
    except Exception:
        return  # for another reason, which it says when it is used
    try:
        jax.eval_shape(call, sums)
    except Exception as error:
        name = split_options(written)[0].rpartition(":")[2]
        raise ConfigError(
            f"algorithm.loss is {written!r}, which computes with the log-probs of a reference, but is given None for "
            f"them unless it says that it reads them: write {name}.reference = True behind it"
        ) from error


def _loss_of(config, auto: Callable[..., Any], reserved: tuple[str, ...], *shapes: Any) -> Callable[..., Any]:
    """The loss of scores or of a step's logits that `algorithm.loss` names, with its options; `auto`, the only built-in
    one, unless it names another. It is tried on arrays of these shapes."""
    name = auto.__name__
    function, options = _resolve(config, name, {name: auto}, reserved)
    loss = partial(function, **options) if options else function
    check_options("algorithm.loss", _written(config, name), loss, *shapes)
    return loss


def _check_call(
    config, function: Callable[..., Any], options: Mapping[str, Any], by_place: Sequence[str], by_name: Sequence[str]
) -> None:
    """Raises ConfigError for a loss that cannot be called with arguments of these names, by place and by name: a user's
    own would say so when it is first used."""
    own = {name: value for name, value in options.items() if name not in getattr(function, "options", {})}
    try:
        inspect.signature(function).bind(*by_place, **dict.fromkeys(by_name), **own)
    except TypeError as error:
        form = ", ".join((*by_place, *(f"{name}=..." for name in by_name)))
        raise ConfigError(
            f"algorithm.loss is {config.algorithm.loss!r}, but it is called as loss({form}), and {error}: give it "
            "these arguments, or **others for those that it does not read"
        ) from error


def critic_spec(config) -> CriticSpec:
    """The critic's objective: the network that it is of, its clipping, and the weight of a shared one."""
    return CriticSpec(config.critic.shared, config.critic.epsilon, config.critic.coef)


def _written(config, auto: str) -> str:
    return auto if config.algorithm.loss == "auto" else config.algorithm.loss


def _resolve(
    config,
    auto: str,
    known: ModuleType | Mapping[str, Any],
    reserved: tuple[str, ...],
    written: str | None = None,
    others: Mapping[str, str] | None = None,
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The loss and its options.

    Raises ConfigError, naming the setting, for what cannot be found, with what to write for the names of `others`.
    """
    name = written or _written(config, auto)
    with naming("algorithm.loss"):
        if (ours := (others or {}).get((bare := split_options(name)[0]).lower())) is not None:
            raise ConfigError(f"{bare!r} is called otherwise here: write {ours}")
        function, options = resolve_with_options(name, known, reserved)
    return of_users(name, function), options
