"""The trainers of TRL that learn from rows: SFT, preferences and reward models."""

from jaxrl_llm.tools.migrate import shared
from jaxrl_llm.tools.migrate.draft import Draft
from jaxrl_llm.tools.migrate.losses import set_loss
from jaxrl_llm.tools.migrate.trl_settings import NAMES, batch, reference_sync


def offline(draft: Draft, trainer: str, devices: int) -> int:
    """Set the batch and the loss of SFT, preferences and reward models."""
    # A pair, or a labelled row with its mismatch, is two rows; a pair with its gold completion is three.
    rows = 1 if trainer in ("sft", "prm") or draft.get("loss_type") == "apo_zero_unpaired" else 2
    if trainer == "tpo" and draft.get("tpo_alpha"):
        rows = 3
    batch(draft, devices, rows)
    names = {"sft": "sft", "reward": "reward_model", "prm": "process_reward_model"}
    draft.set("algorithm.name", names.get(trainer, "preference"))
    if trainer == "sft":
        _sft(draft)
    elif trainer == "reward":
        set_loss(draft, [("bradley_terry", {"center": "center_rewards_coefficient"})])
    elif trainer == "prm":
        _prm(draft)
    else:
        draft.take("algorithm.beta", "beta")
        _preference(draft, trainer)
    if draft.get(key := "group_by_length"):
        if draft.get("packing"):
            draft.use(key)
            draft.check(f"{key} is left out: it saves padding, of which packed rows have none")
        else:
            draft.set("data.group_by_length", True, key)
    reference_sync(draft, 1)
    return 1


def _sft(draft: Draft) -> None:
    """Set which tokens are learned, and the loss of each."""
    keys = ("completion_only_loss", "assistant_only_loss", "train_on_responses_only")
    only = any(draft.get(key) for key in keys)
    draft.set("data.loss_on", "completion" if only else "all", *keys)
    if draft.get("completion_only_loss") is None and not only:
        draft.check(
            "completion_only_loss is unset: TRL then learns all tokens of messages and texts, which is written "
            "(data.loss_on = all), but only the completion where rows have prompt and completion: set completion for "
            "these"
        )
    if (column := draft.get("dataset_text_field")) not in (None, "", "text"):
        if "data.format" in draft.values:
            draft.check(f"dataset_text_field is {column!r}: have {draft.values['data.format']} name its text `text`")
        else:
            draft.set("data.format", f"completion(field={column!r})", "dataset_text_field")
    if "CompletionOnly" in str(draft.get("data_collator")):
        draft.set("data.loss_on", "completion", "data_collator")
        draft.check(
            "data_collator: DataCollatorForCompletionOnlyLM learns what follows its template in a text; here rows with "
            "messages, or prompt and completion, say what is learned (data.loss_on), and of a text all is"
        )
    if draft.get("packing_strategy") == "wrapped" and draft.get("packing"):
        draft.set("data.packing_strategy", "wrapped", "packing_strategy")
    draft.use("packing_strategy")
    kind, smoothing = draft.get("loss_type"), "label_smoothing_factor"
    if kind == "dft":  # of which TRL does not smooth the labels
        draft.set("algorithm.loss", "dft", "loss_type")
        draft.use(smoothing)
        return
    if kind not in ("nll", "chunked_nll"):
        draft.check(f"loss_type = {kind!r} has no equivalent in sft")
    draft.use("loss_type")
    draft.set("algorithm.label_smoothing", draft.get(smoothing), smoothing)


def _prm(draft: Draft) -> None:
    """Set the steps of a process reward model."""
    if draft.get(key := "step_separator") != "\n":
        draft.set("data.step_separator", draft.get(key), key)
    draft.use(key)
    last = draft.get("train_on_last_step_only")
    draft.set("data.loss_on", "last_step" if last else "completion", "train_on_last_step_only")
    draft.drop("rollout.max_completion_length")
    if longest := draft.get("max_completion_length"):
        draft.check(
            f"max_completion_length = {longest} cuts the steps of a row apart from its prompt there; here "
            "data.max_length cuts the whole row"
        )


def _preference(draft: Draft, trainer: str) -> None:
    """Set the losses of pairs, or of labelled rows, with their options and weights."""
    kinds, weights = draft.get("loss_type"), draft.get("loss_weights")
    kinds = list(kinds) if isinstance(kinds, list | tuple) else [kinds]
    if trainer in ("dpo", "cpo"):
        kinds = [trainer if name == "sigmoid" else name for name in kinds]
    elif trainer == "orpo":
        kinds = ["orpo"]
    elif trainer == "tpo":
        kinds = _tpo(draft, str(kinds[0]))
    likely = "alphapo" not in kinds  # TRL leaves its likelihood term out, whatever cpo_alpha is
    if trainer == "cpo" and draft.get("alpha"):
        kinds = ["alphapo" if name == "simpo" else name for name in kinds]
        if "alphapo" not in kinds:
            draft.check(
                f"alpha = {draft.get('alpha')} is left out: it transforms the log-probs of any loss_type there, and of "
                "simpo alone here"
            )
    options = {**NAMES["options"], "alpha": "f_alpha_divergence_coef"}
    if draft.sets(key := "f_divergence_type"):
        shared.check_known(key, draft.get(key), NAMES["divergences"])
    rpo = ("rpo_alpha",) if draft.sets("rpo_alpha") else ()
    if trainer == "dpo" and draft.get("rpo_alpha") is not None:
        kinds, weights = [*kinds, "sft"], [*(weights or [1.0] * len(kinds)), float(draft.get("rpo_alpha"))]
    elif trainer == "cpo" and kinds[0] in ("hinge", "ipo"):
        kinds = [kinds[0], "sft"]
        draft.set("algorithm.reference_free", True, "loss_type")
    if draft.get("label_smoothing") and not set(NAMES["smoothed"]) & set(kinds):
        draft.check("label_smoothing is ignored by TRL for this loss; dpo(label_smoothing=...) would be cDPO")
    losses = []
    for name in kinds:
        keys = dict(options)
        if name in NAMES["smoothed"]:
            keys["label_smoothing"] = "label_smoothing"
        if name == "alphapo":
            keys["alpha"] = "alpha"
        if trainer == "cpo" and likely:
            keys["nll_weight"] = "cpo_alpha"
        if trainer == "tpo":
            keys |= {"nll_weight": "tpo_alpha", "gamma": "tpo_l_gamma"}
        losses.append((name, keys))
    set_loss(draft, losses, *(() if trainer == "orpo" else ("loss_type",)), *rpo)
    if weights:
        draft.set("algorithm.loss_weights", tuple(float(weight) for weight in weights), "loss_weights", *rpo)


def _tpo(draft: Draft, kind: str) -> list[str]:
    """Return the losses of a loss_type of TPOTrainer; without its likelihood term it reads no gold completions."""
    named = {"sigmoid": ("cpo", "tpo"), "tpo-l": ("simpo", "tpo_l")}
    shared.check_known("loss_type", kind, (*named, "hinge", "ipo"))
    gold = bool(draft.get("tpo_alpha"))
    if kind in named:
        return [named[kind][gold]]
    draft.set("algorithm.reference_free", True, "loss_type")
    return [kind, "gold_sft"] if gold else [kind]
