"""Built-in rewards for the form of a completion: tags, patterns, JSON, lengths."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.rewards.replies import json_objects
from jaxrl_llm.rewards.signatures import RewardError, shorten, text_of

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "number": (int, float), "integer": (int,),
    "boolean": (bool,), "null": (type(None),),
}  # fmt: skip
KEYWORDS = {
    "type", "enum", "const", "properties", "required", "additionalProperties", "items", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "minimum", "maximum", "anyOf", "allOf", "oneOf", "not",
    "title", "description", "default", "examples", "$schema", "$id", "format",
}  # fmt: skip


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
    without it, the data set's `column` has one for each, itself or as JSON text. The keywords of JSON Schema that are
    understood are those of `KEYWORDS`; others raise RewardError rather than being passed over.
    """
    if schema is None and column not in columns:
        raise RewardError(
            f"json_schema needs the option schema, or the column {column!r}, which the data does not have"
        )
    schemas = [schema] * len(completions) if schema is not None else columns[column]
    read = [json.loads(each) if isinstance(each, str) else each for each in schemas]
    return [
        None if wanted is None else float(_fits_text(text_of(completion), wanted))
        for completion, wanted in zip(completions, read, strict=True)
    ]


def _fits_text(text: str, schema: Mapping[str, Any]) -> bool:
    check_schema(schema)
    try:
        values = [json.loads(text)]
    except ValueError:
        values = list(json_objects(text))
    return bool(values) and fits(values[-1], schema)


def check_schema(schema: Any) -> None:
    """Raises RewardError for a JSON schema with keywords that `fits` does not know."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise RewardError(f"a JSON schema is an object, not {shorten(schema)}")
    unknown = [key for key in schema if key not in KEYWORDS]
    if unknown:
        raise RewardError(
            f"json_schema does not know the keyword {unknown[0]!r}; it knows {', '.join(sorted(KEYWORDS))}"
        )
    names = schema.get("type", [])
    for name in [names] if isinstance(names, str) else names:
        if name not in TYPES:
            raise RewardError(f"json_schema: there is no type {name!r}; there are {', '.join(TYPES)}")
    parts = [*schema.get("properties", {}).values(), *(schema[k] for k in ("items", "not") if k in schema)]
    parts += [part for key in ("anyOf", "allOf", "oneOf") for part in schema.get(key, ())]
    extra = schema.get("additionalProperties")
    for part in [*parts, *([extra] if isinstance(extra, Mapping) else [])]:
        check_schema(part)


def fits(value: Any, schema: Any) -> bool:
    """True when a JSON value fits a JSON schema with the keywords of `KEYWORDS`."""
    if isinstance(schema, bool):
        return schema
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    return (
        (not types or any(_is(value, name) for name in types))
        and ("enum" not in schema or any(_equal(value, each) for each in schema["enum"]))
        and ("const" not in schema or _equal(value, schema["const"]))
        and all(fits(value, part) for part in schema.get("allOf", ()))
        and ("anyOf" not in schema or any(fits(value, part) for part in schema["anyOf"]))
        and ("oneOf" not in schema or sum(fits(value, part) for part in schema["oneOf"]) == 1)
        and ("not" not in schema or not fits(value, schema["not"]))
        and _fits_kind(value, schema)
    )


def _fits_kind(value: Any, schema: Mapping[str, Any]) -> bool:
    """The keywords that speak of one type only."""
    if isinstance(value, dict):
        known = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        return all(name in value for name in schema.get("required", ())) and all(
            fits(each, known.get(name, others)) for name, each in value.items()
        )
    if isinstance(value, list):
        return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)) and all(
            fits(each, schema.get("items", True)) for each in value
        )
    if isinstance(value, str):
        long_enough = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return long_enough and re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return True


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, TYPES[name]) or (name == "integer" and isinstance(value, float) and value.is_integer())


def _equal(a: Any, b: Any) -> bool:
    """Equal as JSON: true is not 1."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True) or (
        a == b and not isinstance(a, bool) and not isinstance(b, bool) and not isinstance(a, (dict, list))
    )
