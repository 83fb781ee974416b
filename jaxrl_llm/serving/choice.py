"""One completion on its way out: tokens come in, text, log-probs and calls go out, up to a stop string."""

import dataclasses
import functools
import json
import uuid
from typing import Any

from jaxrl_llm.environments.protocol import encodable
from jaxrl_llm.environments.tools import PYTHON_TAG, parse_tool_calls
from jaxrl_llm.models.logprobs import Likeliest
from jaxrl_llm.serving.bodies import Asked
from jaxrl_llm.serving.queue import Handle, Tokens

CALL = "<tool_call>"
REPLACEMENT = "\ufffd"  # what decoders write for a character whose bytes have not all come


@dataclasses.dataclass
class Piece:
    """The part of a choice that is new since the last one."""

    text: str
    ids: list[int]
    logps: list[float]
    top: list[tuple[list[int], list[float]]]
    start: int  # the place in the text at which that of the first token begins


class Choice:
    """A completion as it grows; `add` takes tokens until `finish_reason` is known.

    Text is given out once it is certain: characters whose bytes are all there, no beginning of a stop string and, where
    tools are offered, no beginning of a call.
    """

    def __init__(self, index: int, asked: Asked, tokenizer: Any, prompt: list[int]):
        self.index, self.asked, self.tokenizer, self.prompt = index, asked, tokenizer, prompt
        self.handle: Handle | None = None
        self.ids: list[int] = []
        self.logps: list[float] = []
        self.top: list[tuple[list[int], list[float]]] = []
        self.starts: list[int] = []  # where the text of each token begins
        self.text = ""
        self.given = 0  # characters of the text that were given out
        self.finish_reason: str | None = None
        self.calls: list[dict[str, Any]] = []
        self.call_ids = uuid.uuid4().hex[:16]  # how the ids of its calls begin
        self._decoded = self._read = 0  # tokens whose text is settled; those that are in the text

    def add(self, tokens: Tokens) -> Piece:
        """Takes tokens; the piece that can be given out now. Tokens behind a stop string are left out."""
        first = len(self.ids)
        ended_by_id = tokens.finish_reason == "stop" and not self.asked.include_stop
        last = len(tokens.ids) - 1
        # Token by token only where a stop string must not be missed, or each token's place in the text is told; of an
        # answer that is given as a whole, at the end.
        each = self.asked.stop or not (self.asked.chat or self.asked.logprobs is None)
        top = list(zip(tokens.top_ids, tokens.top_logps, strict=True)) or [([], [])] * len(tokens.ids)
        for number, (index, logp) in enumerate(zip(tokens.ids, tokens.logps, strict=True)):
            self.ids.append(index)
            self.logps.append(logp)
            self.top.append(top[number])
            self.starts.append(len(self.text))
            if ended_by_id and number == last:
                break  # the text of an id that ends the row is not shown
            if (each or (number == last and self.asked.stream)) and self._extend(final=False):
                self.finish_reason = "stop"
                break
        if self.finish_reason is None and tokens.finish_reason is not None:
            stopped = self._extend(final=True, count=len(self.ids) - (1 if ended_by_id else 0))
            self.finish_reason = "stop" if stopped else tokens.finish_reason
        if self.finish_reason is not None and self.asked.tools:
            self._find_calls()
        end = self._certain()
        text, self.given = self.text[self.given : end], max(self.given, end)
        new = slice(first, None)
        start = self.starts[first] if first < len(self.starts) else len(self.text)
        return Piece(text, self.ids[new], self.logps[new], self.top[new], start)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=self.asked.skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def _extend(self, final: bool, count: int | None = None) -> bool:
        """Adds the text of new tokens, as far as it is settled; True when that brought a stop string."""
        ids = self.ids[:count]
        before = len(self.text)
        # Tokens are decoded behind the ones before them, on which spaces and half characters depend.
        known = self._decode(ids[self._decoded : self._read])
        text = self._decode(ids[self._decoded :])
        if final or not text.endswith(REPLACEMENT):
            self.text += text[len(known) :]
            self._decoded, self._read = self._read, len(ids)
        stops = self.asked.stop if len(ids) >= self.asked.sampling.min_tokens else ()
        found = [(self.text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in stops]
        # The first to be complete, however the text is cut into tokens; of those that end alike the longest.
        end, at = min(((at + len(stop), at) for at, stop in found if at >= 0), default=(None, None))
        self.text = self.text[: end if self.asked.include_stop else at]
        return end is not None

    def _certain(self) -> int:
        """The characters that can be given out."""
        if self.calls:
            return max(self.given, self.text.find(CALL) if CALL in self.text else 0)
        if self.finish_reason is not None:
            return len(self.text)
        end = len(self.text)
        if self.asked.tools and (self.text.lstrip().startswith(("{", "[")) or CALL in self.text):
            return max(self.given, self.text.find(CALL))
        for word in (*self.asked.stop, *([CALL] if self.asked.tools else [])):
            for length in range(min(len(word) - 1, len(self.text)), 0, -1):
                if self.text.endswith(word[:length]):
                    end = min(end, len(self.text) - length)
                    break
        return max(self.given, end)

    def _find_calls(self) -> None:
        """The calls in a turn that has ended; a turn with a malformed one is text, as it is.

        So is one without the tags of a call that names a tool which is not offered; with them it is a call, as the
        client may tell the model that there is no such tool.
        """
        raw = self.tokenizer.decode(self.ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        calls, is_tagged = parse_tool_calls(raw), CALL in raw or PYTHON_TAG in raw
        if any(call.error is not None or not (is_tagged or call.name in self.asked.tools) for call in calls):
            return
        self.calls = [
            {
                "id": f"call_{self.call_ids}{number:08x}",
                "type": "function",
                "function": {"name": call.name, "arguments": encodable(json.dumps(call.arguments, ensure_ascii=False))},
            }
            for number, call in enumerate(calls)
        ]
        if self.calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"

    def logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """The log-probs of a piece, in the form of a chat or of a text completion; None where none were asked for.

        They are full-vocabulary at the temperature of the request (greedy: 1), whatever is filtered: a trainer's.
        """
        if self.asked.logprobs is None:
            return None
        names = [self._name(index) for index in piece.ids]
        top = [[(self._name(index), logp) for index, logp in zip(ids, logps, strict=True)] for ids, logps in piece.top]
        if not self.asked.chat:
            return {
                "tokens": names,
                "token_logprobs": piece.logps,
                "top_logprobs": [
                    {**dict(likeliest), name: logp}
                    for name, logp, likeliest in zip(names, piece.logps, top, strict=True)
                ],
                "text_offset": self.starts[len(self.ids) - len(piece.ids) :],
            }
        return {
            "content": [
                {**_entry(name, logp), "top_logprobs": [_entry(*pair) for pair in likeliest]}
                for name, logp, likeliest in zip(names, piece.logps, top, strict=True)
            ],
            "refusal": None,
        }

    def echoed(self) -> tuple[str, dict[str, Any] | None]:
        """The prompt's text, and its log-probs in the form of a text completion; the first token has none."""
        text = self.tokenizer.decode(self.prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        scores, count = self._scores(), self.asked.logprobs
        if scores is None or count is None:
            return text, None
        names, starts = [self._name(index) for index in self.prompt], []
        for number in range(len(self.prompt)):
            starts.append(min(len(text), (starts[-1] + len(names[number - 1])) if number else 0))
        logps, top = scores.logps.tolist(), self._top_of(scores, count)
        places = [
            {**{self._name(index): logp for index, logp in likeliest}, name: logp}
            for name, logp, likeliest in zip(names, logps, top, strict=True)
        ]
        return text, {
            "tokens": names,
            "token_logprobs": [None, *logps[1:]],
            "top_logprobs": [None, *places[1:]],
            "text_offset": starts,
        }

    def prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        """The likeliest tokens at each place of the prompt as vLLM tells them, the token itself among them."""
        scores, count = self._scores(), self.asked.prompt_logprobs
        if scores is None or count is None:
            return None
        found: list[dict[str, Any] | None] = [None]
        places = zip(self.prompt, scores.logps.tolist(), scores.rank.tolist(), self._top_of(scores, count), strict=True)
        for index, logp, rank, likeliest in list(places)[1:]:
            ranked = [(*pair, 1 + number) for number, pair in enumerate(likeliest)]
            told = {str(each): {"logprob": value, "rank": place} for each, value, place in ranked}
            told |= {str(index): {"logprob": logp, "rank": rank}}
            found.append({each: {**entry, "decoded_token": self._name(int(each))} for each, entry in told.items()})
        return found

    def _scores(self) -> Likeliest | None:
        return None if self.handle is None else self.handle.scores

    @staticmethod
    def _top_of(scores: Likeliest, count: int) -> list[list[tuple[int, float]]]:
        """Ids and log-probs of the `count` likeliest at each place."""
        ids, logps = scores.top_ids[:, :count].tolist(), scores.top_logps[:, :count].tolist()
        return [list(zip(*place, strict=True)) for place in zip(ids, logps, strict=True)]

    def _name(self, index: int) -> str:
        return f"token_id:{index}" if self.asked.tokens_as_ids else _decoded(self.tokenizer, index)


@functools.lru_cache(2**18)
def _decoded(tokenizer: Any, index: int) -> str:
    return tokenizer.decode([index])


def _entry(name: str, logp: float) -> dict[str, Any]:
    return {"token": name, "logprob": logp, "bytes": None if REPLACEMENT in name else list(name.encode())}
