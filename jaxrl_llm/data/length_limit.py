"""The length of token rows: what becomes of those over a limit, and how many there were."""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.config.wording import amount
from jaxrl_llm.data import Row
from jaxrl_llm.data.conversations import Ids
from jaxrl_llm.data.image_rows import Tiles
from jaxrl_llm.data.pairs import ANSWERS
from jaxrl_llm.data.tokenize import COLUMNS, PIXELS, STEP_LABELS, TEXTS, RowTokenizer, without_first

log = logging.getLogger(__name__)

TRUNCATE: dict[str, Callable[[Ids, int], Ids]] = {
    "truncate_left": lambda ids, length: ids[len(ids) - length :],
    "truncate_right": lambda ids, length: ids[:length],
    "truncate_middle": lambda ids, length: ids[: length // 2] + ids[len(ids) - (length - length // 2) :],
}
SPLIT = "split"
OVERLONG = ("error", "filter", *TRUNCATE, SPLIT)
REST = ("rest_ids", "rest_mask")  # of labelled rows: what was truncated from the end of a completion
HOPELESS = 100_000  # letters from which on a text may be too long to be tokenised at all


@dataclass
class LimitedTokenizer:
    """Makes token rows of at most `limit` tokens, one after the other, and counts what that does.

    A longer row is an error ("error"), dropped ("filter"), or keeps its end ("truncate_left"), its start
    ("truncate_right") or both halves ("truncate_middle"); a pair is dropped when one of its rows is. Completions may
    also be left as they are ("split"), for `split` to cut; of other kinds that is an error. Labelled rows that are
    truncated on the right have what was cut, up to `limit` tokens, in `rest_ids` and `rest_mask`. A row without a
    learned token is dropped, and one that would be truncated inside its images; so is a piece without one, unless rows
    are `wrapped`, which reads it before the next piece.

    Raises ConfigError: an unknown `overlong`.
    """

    row_tokenizer: RowTokenizer
    limit: int | None = None
    overlong: str = "error"
    wrapped: bool = False
    read: int = 0
    long: int = 0  # longer than the limit
    unlearnable: int = 0  # dropped, as no learned token is left
    split_images: int = 0  # dropped, as images would have been truncated
    alike: int = 0  # pairs whose two rows are the same, truncated or not
    blank_pieces: int = 0  # of rows that were split: dropped, as no learned token is in them
    lengths: list[int] | None = None  # tokens of each example, before any is truncated, where they are kept

    def __post_init__(self):
        if self.overlong not in OVERLONG:
            raise ConfigError(f"data.overlong is {self.overlong!r}; here it is one of {', '.join(OVERLONG)}")

    @property
    def kind(self) -> str:
        """The kind of the rows: prompts, completions, pairs, ..., as of the tokenizer within."""
        return self.row_tokenizer.kind

    @property
    def fate(self) -> str:
        """The fate of rows over the limit, in the word for reports: dropped, split or truncated."""
        return {"filter": "dropped", SPLIT: "split"}.get(self.overlong, "truncated")

    def __call__(self, example: Mapping[str, Any]) -> Row | None:
        """The token row of the next example, or None when it is dropped."""
        return self.apply_limit(self.token_row(example))

    def token_row(self, example: Mapping[str, Any]) -> Row | None:
        """The token row of an example, of any length; it counts nothing, so threads may share this.

        None for a text so long that tokenising it, which may take minutes, can give nothing but a row over the limit.
        Raises ConfigError as RowTokenizer.
        """
        hopeless = self.overlong in ("error", "filter") and self._is_hopeless(example)
        return None if hopeless else self.row_tokenizer(example)

    def _is_hopeless(self, example: Mapping[str, Any]) -> bool:
        """True when the text of the example has more letters than `limit` tokens can hold, however it is read.

        White space is not counted, as some tokenizers join it, and the longest token is taken four times as long, as
        some normalise letters.
        """
        columns = {"prompts": ("prompt",), "steps": ("prompt", "completions")}.get(self.kind, TEXTS)
        if self.limit is None or (size := sum(_size(example.get(name)) for name in columns)) < HOPELESS:
            return False
        return size > 4 * self._longest * self.limit

    @functools.cached_property
    def _longest(self) -> int:
        """Letters of the longest token."""
        return max(map(len, self.row_tokenizer.tokenizer.get_vocab()), default=1)

    def apply_limit(self, row: Row | None) -> Row | None:
        """The row of the next example (None: hopelessly long) under the length rule, or None when that drops it.

        Raises ConfigError for a row over the limit where `overlong` is "error".
        """
        self.read += 1
        prompts = self.kind == "prompts"
        noun, key = ("prompt", "rollout.max_prompt_length") if prompts else ("row", "data.max_length")
        if row is None:
            if self.overlong == "error":
                raise ConfigError(
                    f"the {noun} has many times more text than {key}={self.limit} tokens hold; drop it, or set "
                    "data.overlong to filter"
                )
            self.long += 1
            return None
        ids, masks = COLUMNS[self.kind]
        longest = max(len(row[name]) for name in ids)
        if self.lengths is not None:
            self.lengths.append(longest)
        if self.limit is not None and longest > self.limit:
            splits = self.overlong == SPLIT and self.kind == "completions"
            if splits and PIXELS in row:
                raise ConfigError(
                    f"the row has {longest} tokens, more than {key}={self.limit}, and images, which are in one piece: "
                    f"raise that or set data.overlong to filter, {', '.join(TRUNCATE)}"
                )
            if self.overlong in ("error", SPLIT) and not splits:
                raise ConfigError(
                    f"the {noun} has {longest} tokens, more than {key}={self.limit}; raise that or set data.overlong "
                    f"to filter, {', '.join(TRUNCATE)}"
                )
            self.long += 1
            if self.overlong == "filter":
                return None
            truncate = TRUNCATE.get(self.overlong)
            shorter = {
                name: truncate(row[name], self.limit) if truncate and len(row[name]) > self.limit else row[name]
                for name in (*ids, *masks, *({STEP_LABELS} & row.keys()))
            }
            if isinstance(tiles := row.get(PIXELS), Tiles):
                special = tiles.processor.special_ids
                if any(_count(special, shorter[name]) != _count(special, row[name]) for name in ids):
                    self.split_images += 1
                    return None
            if self.kind == "labels" and self.overlong == "truncate_right":
                kept = slice(self.limit, 2 * self.limit)  # more of it is in no row of `limit` tokens
                row |= {rest: row[name][kept] for rest, name in zip(REST, ("ids", "mask"), strict=True)}
            row |= shorter | {name: without_first(shorter[name]) for name in masks}
        if not all(any(row[name]) for name in masks):
            self.unlearnable += 1
            return None
        self.alike += self.kind in ANSWERS and row["chosen_ids"] == row["rejected_ids"]
        return row

    def report(self, kept: int) -> None:
        """Logs what was truncated and dropped of the rows read; raises ConfigError when nothing was kept."""
        noun = "a prompt of " if self.kind == "prompts" else ""
        overlong = f"{noun}more than {amount(self.limit or 0, 'token')}"
        if not kept:
            reasons = [f"{self.long} had {overlong}"] if self.long else []
            if self.split_images:
                reasons.append(f"{self.split_images} of these would have been truncated inside their images")
            if self.unlearnable:
                reasons.append(
                    f"{self.unlearnable} have no token to learn, as no "
                    f"{'step ends' if self.kind == 'steps' else 'turn of the assistant is left'} in them"
                )
            if self.blank_pieces:
                reasons.append(f"{self.blank_pieces} pieces of them have no token to learn")
            words = "; ".join(reasons) or "there is none"
            raise ConfigError(f"no row is left to train on ({words}); check the data and the length limit")
        if self.unlearnable:
            log.warning("dropped %s in which no token is learned, of %d", amount(self.unlearnable, "row"), self.read)
        if self.split_images:
            log.warning(
                "dropped %s with %s, as images are not truncated, of %d",
                amount(self.split_images, "row"),
                overlong,
                self.read,
            )
        if self.long > self.split_images:
            rows = amount(self.long - self.split_images, "row")
            log.warning("%s %s with %s, of %d", self.fate, rows, overlong, self.read)
        if self.blank_pieces:
            log.warning("dropped %s of these, in which no token is learned", amount(self.blank_pieces, "piece"))
        if self.alike:
            log.warning(
                "the chosen and the rejected tokens are the same in %s of %d: nothing is preferred there",
                amount(self.alike, "pair"),
                self.read,
            )

    def split(self, rows: Iterable[Row]) -> list[Row]:
        """The rows, of which those over the limit are several where they are to be split."""
        limit = self.limit
        if self.overlong != SPLIT or self.kind != "completions" or limit is None:
            return list(rows)
        made = []
        for row in rows:
            parts = pieces(row, limit) if len(row["ids"]) > limit else [row]
            # What a piece begins with is not learned, for nothing before it is seen.
            kept = parts if self.wrapped or len(parts) == 1 else [part for part in parts if any(part["mask"][1:])]
            self.blank_pieces += len(parts) - len(kept)
            made += kept
        return made


def pieces(row: Row, limit: int) -> list[Row]:
    """A row of completions in rows of at most `limit` tokens, one after the other; nothing is lost.

    The first token of a piece keeps its mask: where the piece before it is not to be seen, it is not learned.
    """
    return [
        {name: row[name][start : start + limit] for name in ("ids", "mask")}
        for start in range(0, len(row["ids"]), limit)
    ]


def _count(special: frozenset[int], ids: Ids) -> int:
    return sum(token in special for token in ids)


def _size(text: Any) -> int:
    """Letters of a text, or of the contents of messages, white space left out."""
    if isinstance(text, str):
        return len(text) if len(text) < HOPELESS else len("".join(text.split()))
    if isinstance(text, Mapping):
        return _size(text.get("content"))
    return sum(map(_size, text)) if isinstance(text, list | tuple) else 0
