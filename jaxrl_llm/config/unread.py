"""Settings that differ from their default and that a run does not read: it names them as it starts."""

from jaxrl_llm.config.checks import changed
from jaxrl_llm.config.schema import KEYS, OFFLINE, ConfigDict

OF_ADAPTERS = ("lora.alpha", "lora.rslora", "lora.dropout", "lora.targets", "lora.reference")
OF_GIVEN_ROWS = ("data.loss_on", "data.precompute_reference")
OF_REFERENCES = ("algorithm.offload_reference", "algorithm.ref_mixup_alpha")
OF_PREFERENCES = (
    "algorithm.loss_weights", "algorithm.reference_free", "algorithm.ld_alpha", "algorithm.use_weighting",
)  # fmt: skip
# What every algorithm reads, or checks.py refuses where it does not fit.
OF_ALL = (
    "algorithm.name", "algorithm.loss", "algorithm.neftune_alpha", "algorithm.label_smoothing",
    "algorithm.num_iterations", "algorithm.ref_sync_steps",
)  # fmt: skip


def unread(config: ConfigDict) -> list[str]:
    """A sentence for each reason for which settings have no effect in this run, with their names."""
    name, online = config.algorithm.name, config.algorithm.name not in OFFLINE
    adapted = bool(config.lora.rank or config.lora.path)
    of_policies = tuple(key for key in _keys("algorithm.") if key not in (*OF_ALL, *OF_REFERENCES, *OF_PREFERENCES))
    of_preferences = tuple(key for key in of_policies if key != "algorithm.beta")
    named = f"algorithm.name is {name}, "
    reasons = {
        "lora.rank is 0 and lora.path none, so there are no adapters and all of the model is trained": (
            () if adapted else OF_ADAPTERS
        ),
        f"{named}which has no critic": () if name == "ppo" else _keys("critic."),
        f"{named}which samples its rows": OF_GIVEN_ROWS if online and config.teacher.on_policy == 1 else (),
        f"{named}which compares no pairs": () if name == "preference" else OF_PREFERENCES,
        f"{named}which samples no completions to learn from": (
            () if online else of_preferences if name == "preference" else (*of_policies, *OF_REFERENCES)
        ),
    }
    found = {reason: ", ".join(key for key, _ in changed(config, keys)) for reason, keys in reasons.items()}
    return [f"{reason}: {keys} has no effect" for reason, keys in found.items() if keys]


def _keys(prefix: str) -> tuple[str, ...]:
    return tuple(key.name for key in KEYS if key.name.startswith(prefix))
