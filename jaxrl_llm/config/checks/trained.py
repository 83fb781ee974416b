"""Contradictions of what is trained: optimizers, adapters, averages."""

import math
from collections.abc import Iterator

from jaxrl_llm.config.checks.values import changed, how_quantized, reference_adapters
from jaxrl_llm.config.entries import LORA_INIT, makes_up, starts_from_matrices
from jaxrl_llm.config.resolve import ConfigError, is_own, split_options
from jaxrl_llm.config.schema import ONLINE_PREFERENCE, OPTIMIZERS, SCHEDULE_FREE, ConfigDict
from jaxrl_llm.config.setting import LARGEST
from jaxrl_llm.config.wording import amount

LEAST_PRODIGY_RATE = 0.01  # below it is a rate of another optimizer


def check_optimizer(config: ConfigDict) -> Iterator[str]:
    """Messages for the optimizer, its learning rate and what it does not go with."""
    c = config.optimizer
    if c.name not in OPTIMIZERS:
        try:
            if not is_own(split_options(c.name)[0]):  # the function itself is found when a run starts
                raise ConfigError(f"it takes {', '.join(OPTIMIZERS)}, or your own function, path/to/file.py:function")
        except ConfigError as error:
            yield f"optimizer.name is {c.name!r}: {error}"
    for entry in c.rate_factors:
        pattern, _, factor = entry.rpartition("=")
        try:
            right = pattern and 0 < float(factor) <= LARGEST
        except ValueError:
            right = False
        if not right:
            yield (
                f"optimizer.rate_factors has {entry!r}, but it takes PATTERN=FACTOR, lora_B=16, with a number above 0; "
                "what is not to be trained is named by model.frozen"
            )
    yield from _of_schedules(config)
    if c.rate_factors and c.name in (SCHEDULE_FREE, "prodigy"):
        reason = "estimates one rate" if c.name == "prodigy" else "averages with weights of one rate"
        yield (
            f"optimizer.rate_factors is set, but {c.name} {reason} for all parameters: leave the factors out, or take "
            "another optimizer.name, adamw"
        )
    trained_apart = config.algorithm.name == "ppo" and not config.critic.shared
    if c.name == "came" and 0 in (c.b1, config.critic.b1 if trained_apart else None):
        yield (
            f"{'critic' if c.b1 else 'optimizer'}.b1 is 0, but came divides by how far updates are from their mean, of "
            "which nothing is left then: set it to 0.9"
        )
    if c.name == "prodigy":
        rates = {"optimizer": c.learning_rate} | ({"critic": config.critic.learning_rate} if trained_apart else {})
        for section, rate in rates.items():
            if isinstance(rate, str) or rate < LEAST_PRODIGY_RATE:
                yield (
                    f"{section}.learning_rate is {rate}, but prodigy finds the rate itself, and multiplies it by that: "
                    "set it to 1, and where that is too fast optimizer.d_coef to 0.5"
                )
    if c.lisa_layers and (c.name in (SCHEDULE_FREE, "prodigy") or c.name not in OPTIMIZERS):
        yield (
            f"optimizer.lisa_layers is {c.lisa_layers}, whose layers change while {c.name} follows all of them: set it "
            "to 0, or take another optimizer.name, adamw"
        )
    whole = not (config.lora.rank or config.lora.path)
    if c.name == "galore_adamw" and not whole:
        yield (
            "optimizer.name is galore_adamw, which projects the gradients of whole matrices, but adapters are trained, "
            "whose rank is low already: take adamw, or set lora.rank to 0 and lora.path to none"
        )
    if c.name == SCHEDULE_FREE and whole and config.model.param_dtype != "float32":
        yield (
            f"model.param_dtype is {config.model.param_dtype}, but the average of {SCHEDULE_FREE} moves in ever "
            "smaller steps, which so few bits do not hold: set it to float32, or train adapters (lora.rank)"
        )
    if c.moment_dtype == "float8" and c.name == "adafactor":
        yield (
            "optimizer.moment_dtype is float8, but adafactor has statistics of rows and columns, small already: set "
            "float32, or optimizer.name to adamw, lion, sgd, muon, ademamix, adopt or came"
        )


def _of_schedules(config: ConfigDict) -> Iterator[str]:
    """Messages for the learning rate: its warm-up, and its way to the end."""
    c, steps = config.optimizer, config.total_steps
    if c.warmup_steps and c.warmup_ratio:
        yield f"optimizer.warmup_steps is {c.warmup_steps} and warmup_ratio {c.warmup_ratio}: set one of the two"
    if c.warmup_init and not (c.warmup_steps or c.warmup_ratio):
        yield f"optimizer.warmup_init is {c.warmup_init:g}, but there is no warm-up: set warmup_steps, or it to 0"
    if c.learning_rate == "auto":
        if config.algorithm.name in ("preference", ONLINE_PREFERENCE, "reward_model", "process_reward_model"):
            yield (
                "optimizer.learning_rate is auto, a rule for sft and for algorithms that sample, but algorithm.name is "
                f"{config.algorithm.name}: set a number, 1e-6 for example, or 1e-5 for adapters"
            )
        if c.warmup_init:
            yield f"optimizer.warmup_init is {c.warmup_init:g}, and learning_rate auto: give a number for both"
    elif c.warmup_init > c.learning_rate:
        yield (
            f"optimizer.warmup_init is {c.warmup_init:g}, but warm-up rises to learning_rate = {c.learning_rate:g}: "
            "give a smaller one"
        )
    known = config.num_epochs is None  # else they are counted with the rows, and this is checked again
    warmup = c.warmup_steps or (math.ceil(c.warmup_ratio * steps) if known else 0)
    schedules = {"optimizer.schedule": c.schedule}
    if config.algorithm.name == "ppo" and not config.critic.shared:
        schedules["critic.schedule"] = config.critic.schedule
        warmup = max(warmup, config.critic.lr_warmup_steps)
    named = " and ".join(f"{key} {schedule}" for key, schedule in schedules.items())
    end, of_end = (c.schedule_steps, "schedule_steps") if c.schedule_steps else (steps, "total_steps")
    decays = "wsd" in schedules.values()
    if decays != (c.decay_steps > 0) or ((known or c.schedule_steps) and c.decay_steps > end):
        yield f"optimizer.decay_steps is {c.decay_steps} with {named}: wsd takes 1 to {of_end} = {end}, the others 0"
    if c.stable_steps and not decays:
        yield f"optimizer.stable_steps is {c.stable_steps}, but it is of wsd, with {named}: set it to 0"
    if c.stable_steps and c.schedule_steps:
        yield (
            f"optimizer.stable_steps is {c.stable_steps}, behind which wsd decays, but schedule_steps = "
            f"{c.schedule_steps} says where that ends: set one of them to 0"
        )
    if c.schedule_steps and not set(schedules.values()) - {"constant", "inverse_sqrt"}:
        yield f"optimizer.schedule_steps is {c.schedule_steps}, but {named} has no end: set it to 0"
    if 0 < c.schedule_steps <= warmup:
        yield (
            f"optimizer.schedule_steps is {c.schedule_steps}, but warm-up alone takes {amount(warmup, 'step')}: set it "
            "to more (it counts them too), or to 0 for total_steps"
        )
    if c.power != 1 and "polynomial" not in schedules.values():
        yield f"optimizer.power is {c.power:g}, but it is that of polynomial, with {named}: set it to 1"
    if "cosine_with_restarts" in schedules.values() and (c.cycles < 1 or c.cycles % 1):
        yield (
            f"optimizer.cycles is {c.cycles:g} with {named}: cosine_with_restarts takes a whole number of decays, 2 "
            "for one restart"
        )


def check_lora(config: ConfigDict) -> Iterator[str]:
    """Messages for adapters, for what is trained beside them, and for the reference of a run that trains them."""
    lora, algorithm = config.lora, config.algorithm
    if lora.path is not None and lora.rank:
        yield f"lora.rank is {lora.rank}, but the adapter of lora.path has a rank already: set rank to 0"
    if lora.dora and lora.path is not None:
        yield "lora.dora is true, but the adapter of lora.path has its own form, DoRA or not: set it to false"
    if lora.dora and config.model.quantize != "none":
        yield (
            f"lora.dora is true, and model.quantize {config.model.quantize}, but DoRA measures the matrices in every "
            "forward pass, and none are kept as numbers: set one of the two off"
        )
    yield from _of_init(config)
    yield from _of_trained_parts(config)
    of_modules = ("lora.layers_to_transform", "lora.exclude_modules", "lora.rank_pattern", "lora.alpha_pattern")
    for key, value in changed(config, of_modules):
        shown = ", ".join(map(str, value))
        if lora.path is not None:
            yield f"{key} is {shown}, but the adapter of lora.path says this itself: leave it empty"
        elif not lora.rank:
            yield f"{key} is {shown}, but there are no adapters: set lora.rank, 16 for example, or leave it empty"
    if not (lora.rank or lora.path):
        if config.model.vision == "lora":
            yield "model.vision is lora, but there are no adapters: set lora.rank, 16 for example, or it to trained"
        if lora.dora:
            yield "lora.dora is true, but there are no adapters: set lora.rank, 16 for example, or it to false"
        if lora.modules_to_save:
            yield (
                f"lora.modules_to_save is {', '.join(lora.modules_to_save)}, but there are no adapters, and all of the "
                "model is trained: set lora.rank, 16 for example, or leave it empty"
            )
        if lora.bias != "none":
            yield f"lora.bias is {lora.bias}, but there are no adapters: set lora.rank, 16 for example, or it to none"
        return
    if lora.modules_to_save and lora.path is not None:
        yield (
            f"lora.modules_to_save is {', '.join(lora.modules_to_save)}, but the adapter of lora.path names its own: "
            "leave it empty"
        )
    if lora.bias != "none" and lora.path is not None:
        yield f"lora.bias is {lora.bias}, but the adapter of lora.path says this itself: leave it at none"
    experts = [name for name in lora.targets if "experts" in name.split(".")]
    for setting, off in (("dora", "false"), ("dropout", "0")):
        if lora.rank and experts and lora[setting]:
            yield (
                f"lora.{setting} is {str(lora[setting]).lower()}, but lora.targets names {experts[0]}, and adapters of "
                f"experts have no {setting}, as in PEFT: set it to {off}, or leave experts out of the targets"
            )
    if lora.rank and experts and (starts_from_matrices(lora.init) or makes_up(lora.init)):
        yield (
            f"lora.init is {lora.init}, but lora.targets names {experts[0]}, and adapters of experts do not start from "
            "the matrices beside them: set it to kaiming, or leave experts out of the targets"
        )
    if algorithm.ref_sync_steps and reference_adapters(config) == "base":
        yield (
            f"algorithm.ref_sync_steps is {algorithm.ref_sync_steps}, but lora.reference = 'base' never moves: set "
            "start (with ref_mixup_alpha 1) or copy"
        )
    if algorithm.ref_sync_steps and reference_adapters(config) == "start" and algorithm.ref_mixup_alpha < 1:
        yield (
            f"algorithm.ref_mixup_alpha is {algorithm.ref_mixup_alpha}, but a mean of adapters is no mean of what they "
            "compute: set lora.reference to copy, or ref_mixup_alpha to 1"
        )
    if lora.reference == "copy" and (quantized := how_quantized(config)):
        yield (
            f"lora.reference is copy, but the matrices are quantised ({quantized}) and adapters are not merged into "
            "them: set base or start"
        )


def _of_init(config: ConfigDict) -> Iterator[str]:
    """Messages for the numbers that adapters start from."""
    lora = config.lora
    if not LORA_INIT.fullmatch(lora.init):
        known = (
            "kaiming, gaussian, orthogonal, random, pissa, olora and loftq; and of N iterations, 16 for example, "
            "pissa_niter_N and loftq_niter_N"
        )
        yield f"lora.init is {lora.init!r}, but there are {known}"
    elif lora.init != "kaiming" and lora.path is not None:
        yield f"lora.init is {lora.init}, but the adapter of lora.path has its numbers already: set it to kaiming"
    elif lora.dora and (lora.init == "random" or starts_from_matrices(lora.init)):
        yield (
            f"lora.init is {lora.init}, and lora.dora true, but DoRA learns the lengths of columns to which the "
            "adapters have added nothing yet: set init to kaiming, gaussian or orthogonal, or dora to false"
        )
    elif makes_up(lora.init) and config.model.quantize == "none":
        yield (
            f"lora.init is {lora.init}, which makes up for what matrices lose in few bits, but model.quantize is none: "
            "set it to nf4, for example, or init to pissa"
        )
    elif makes_up(lora.init) and config.model.random_init:
        yield f"lora.init is {lora.init}, which reads the model's files, but model.random_init is true: set it to false"
    elif lora.init == "orthogonal" and lora.rank % 2:
        yield f"lora.init is orthogonal, which takes an even rank, but lora.rank is {lora.rank}"


def _of_trained_parts(config: ConfigDict) -> Iterator[str]:
    """Messages for parts of the model that adapters or fewer bits keep as they are, and that are to be trained."""
    lora = config.lora
    if config.model.vision == "trained" and (lora.rank or lora.path):
        yield (
            "model.vision is trained, but beside adapters nothing is trained whole: set it to lora, for adapters on "
            "the vision part too, or frozen; or name its modules in lora.modules_to_save"
        )
    for key, value in changed(config, ("model.trainable", "model.frozen")):
        if lora.rank or lora.path:
            yield (
                f"{key} is {', '.join(value)}, but adapters are trained, and nothing beside them but what "
                f"lora.modules_to_save names: leave {key} empty, or lora out"
            )
    qat, others = config.model.qat, {"lora.rank": lora.rank, "lora.path": lora.path}
    others["model.quantize"] = None if config.model.quantize == "none" else config.model.quantize
    of_experts = config.model.quantize_experts
    others["model.quantize_experts"] = None if of_experts in ("same", "none") else of_experts
    for key, value in ((key, value) for key, value in others.items() if value and qat != "none"):
        yield (
            f"model.qat is {qat}, for which the matrices are trained as numbers, but {key} is {value}, with which they "
            f"are frozen: set model.qat to none, or leave {key} out"
        )
    narrow, others = config.model.matmul_dtype, {"model.quantize": config.model.quantize, "model.qat": qat}
    for key, value in ((key, value) for key, value in others.items() if value != "none" and narrow != "auto"):
        yield (
            f"model.matmul_dtype is {narrow}, into which matrices are converted for each matmul, but {key} is {value}, "
            f"with which they have few bits already: set {key} to none, or model.matmul_dtype to auto"
        )
    if narrow != "auto" and config.model.dtype == "float32":
        yield (
            f"model.matmul_dtype is {narrow}, but model.dtype is float32, for which there is no reason beside matmuls "
            "in 8 bits: set it to bfloat16, or model.matmul_dtype to auto"
        )


def check_average(config: ConfigDict) -> Iterator[str]:
    """Messages for the moving average of the policy, and for a reference that follows it or starts to move late."""
    c, algorithm = config.average, config.algorithm
    for key, value in changed(config, ("algorithm.ref_sync_to", "algorithm.ref_sync_after")):
        if not algorithm.ref_sync_steps:
            yield f"{key} is {value!r}, but algorithm.ref_sync_steps is 0, so that the reference never moves: set both"
    if algorithm.ref_sync_to == "average" and not c.every:
        yield (
            "algorithm.ref_sync_to is average, but average.every is 0, so that there is none: set it, 400 for example, "
            "or ref_sync_to to policy"
        )
    if not c.every:
        for key, value in changed(config, (f"average.{name}" for name in c)):
            yield f"{key} is {value!r}, but average.every is 0, so that nothing is averaged: set it, or leave this out"
        return
    first = c.start + c.every
    if config.num_epochs is None and first > config.total_steps:
        yield (
            f"average.start + average.every is {first}, the step of the first update, but total_steps is "
            f"{config.total_steps}: make them smaller"
        )
    if c.lag + c.multiplier * first < 1:
        yield (
            f"average.lag is {c.lag:g} and multiplier {c.multiplier:g}, which make an age of "
            f"{c.lag + c.multiplier * first:g} at the first update, but from 1 on the weights are at most 1: raise one"
        )
    if c.evaluate and config.eval.every < 0:
        yield "average.evaluate is true, but eval.every is -1, and nothing is evaluated: set one of the two"
    if quantized := how_quantized(config):
        yield (
            f"average.every is {c.every}, but the matrices are quantised ({quantized}), and a mean of adapters is no "
            "mean of what they compute: set one of the two off"
        )
    adapted = config.lora.rank or config.lora.path
    if algorithm.ref_sync_to == "average" and adapted and config.lora.reference != "copy":
        yield (
            f"algorithm.ref_sync_to is average, of the whole model, but lora.reference is {config.lora.reference!r}: "
            "set it to copy"
        )
