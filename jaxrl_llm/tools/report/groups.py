"""The groups of metrics in a report, each with a line that explains it, and the units of metrics."""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Group(NamedTuple):
    """Metrics that belong together: those whose name `pattern` matches whole. docs/metrics.md has the same lines."""

    title: str
    explanation: str
    pattern: str


GROUPS = (
    Group("Evaluation", "On held-out prompts or rows, which are not trained on; dots are the evaluations.", r"eval/.+"),
    Group("Health", "1 in a step where a warning held; docs/reliability.md explains each.", r"warning/.+"),
    Group(
        "Preferences",
        "Pairs: how much more the policy likes what was chosen than what was rejected.",
        r"rewards/(chosen|rejected|accuracies|margins)|logps/.+|logits/.+|log_odds_.+|margin|accuracy|\w+_reward",
    ),
    Group(
        "Reward",
        "The scores of completions. Where all of a prompt score alike (frac_reward_zero_std), nothing is learned.",
        r"reward|reward_(std|group_std|min|max|shaping)|rewards/.+|frac_reward_zero_std|unscorable_rows|judge/.+",
    ),
    Group(
        "Loss and gradient",
        "The loss of RL is no measure of quality: read the reward. A norm that jumps is a warning.",
        r"loss|\w+_loss|policy_term|grad_norm|lr|nonfinite_gradient|mean_token_accuracy",
    ),
    Group(
        "Policy",
        "The distance the policy moves: KL in nats, shares of clipped tokens. Entropy near 0 samples alike.",
        r"kl|\w+_kl|kl_coef|entropy|entropy_\w+|clip_ratio/.+|cispo_clip_ratio|ratio/.+|advantages/.+|objective/.+"
        r"|(a2po|m2po|vespo)/.+|off_policy_masked",
    ),
    Group("Teacher", "The distance of the policy from its teacher; 0 where they agree.", r"teacher/.+"),
    Group(
        "Critic",
        "PPO's value network: its loss, and its values against the returns.",
        r"(critic|returns|values|val)/.+",
    ),
    Group(
        "Sampler against trainer",
        "The log-probs of the same tokens by both. They differ by rounding alone: near 0 is right.",
        r"(sampling|rollout_corr)/.+",
    ),
    Group(
        "Completions",
        "Lengths in tokens, and the share that was cut off at the longest length (clipped_ratio).",
        r"(completions|prompts|rollout)/.+",
    ),
    Group("Environments and tools", "Turns of episodes, calls of tools, and failures.", r"(environment|tools)/.+"),
    Group(
        "Speed",
        "Seconds of a step and its phases. tokens/s leaves out what it waited for compilation (time/compile); mfu is "
        "the share of the devices' peak that updates make use of.",
        r"step_time|step_tokens|tokens_per_second|mfu|num_tokens|epoch|(time|producer)/.+",
    ),
    Group(
        "Machine",
        "Memory (GiB) of the fullest device and of a process, and the CPU cores it kept busy; of several processes the "
        "largest, the number of the slowest, and seconds that another one waited for it.",
        r"machine/.+",
    ),
)
OTHER = Group("Other", "Metrics that callbacks, rewards and your own code log.", r".+")

# The unit of the metrics whose whole name matches; those without one are plain numbers.
UNITS = (
    (r"step_time|(time|producer)/.+", "s"),
    (r"tokens_per_second", "tokens/s"),
    (r"num_tokens|step_tokens|.*(_length|/mean_length)", "tokens"),
    (r"machine/\w+_gib", "GiB"),
    (r"machine/cpu_cores", "cores"),
    (r"machine/waited_seconds", "s"),
    (r"epoch", "epochs"),
    (r"(eval/(.+/)?)?(kl|entropy)|ratio/kl|teacher/kl|rollout_corr/kl|sampling/sampling_logp_difference/\w+", "nats"),
    (r".*(accuracy|accuracies|clipped_ratio|clip_ratio/\w+|(pass|maj)@\d+)|frac_reward_zero_std|mfu", "share"),
    (r"environment/(.+/)?turns", "turns"),
    (r"unscorable_rows|environment/(.+/)?(failures|episodes)", "rows"),
)


def grouped(metrics: Iterable[str]) -> list[tuple[Group, list[str]]]:
    """The groups that have some of the metrics, each with its own in alphabetical order."""
    found: dict[Group, list[str]] = {}
    for name in sorted(metrics):
        group = next((group for group in GROUPS if re.fullmatch(group.pattern, name)), OTHER)
        found.setdefault(group, []).append(name)
    return [(group, found[group]) for group in (*GROUPS, OTHER) if group in found]


def unit_of(metric: str) -> str:
    """The unit of a metric, empty where it is a plain number."""
    return next((unit for pattern, unit in UNITS if re.fullmatch(pattern, metric)), "")
