"""Built-in rewards for the form of a completion: tags, patterns, JSON, lengths."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator, validators
from jsonschema_specifications import REGISTRY

from jaxrl_llm.rewards.replies import json_objects
from jaxrl_llm.rewards.signatures import RewardError, text_of

# NaN is no JSON, but Python's parser takes it: it is a number that fits no schema of numbers.
_is_number = Draft202012Validator.TYPE_CHECKER.is_type
Validator = validators.extend(
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine(
        "number", lambda _, value: _is_number(value, "number") and value == value
    ),
)
# The schema of schemas, which passes over keywords that it does not know, closed at every depth.
STRICT_SCHEMA = {
    "$schema": Validator.META_SCHEMA["$id"],
    "$id": "urn:jaxrl_llm:strict",
    "$dynamicAnchor": "meta",
    "$ref": Validator.META_SCHEMA["$id"],
    "unevaluatedProperties": False,
}


def think_answer_format(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1.0 where the completion is `<think>...</think>` and then `<answer>...</answer>`, once each, else 0.0.

    White space around and between the two is free.
    """
    pattern = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    texts = [text_of(completion) for completion in completions]
    return [float(bool(pattern.fullmatch(t)) and all(t.count(tag) == 1 for tag in tags)) for t in texts]


def regex_match(completions: Sequence[Any], *, pattern: str, whole: bool = False, **columns: Any) -> list[float]:
    """1.0 where the regular expression `pattern` is found in the completion (with `whole`: is all of it), else 0.0.

    The dot matches line ends too. Raises RewardError for a pattern that is none.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise RewardError(f"regex_match: {pattern!r} is no regular expression: {error}") from error
    find = compiled.fullmatch if whole else compiled.search
    return [float(find(text_of(completion)) is not None) for completion in completions]


def length_range(
    completion_ids: Sequence[Sequence[int]], *, minimum: int = 0, maximum: int = 2**31, **columns: Any
) -> list[float]:
    """1.0 where the completion has `minimum` to `maximum` tokens, else 0.0."""
    return [float(minimum <= len(ids) <= maximum) for ids in completion_ids]


def length_penalty(
    completion_ids: Sequence[Sequence[int]], *, per_token: float = -0.001, **columns: Any
) -> list[float]:
    """`per_token` times the number of tokens."""
    return [per_token * len(ids) for ids in completion_ids]


def json_schema(
    completions: Sequence[Any], *, schema: Mapping[str, Any] | str | None = None, column: str = "schema", **columns: Any
) -> list[float | None]:
    """1.0 where the completion is JSON that fits the schema, 0.0 where it is not; None where the schema is None.

    The JSON is the whole completion, or the last object in it (a fenced block, say). `schema` is the same for all rows;
    without it, the data set's `column` has one for each, itself or as JSON text. Schemas are those of JSON Schema,
    draft 2020-12, without references to other documents. Raises RewardError: a schema that is none, unknown keywords
    included, which a validator would pass over.
    """
    if schema is None and column not in columns:
        raise RewardError(
            f"json_schema needs the option schema, or the column {column!r}, which the data does not have"
        )
    schemas = [schema] * len(completions) if schema is not None else columns[column]
    rewards: list[float | None] = []
    for completion, wanted in zip(completions, schemas, strict=True):
        wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
        if wanted is None:
            rewards.append(None)
            continue
        validator, text = schema_validator(json.dumps(wanted)), text_of(completion)
        try:
            try:
                values = [json.loads(text)]
            except ValueError:
                values = list(json_objects(text))
            rewards.append(float(bool(values) and validator.is_valid(values[-1])))
        except RecursionError:  # nested deeper than any JSON that is meant
            rewards.append(0.0)
    return rewards


@functools.lru_cache(maxsize=256)  # checking a schema takes milliseconds, and rows of a batch share theirs
def schema_validator(schema: str) -> Any:
    """The validator of a JSON schema, given as JSON text. Raises RewardError for what is no schema."""
    tree = json.loads(schema)
    errors = list(Draft202012Validator(STRICT_SCHEMA).iter_errors(tree))
    if errors:
        # An error makes every schema around it wrong as well: the innermost one is the cause.
        error = max(errors, key=lambda error: len(error.absolute_path))
        if error.validator == "unevaluatedProperties":
            unknown = next(key for key in error.instance if repr(key) in error.message)
            raise RewardError(f"json_schema does not know the keyword {unknown!r} (at {error.json_path} of the schema)")
        raise RewardError(f"json_schema: at {error.json_path} of the schema, {error.message}")
    # The registry of the specifications alone: a reference to another document is not fetched.
    return Validator(tree, registry=REGISTRY)
