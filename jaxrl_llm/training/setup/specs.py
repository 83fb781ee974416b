"""The configuration resolved into typed slices: one function for each specification that the code below setup takes."""

import math
from dataclasses import replace
from typing import Any

from jaxrl_llm.algorithms.controllers import AdaptiveEntropy, Controllers
from jaxrl_llm.algorithms.kl import AdaptiveKL, FixedKL
from jaxrl_llm.config import ConfigError, rows_together
from jaxrl_llm.config.checks.values import reference_adapters
from jaxrl_llm.config.entries import environment_options, logit_bias
from jaxrl_llm.config.resolve import split_options
from jaxrl_llm.config.schema import OFFLINE, ONLINE_PREFERENCE, SCHEDULE_FREE
from jaxrl_llm.config.tree import spec_of
from jaxrl_llm.data.curriculum import CurriculumSpec
from jaxrl_llm.data.images import ImageLimits
from jaxrl_llm.data.opening import DataSpec
from jaxrl_llm.rollout.engine import COMPILE_WORK, RolloutSpec
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.training.advantages import AdvantageSpec
from jaxrl_llm.training.average import AverageSpec
from jaxrl_llm.training.learner import LearnerSpec
from jaxrl_llm.training.microbatch import BatchSpec
from jaxrl_llm.training.offline import OfflineSpec
from jaxrl_llm.training.online import ProducerSpec
from jaxrl_llm.training.optimizers import OptimizerSpec, learning_rate_schedule
from jaxrl_llm.training.packing.planner import PackingSpec
from jaxrl_llm.training.reference import ReferenceSpec
from jaxrl_llm.training.rollouts.partial_rollouts import PartialSpec
from jaxrl_llm.training.setup.objectives import (
    divergence_temperature,
    kl_estimator,
    old_logps_setting,
    policy_loss,
    preference_spec,
)
from jaxrl_llm.training.teachers.cross_tokenizer import CrossTokenizerSpec
from jaxrl_llm.training.teachers.teacher import TeacherSpec
from jaxrl_llm.training.teachers.teacher_context import ContextSpec
from jaxrl_llm.training.transformations import gradient_point
from jaxrl_llm.training.update import UpdateSpec

WIDTH_MULTIPLE = 8  # rows are padded to a multiple, so that similar data compiles to the same shapes
TEMPLATE_TOKENS = 64  # room for what stands around a solution in the prompt of a teacher
EIGHTHS = (1, 2, 3, 4, 6, 8)  # of the longest row, that batches of rows of like length are as wide as


def data_kind(config) -> str:
    """The kind of rows that the algorithm learns from: prompts, completions, pairs, triples, labels or steps."""
    if config.algorithm.name == "preference":
        return {"pair": "pairs", "triple": "triples"}.get(preference_spec(config).rows, "labels")
    kinds = {"sft": "completions", "reward_model": "pairs", "process_reward_model": "steps"}
    return kinds.get(config.algorithm.name, "prompts")


def mismatches(config) -> bool:
    """True where each labelled row is followed by its prompt with the completion of another row (kto)."""
    return data_kind(config) == "labels" and rows_together(config) == 2


def data_spec(config) -> DataSpec:
    """The sources of the configuration, what is made of their rows, and the order of its batches."""
    c = config.data
    return spec_of(
        DataSpec,
        c,
        kind=data_kind(config),
        sources=tuple(c.sources),
        eval_fraction=config.eval.fraction,
        image_limits=image_limits(config),
        template_kwargs=split_options(f"_({c.chat_template_kwargs})")[1],
        step_separator=c.step_separator or "\n",
        keep_prompt=config.teacher.form == "uld",
        wrapped=c.packing and c.packing_strategy == "wrapped",
        max_prompt_length=config.rollout.max_prompt_length,
        seed=config.seed,
        batch_size=config.batch.prompts,
        settings=_by_other_names(config),
    )


def image_limits(config) -> ImageLimits:
    """The bounds of images, those of the data and those that environments and agents show."""
    c = config.data
    return ImageLimits(c.image_pixels, c.image_bytes, c.images_per_row, c.image_urls)


def _by_other_names(config) -> dict[str, Any]:
    """Settings by the names of axolotl and verl, for functions and classes on rows that were written for these."""
    c, algorithm = config.data, config.algorithm
    methods = {"grpo": "grpo", "ppo": "ppo"}
    if algorithm.name == "preference":
        methods["preference"] = preference_spec(config).losses[0].name
    return {
        "rl": methods.get(algorithm.name),
        "reward_model": algorithm.name == "reward_model",
        "process_reward_model": algorithm.name == "process_reward_model",
        "base_model": config.model.path,
        "sequence_len": c.max_length,
        "max_length": c.max_length,
        "max_prompt_length": config.rollout.max_prompt_length,
        "max_response_length": config.rollout.max_completion_length,
        "chat_template": c.chat_template,
        "train_on_inputs": c.loss_on == "all",
        "sample_packing": c.packing,
        "prompt_key": c.prompt_key,
        "response_key": c.completion_key,
        "truncation": c.overlong,
        "shuffle": c.shuffle,
        "seed": config.seed,
        "learning_rate": config.optimizer.learning_rate,
        "max_steps": config.total_steps,
        "num_epochs": config.num_epochs,
        "lora_r": config.lora.rank or None,
    }


def batch_spec(config) -> BatchSpec:
    """The rows of a step, and their split into minibatches, micro-batches and passes."""
    return spec_of(
        BatchSpec,
        config.batch,
        group_size=rows_together(config),
        num_iterations=config.algorithm.num_iterations,
        seed=config.seed,
    )


def packing_spec(config) -> PackingSpec:
    """The packed rows of a run."""
    c, teacher, group_size = config.batch, config.teacher, rows_together(config)
    if teacher.form == "uld" or (teacher.context != "none" and teacher.form == "divergence"):
        group_size = 1  # rows that start alike share their tokens, of which each has another distribution to learn
    return spec_of(
        PackingSpec,
        c,
        group_size=group_size,
        whole_groups=config.algorithm.name in (*OFFLINE, ONLINE_PREFERENCE) and group_size > 1,
        documents=config.data.packing,
        noise=config.algorithm.neftune_alpha > 0,
        own_images=config.environment.agent is not None,  # each session shows what it sees
    )


def optimizer_spec(config) -> OptimizerSpec:
    """The optimizer of the policy, or of the model that is trained.

    Its schedule begins behind the steps in which a critic alone is trained, and ends where it would without them.
    """
    c, alone = config.optimizer, config.critic.warmup_steps if config.algorithm.name == "ppo" else 0
    steps = max(config.total_steps - alone, 0)
    return spec_of(
        OptimizerSpec,
        c,
        total_steps=steps,
        schedule_steps=c.schedule_steps and max(c.schedule_steps - alone, 1),
        updates_per_step=config.batch.minibatches * config.algorithm.num_iterations,
        warmup_steps=min(c.warmup_steps, steps) or math.ceil(c.warmup_ratio * steps),
        no_decay=tuple(c.no_decay),
        freeze_router=config.model.freeze_router,
        seed=config.seed,
    )


def critic_optimizer_spec(config) -> OptimizerSpec:
    """The optimizer of a critic that is a network of its own: what `critic` sets takes the place of `optimizer`."""
    c, policy = config.critic, optimizer_spec(config)
    return spec_of(
        OptimizerSpec,
        c,
        base=policy,
        total_steps=config.total_steps,
        schedule_steps=config.optimizer.schedule_steps,
        warmup_steps=min(c.lr_warmup_steps, config.total_steps),
        warmup_init=0.0,
        weight_decay_end=policy.weight_decay_end if c.weight_decay is None else None,
        updates_per_step=(c.minibatches or config.batch.minibatches)
        * (c.num_iterations or config.algorithm.num_iterations),
    )


def update_spec(config) -> UpdateSpec:
    """The updates of the policy, or of the model that is trained."""
    return UpdateSpec(
        microbatch_rows=config.batch.microbatch_rows,
        schedule=learning_rate_schedule(optimizer_spec(config)),
        offload=config.optimizer.offload,
        offload_params=config.model.offload,
        dropout=config.lora.dropout,
        seed=config.seed,
        gradient_point=gradient_point(config.optimizer.b1) if config.optimizer.name == SCHEDULE_FREE else None,
    )


def critic_update_spec(config) -> UpdateSpec:
    """The updates of a critic that is a network of its own."""
    c, policy, optimizer = config.critic, update_spec(config), critic_optimizer_spec(config)
    return replace(
        policy,
        microbatch_rows=c.microbatch_rows,
        schedule=learning_rate_schedule(optimizer),
        gradient_point=policy.gradient_point and gradient_point(optimizer.b1),
        offload=policy.offload if c.offload_optimizer is None else c.offload_optimizer,
        offload_params=policy.offload_params if c.offload is None else c.offload,
    )


def reference_spec(config) -> ReferenceSpec:
    """The reference policy of a run."""
    return spec_of(ReferenceSpec, config.algorithm, adapters=reference_adapters(config), seed=config.seed)


def average_spec(config) -> AverageSpec | None:
    """The average of the policy, or None where none is kept."""
    return spec_of(AverageSpec, config.average) if config.average.every else None


def teacher_spec(config) -> TeacherSpec:
    """The teacher of a run: the form of its signal, its temperature, and where it waits between passes."""
    c, divergence = config.teacher, config.teacher.form != "advantage"
    temperature = divergence_temperature(config) if divergence else training_sampling(config).logps_temperature
    top_k = c.top_k if c.top_of == "teacher" else 0
    return TeacherSpec(divergence, temperature, top_k, c.offload, c.column)


def context_spec(config) -> ContextSpec | None:
    """The teacher's context besides the prompts of the policy, or None without one."""
    c = config.teacher
    if c.context == "none":
        return None
    templates = {"template": c.template, "solution_template": c.solution_template}
    templates |= {"privileged_template": c.privileged_template}
    return ContextSpec(
        c.context, c.success_threshold, c.exclude_own, c.remove_thinking, c.privileged_column,
        config.rollout.group_size, **{name: text for name, text in templates.items() if text is not None},
    )  # fmt: skip


def context_width(config, prompt_width: int) -> int:
    """Tokens of the longest prompt of a teacher with a context, where those of the policy have up to `prompt_width`.

    Raises ConfigError where the longest prompt of the policy has more.
    """
    own = config.teacher.max_prompt_length
    if own is not None and own < prompt_width:
        raise ConfigError(
            f"teacher.max_prompt_length is {own}, but the policy's prompts alone have up to {prompt_width} tokens: "
            "raise it"
        )
    return own or prompt_width + config.rollout.max_completion_length + TEMPLATE_TOKENS


def cross_tokenizer_spec(config) -> CrossTokenizerSpec:
    """The settings by which the tokens of a teacher with another tokenizer are compared with the policy's."""
    c = config.teacher
    return CrossTokenizerSpec(
        c.uld_align, not c.uld_skip_eos, c.uld_hybrid, divergence_temperature(config), data_spec(config).template_kwargs
    )


def cross_tokenizer_widths(config, prompt_width: int, completion_length: int) -> tuple[int, int]:
    """Tokens of the longest prompt and of the longest completion of a teacher with another tokenizer."""
    c = config.teacher
    return c.max_prompt_length or 2 * prompt_width, c.max_completion_length or 2 * completion_length


def is_own_teacher(config) -> bool:
    """True where the policy is its own teacher."""
    return config.teacher.path is not None and split_options(config.teacher.path)[0] == "self"


def self_reference(config) -> ReferenceSpec | None:
    """The copy of the policy that is its teacher, `teacher.path = self(rate=..., every=...)`, or None for itself.

    With adapters a copy that is moved a part of the way is of the whole model: a mean of adapters is no mean of what
    they compute.
    """
    options = {"rate": 1.0, "every": 1} | split_options(config.teacher.path)[1]
    rate, every = options["rate"], options["every"]
    if (rate, every) == (1, 1):
        return None
    adapters = "start" if rate in (0, 1) else "copy"
    return ReferenceSpec(adapters, config.teacher.offload, every if rate else 0, rate, 0, config.seed)


def controllers_of(config) -> Controllers:
    """The controllers of the coefficients, as they start."""
    c = config.algorithm
    beta = c.reward_beta or c.beta
    kl, entropy = FixedKL(beta), None
    if c.kl_controller == "adaptive":
        kl = AdaptiveKL(beta, c.kl_target, c.kl_horizon)
    if c.entropy_controller == "adaptive":
        entropy = AdaptiveEntropy(
            c.entropy_coef,
            target=c.entropy_target,
            delta=c.entropy_delta,
            minimum=c.entropy_coef_min,
            maximum=c.entropy_coef_max,
        )
    return Controllers(kl, entropy)


def advantage_spec(config) -> AdvantageSpec:
    """The advantages of an online algorithm."""
    c = config.algorithm
    return spec_of(
        AdvantageSpec,
        c,
        group_size=config.rollout.group_size,
        max_completion_length=config.rollout.max_completion_length,
        kl=c.reward_kl if c.reward_beta else kl_estimator(config),
        reward_clip=tuple(c.reward_clip),
        has_critic=c.name == "ppo",
        teacher_coef=config.teacher.coef,
        position_gamma=config.teacher.position_gamma,
        teacher_limit=config.teacher.limit,
        teacher_gamma=config.teacher.gamma,
        of_environments=tuple(
            (name, options["advantage"])
            for name, options in environment_options(config.environment.options).items()
            if "advantage" in options
        ),
    )


def producer_spec(config) -> ProducerSpec:
    """The settings of the producer, steps 1 to 3 of an online algorithm: prompts, rollout, reward."""
    return spec_of(
        ProducerSpec,
        config.algorithm,
        prompts=config.batch.prompts,
        total_steps=config.total_steps,
        correct_at=config.eval.correct_at,
    )


def partial_spec(config) -> PartialSpec:
    """Rollouts over several steps: the prompts in flight, and the tokens of a round."""
    c, prompts = config.rollout, config.batch.prompts
    return PartialSpec(
        prompts=prompts,
        in_flight=prompts + c.partial_prompts,
        tokens=c.partial_tokens or -(-c.max_completion_length // 4),
    )


def curriculum_spec(config) -> CurriculumSpec | None:
    """The curriculum of the configuration, or None where no prompt is passed over."""
    c = config.data
    if c.curriculum_easy is None and c.curriculum_hard is None:
        return None
    return CurriculumSpec(
        c.curriculum_easy, c.curriculum_hard, c.curriculum_revisit, c.curriculum_visits, c.curriculum_decay
    )


def learner_spec(config) -> LearnerSpec:
    """The settings of the learner, steps 4 and 5 of an online algorithm: log-probs and advantages."""
    c, compares_pairs = config.algorithm, config.algorithm.name == ONLINE_PREFERENCE
    return spec_of(
        LearnerSpec,
        c,
        old_logps=old_logps_of(config),
        # Losses of pairs are of the model itself, however its completions were drawn.
        temperature=1.0 if compares_pairs else training_sampling(config).logps_temperature,
        full_kl=c.kl == "full",
        observations=c.observation_coef > 0,
        correct_at=config.eval.correct_at if c.positive_nll_coef else None,
        draws_seeds=c.neftune_alpha > 0 or (not compares_pairs and "key" in policy_loss(config).takes),
        pairs=c.pairs if compares_pairs else 0,
        kl_weights=_by_environment(config, "beta", c.beta),
        loss_weights=_by_environment(config, "weight", 1.0),
    )


def _by_environment(config, option: str, otherwise: float) -> dict[str | None, float]:
    """The option of each environment that has it, and under None that of all others, or nothing where none has it."""
    entries = environment_options(config.environment.options).items()
    own: dict[str | None, float] = {name: float(options[option]) for name, options in entries if option in options}
    return {None: otherwise, **own} if own else {}


def old_logps_of(config) -> str:
    """The policy that the ratio compares with: "sampler", "reference", "trainer" (computed before the step),
    "interpolated" or "policy".

    "policy" is the updated policy itself: where the sampled rows give one update it has sampled them, its ratio is 1,
    and there is nothing to compute. Raises ConfigError for an importance correction of a ratio with the sampler.
    """
    c = config.algorithm
    if c.name == ONLINE_PREFERENCE:
        return "policy"  # which is compared with the reference, in pairs
    setting = old_logps_setting(config)
    if setting == "sampler":
        if c.importance_correction != "none" and policy_loss(config).reads_old_logps:
            raise ConfigError(
                f"algorithm.importance_correction is {c.importance_correction}, but the ratio of algorithm.loss = "
                f"{c.loss!r} compares with the sampler's log-probs (algorithm.old_logps is {c.old_logps}), and samples "
                "would be weighed twice: set importance_correction to none, old_logps to trainer, or a loss without a "
                "ratio, reinforce"
            )
        return "sampler"
    if setting == "reference":
        return "reference"
    one_update = c.num_iterations == 1 and config.batch.minibatches == 1
    measures_kl = c.kl_in_reward or c.reward_beta or c.kl_controller == "adaptive"
    # A teacher rates the policy by the sampler's log-probs, where these are the policy's own.
    of_tokens = config.teacher.path is not None and config.teacher.form == "advantage"
    rates = of_tokens and c.importance_correction != "none"
    if c.old_logps == "interpolated":
        readers = {
            "replay_groups, of which no age is known": c.replay_groups,
            "a KL that is measured before the update (kl_in_reward, reward_beta, an adaptive controller)": measures_kl,
            "importance_normalize": c.importance_normalize,
            "a teacher in the advantages": of_tokens,
        }
        for reader in (name for name, on in readers.items() if on):
            raise ConfigError(
                "algorithm.old_logps is interpolated, which gives log-probs in the update and none before it, but the "
                f"configuration has {reader}: set old_logps to trainer or sampler, or leave that out"
            )
        return "interpolated"
    # The mean weight of a batch is taken before its micro-batches, where the policy's own are not yet known.
    known = c.old_logps == "trainer" or c.importance_normalize
    averages = config.optimizer.name == SCHEDULE_FREE  # whose gradients are of another policy than the one that samples
    if averages and not policy_loss(config).reads_old_logps:
        raise ConfigError(
            f"optimizer.name is {SCHEDULE_FREE}, whose gradients are of another policy than the average that samples, "
            f"and algorithm.loss = {c.loss!r} has no ratio that weighs them: take one that has, ppo_clip, or set "
            "algorithm.old_logps to sampler and importance_correction to token_truncate, or take another optimizer"
        )
    computed = known or not one_update or c.replay_groups or measures_kl or rates or averages
    return "trainer" if computed else "policy"


def offline_spec(config, width: int) -> OfflineSpec:
    """The batches of given rows, of `width` tokens at most."""
    c = config.algorithm
    widths = {padded_width(math.ceil(width * eighths / 8), width) for eighths in EIGHTHS}
    return spec_of(
        OfflineSpec,
        c,
        mismatched=mismatches(config),
        packed=config.data.packing,
        width=width,
        widths=tuple(sorted(widths)) if config.data.group_by_length else (width,),
        draws_seeds=c.neftune_alpha > 0,
        running_mean=c.name == "preference" and any(x.running_mean for x in preference_spec(config).losses),
    )


def training_sampling(config) -> SamplingParams:
    """The sampling settings of completions to train on, those of `rollout`; bad words, which need a tokenizer, are
    added in worker.py."""
    c = config.rollout
    return spec_of(
        SamplingParams,
        c,
        logit_bias=logit_bias("rollout.logit_bias", c.logit_bias),
        bad_words=(),  # their tokens are of a tokenizer: see worker.py
        min_tokens=c.min_completion_length,
    )


def eval_sampling(config) -> SamplingParams:
    """The sampling parameters of an evaluation: those of the run, save what `eval` sets itself."""
    return spec_of(SamplingParams, config.eval, base=training_sampling(config))


def rollout_spec(config) -> RolloutSpec:
    """The settings of the engine that samples for training."""
    c = config.rollout
    return spec_of(
        RolloutSpec,
        c,
        sampling=training_sampling(config),
        cache_dtype=None if c.cache_dtype == "auto" else c.cache_dtype,
        weights_dtype=None if c.weights_dtype == "auto" else c.weights_dtype,
        compile_work=COMPILE_WORK,
        record_experts=c.router_replay,
    )


def padded_width(longest: int, limit: int) -> int:
    """The width of rows of which the longest has so many tokens: the next multiple of 8, at most `limit`."""
    return min(-(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, limit)
