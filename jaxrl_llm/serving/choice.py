"""One completion on its way out: tokens come in, text, log-probs and calls go out, up to a stop string."""

import bisect
import dataclasses
import functools
import json
import uuid
from typing import Any

from jaxrl_llm.data.detokenize import REPLACEMENT, Detokenizer
from jaxrl_llm.environments.protocol import encodable
from jaxrl_llm.environments.tool_calls import CallStart, turn_calls
from jaxrl_llm.models.logprobs import Likeliest
from jaxrl_llm.serving.bodies import Asked
from jaxrl_llm.serving.handles import Handle, Tokens
from jaxrl_llm.serving.thoughts import Thoughts, certain_length

OPENING = 32  # tokens of a prompt in whose end thoughts may be opened


@dataclasses.dataclass
class Piece:
    """The part of a choice that is new since the last piece: its text, and its tokens with their log-probs."""

    text: str
    ids: list[int]
    logps: list[float]
    top: list[tuple[list[int], list[float]]]
    thought: str = ""  # of the thoughts, where they are told apart


class Choice:
    """A completion as it grows; `add` takes tokens until `finish_reason` is known.

    Text is given out once it is certain: characters whose bytes are all there, no beginning of a stop string and, where
    tools are offered, no beginning of a call. Thoughts that are told apart are no part of it.
    """

    def __init__(self, index: int, asked: Asked, tokenizer: Any, prompt: list[int]):
        self.index, self.asked, self.tokenizer, self.prompt = index, asked, tokenizer, prompt
        self.handle: Handle | None = None
        self.ids: list[int] = []
        self.logps: list[float] = []
        self.top: list[tuple[list[int], list[float]]] = []
        self.starts: list[int] = []  # where the text of each token begins
        self.text = ""
        self.left_out = ""  # what was sampled behind it: from a stop string on, or the id that ended it
        self.given = 0  # characters of the text that were given out
        self.finish_reason: str | None = None
        self.calls: list[dict[str, Any]] = []
        self.call_ids = uuid.uuid4().hex[:16]  # how the ids of its calls begin
        self._detokenizer = self._new_detokenizer(asked.skip_special_tokens)
        self._read = 0  # tokens that the detokenizer has
        self._raw, self._raw_read = "", 0  # the text with special tokens, and the tokens in it: of streams with tools
        self._raw_detokenizer = self._new_detokenizer(skip_special_tokens=False)
        self._call_start = CallStart()
        self._raw_call_at = self._call_at = 0  # where its calls begin, in the raw text and in the text
        self.thought, self.thought_tokens = "", 0  # of the thoughts, and of the marks around them
        self._thoughts: Thoughts | None = None
        if asked.apart:
            end = Detokenizer(tokenizer, skip_special_tokens=False).add(prompt[-OPENING:], final=True)
            self._thoughts = Thoughts(end)

    def add(self, tokens: Tokens) -> Piece:
        """Takes tokens; the piece that can be given out now. Tokens behind a stop string are left out."""
        if not self.asked.limits[self.index // self.asked.n]:  # a row samples one: that of a prompt which is scored
            self.finish_reason = "length"
            return Piece("", [], [], [])
        first = len(self.ids)
        ended_by_id = tokens.finish_reason == "stop" and not self.asked.include_stop
        last = len(tokens.ids) - 1
        # Token by token only where a stop string must not be missed, or each token's place in the text is told; of an
        # answer that is given as a whole, at the end.
        each = self.asked.stop or not (self.asked.chat or self.asked.logprobs is None)
        each = each or (self._thoughts is not None and not self._thoughts.over)
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
            self.left_out += self._detokenizer.add(self.ids[self._read :], final=True)
        if self.finish_reason is not None and self.asked.tools:
            self._find_calls()
        elif self.asked.stream and self.asked.tools:
            self._raw += self._raw_detokenizer.add(self.ids[self._raw_read :], final=False)
            self._raw_read = len(self.ids)
        end = self._certain()
        text, self.given = self.text[self.given : end], max(self.given, end)
        before, self.thought = self.thought, self._certain_thought()
        new = slice(first, None)
        return Piece(text, self.ids[new], self.logps[new], self.top[new], self.thought.removeprefix(before))

    def _new_detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        return Detokenizer(self.tokenizer, self.prompt if self.asked.continues else (), skip_special_tokens)

    def _extend(self, final: bool, count: int | None = None) -> bool:
        """Adds the text of new tokens, as far as it is settled; True when that brought a stop string."""
        before = len(self.text)
        if self._thoughts is not None and not self._thoughts.over:
            self._think(self._thoughts, len(self.ids) if count is None else count, final)
            if not self._thoughts.over:
                return False
        new = self.ids[self._read : count]
        text = self._detokenizer.add(new, final)
        if self._thoughts is not None and self._thoughts.behind is not None and not self.text:
            text = text.lstrip()  # between thoughts and text
        self.text += text
        self._read += len(new)
        stops = self.asked.stop if self._read >= self.asked.sampling.min_tokens else ()
        found = [(self.text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in stops]
        # The first to be complete, however the text is cut into tokens; of those that end alike the longest.
        end, at = min(((at + len(stop), at) for at, stop in found if at >= 0), default=(None, None))
        kept = end if self.asked.include_stop else at
        if kept is not None:
            self.left_out = self.text[kept:] + self._detokenizer.add((), final=True)
            self.text = self.text[:kept]
        return kept is not None

    def _think(self, thoughts: Thoughts, count: int, final: bool) -> None:
        """Reads further of the first `count` tokens up to the end of the thoughts, behind which the text begins."""
        for read in range(self._raw_read + 1, count + 1):
            self._raw += self._raw_detokenizer.add([self.ids[read - 1]], final=False)
            self._raw_read, behind = read, thoughts.behind
            thoughts.find(self._raw)
            if thoughts.behind != behind:
                self._read = self.thought_tokens = read
                self.text = self._raw[thoughts.behind :].lstrip()
                self._detokenizer = Detokenizer(self.tokenizer, self.ids[:read], self.asked.skip_special_tokens)
            if thoughts.over:
                return
        if final:  # what has not closed is all thoughts, and what may have become a mark is text
            thoughts.over = True
            self._raw += self._raw_detokenizer.add((), final=True)
            if thoughts.start is not None:
                self._read = self.thought_tokens = count

    def _certain_thought(self) -> str:
        """The thoughts that can be given out, without the space around them."""
        thoughts = self._thoughts
        if thoughts is None or thoughts.start is None:
            return ""
        end = thoughts.end
        if end is None and self.finish_reason is not None:
            end = self._raw_call_at if self.calls else len(self._raw)
        elif end is None:
            end = thoughts.certain(self._raw)
            if self.asked.tools:  # a call may come without their end
                end = min(end, self._call_start.of(self._raw))
        return self._raw[thoughts.start : end].strip()

    def _certain(self) -> int:
        """The characters that can be given out."""
        if self.finish_reason is not None:
            return max(self.given, self._call_at) if self.calls else len(self.text)
        end = len(self.text)
        if self.asked.tools and not self.asked.stream:
            return 0
        if self.asked.tools:
            held = self._raw[self._call_start.of(self._raw) :]
            # A special token is not in the text: what stands before it, in the same tokens, comes with the end.
            end = end - len(held) if self.text.endswith(held) else self.given
        return max(self.given, min(end, certain_length(self.text, self.asked.stop)))

    def _find_calls(self) -> None:
        """The calls in a turn that has ended; a turn with a malformed one is text, as it is.

        So is one without the marks of a call that names a tool which is not offered; with them it is a call, as the
        client may tell the model that there is no such tool.
        """

        def text_of(count: int, skip_special_tokens: bool = False) -> str:
            return self._new_detokenizer(skip_special_tokens).add(self.ids[:count], final=True)

        found = turn_calls(text_of(len(self.ids)), self.asked.tools)
        names = {tool["function"]["name"] for tool in self.asked.tools}
        if any(call.error is not None or not (found.marked or call.name in names) for call in found.calls):
            return
        if found.calls:
            counts = range(len(self.ids) + 1)
            before = bisect.bisect(counts, found.start, key=lambda count: len(text_of(count))) - 1
            within = found.start - len(text_of(before))  # of a token that has the mark's beginning
            at = len(text_of(before, self.asked.skip_special_tokens)) + within
            if self._thoughts is not None and self._thoughts.start is not None:  # they are no part of the text
                at -= len(text_of(len(self.ids), self.asked.skip_special_tokens)) - len(self.text + self.left_out)
            self._raw_call_at, self._call_at = found.start, max(0, min(at, len(self.text)))
        own = [encodable(call.id) for call in found.calls if call.id is not None]
        # Where the model gives ids, its template shows them with results. A client tells calls apart by them.
        if len(set(own)) < len(found.calls):
            own = [f"call_{self.call_ids}{number:08x}" for number in range(len(found.calls))]
        self.calls = [
            {
                "id": identity,
                "type": "function",
                "function": {"name": call.name, "arguments": encodable(json.dumps(call.arguments, ensure_ascii=False))},
            }
            for identity, call in zip(own, found.calls, strict=True)
        ]
        if self.calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"

    @property
    def shown_calls(self) -> list[dict[str, Any]]:
        """The calls that the answer gives: the first one where `parallel_tool_calls` is false."""
        return self.calls if self.asked.parallel_calls else self.calls[:1]

    def whole_piece(self) -> Piece:
        """The whole completion so far, as one piece."""
        return Piece(self.text, self.ids, self.logps, self.top)

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
        text = self.asked.texts[self.index // self.asked.n]
        if text is None:  # token ids
            text = Detokenizer(self.tokenizer, skip_special_tokens=False).add(self.prompt, final=True)
        scores, count = self._scores(), self.asked.logprobs
        if scores is None or count is None:
            return text, None
        names, ends = [self._name(index) for index in self.prompt], [0]
        detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=False)
        for number, index in enumerate(self.prompt, 1):
            ends.append(ends[-1] + len(detokenizer.add([index], final=number == len(self.prompt))))
        # The tokens have a beginning of their own before the text, which is at its place 0.
        starts = [min(max(end - ends[-1] + len(text), 0), len(text)) for end in ends[:-1]]
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
    """The text of a token within a text, where it has the space that it brings."""
    alone, twice = (tokenizer.decode([index] * count, clean_up_tokenization_spaces=False) for count in (1, 2))
    return alone if REPLACEMENT in alone else twice[len(alone) :]


def _entry(name: str, logp: float) -> dict[str, Any]:
    return {"token": name, "logprob": logp, "bytes": None if REPLACEMENT in name else list(name.encode())}
