"""A teacher with another tokenizer: the policy's rows in its tokens, and the spans of text that both tokenizers end.

The text of a completion is tokenised for the teacher behind the teacher's own rendering of the prompt. Where a token of
both ends at the same place of the text, each has a distribution of the next tokens of a span: that of its last token
there, times the probability of those before it (ULD, arXiv 2402.12030; GOLD of TRL).
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.algorithms.distillation import prefix_logps
from jaxrl_llm.config import ConfigError
from jaxrl_llm.data import Row
from jaxrl_llm.data.collate import pad_prompts
from jaxrl_llm.data.templates import (
    chat_ids,
    continued_ids,
    is_conversational,
    render_chat,
    render_prompt,
    template_options,
)
from jaxrl_llm.data.token_spans import NOWHERE, span_ends, span_of_each, token_places
from jaxrl_llm.data.tokenize import PIXELS
from jaxrl_llm.distributed.processes import all_or_none, gather
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.distributed.sharding import constrain_rows, local_rows, rows_to_global
from jaxrl_llm.models.chunked_softmax import chunked_logps
from jaxrl_llm.models.model import Model
from jaxrl_llm.rollout.constraints import token_bytes
from jaxrl_llm.training.packing.planner import Packer
from jaxrl_llm.training.rollouts.experience import Rollouts
from jaxrl_llm.training.teachers.teacher import Teacher

END = "the end of a completion"  # as which the tokens that end one are the same in both vocabularies
Ends = tuple[int | None, int | None]  # the tokens of the policy and of the teacher that end a completion


@dataclasses.dataclass(frozen=True)
class CrossTokenizerSpec:
    """Settings of a teacher with another tokenizer, from `teacher`."""

    align: str  # spans that end at the same place of the text, or positions: the i-th token of both
    learn_end: bool  # the tokens that end a completion are a span
    hybrid: bool  # tokens of both vocabularies are compared with each other
    temperature: float  # of the teacher's distributions
    template_kwargs: Mapping[str, Any]  # data.chat_template_kwargs


class SpanRows(NamedTuple):
    """The rows as the teacher reads them, and where the spans of text end: the counterpart of `ContextRows`."""

    inputs: Inputs  # [N,S] of the teacher's tokens
    ends: jax.Array  # [N,T] the column of the last token of each token's span; -1: in none
    teacher_ends: jax.Array  # [N,S] that column, of the teacher's tokens before the last one of a span; else -1
    teacher_last: jax.Array  # [N,T] the teacher's column of the last token of a span, at that of the policy
    metrics: dict[str, jax.Array]
    temperature: float
    softcap: float | None
    matches: np.ndarray | None  # [V]
    taught: None = None  # all rows are
    asked: None = None  # nothing but the prompts

    def aligned(self, batch: Batch) -> Batch:
        """The batch with its teacher's distributions `[N,S,...]` at the policy's tokens that end a span."""
        hidden, prefix = at_ends(
            batch.teacher_hidden, batch.scalars.teacher_head, self.inputs.tokens, self.teacher_ends, self.teacher_last,
            self.inputs.prompt_width, self.temperature, self.softcap,
        )  # fmt: skip
        scalars = dataclasses.replace(batch.scalars, teacher_matches=self.matches)
        return batch.replace(
            teacher_hidden=hidden, teacher_prefix_logps=prefix, teacher_ends=self.ends, scalars=scalars
        )


@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def at_ends(
    hidden, head, tokens, ends, last, first: int, temperature: float, softcap: float | None
) -> tuple[jax.Array, jax.Array]:
    """The hidden states `[N,T,D]` that a teacher's head reads at the last token of each span, and the `prefix_logps`
    `[N,T]` of spans.

    hidden `[N,S,D]`, head `[D,W]` and tokens `[N,S]` are the teacher's, whose completions begin at column `first`;
    ends `[N,S]` and last `[N,T]` are those of `SpanRows`.
    """
    logps, *_ = chunked_logps(hidden[:, first:], head, tokens[:, first:], temperature, softcap=softcap)
    prefix = prefix_logps(logps, ends[:, first:], last.shape[1])
    moved = jnp.take_along_axis(hidden, last[..., None], axis=1)
    return constrain_rows(moved), constrain_rows(prefix)


def _closing_token(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> int | None:
    """The token that ends an assistant's turn: the first special one that the chat template writes behind its content.

    Without such it is the end of text: Gemma's turns end with <end_of_turn>, and its texts with <eos>.
    """
    answer = "an answer"
    messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
    special = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    special |= set(tokenizer.all_special_ids)
    try:
        _, found, closing = render_chat(tokenizer, messages, False, None, template_kwargs).rpartition(answer)
        behind = chat_ids(tokenizer, closing) if found else []
    except ConfigError:  # no template, or one for other messages
        behind = []
    return next((token for token in behind if token in special), tokenizer.eos_token_id)


def _named_tokens(tokenizer: Any, size: int, texts: Sequence[bytes | None], end: int | None) -> dict[str | bytes, int]:
    """The tokens of a vocabulary by what they are in any: their bytes where these are known, else their piece, or END.

    Of several the first is taken; but <0x41>, a byte of what has no token, only where no other token writes that byte.
    """
    named: dict[str | bytes, int] = {}
    entries = ((bool(re.fullmatch(r"<0x\w\w>", piece)), token, piece) for piece, token in tokenizer.get_vocab().items())
    for _, token, piece in sorted(entries):
        if token < size:
            text = texts[token] if texts else None
            name = END if token == end else piece if text is None else text
            named.setdefault(name, token)
    return named


@dataclasses.dataclass(frozen=True)
class CrossTokenizer:
    """The rows of a teacher with another tokenizer: its own prompts, and behind them the text of the completions."""

    spec: CrossTokenizerSpec
    tokenizers: tuple[Any, Any]  # of the policy and of the teacher, as all pairs here
    texts: tuple[list[bytes | None], list[bytes | None]]  # of each token; unused where positions are aligned
    eos: tuple[int, ...]  # of the policy
    ends: tuple[Ends, Ends]  # of texts, and of the turns of chats
    matches: Mapping[Ends, np.ndarray]  # [V] by ends: the teacher's id of each token, -1: none; empty: not compared
    softcap: float | None  # of the teacher's logits
    mesh: Mesh
    width: int  # tokens of the teacher's longest prompt
    longest: int  # and of its longest completion
    pack: Packer  # of the teacher's rows

    @classmethod
    def of(
        cls, spec: CrossTokenizerSpec, policy: Model, teacher: Teacher, eos: tuple[int, ...], width: int, longest: int,
        pack: Packer,
    ) -> "CrossTokenizer":  # fmt: skip
        """The two tokenizers of a policy and a teacher.

        Raises ConfigError for tokenizers that do not tell the bytes of their tokens, where spans are aligned, and for a
        teacher without an end-of-text token, where ends are learned.
        """
        models = policy, teacher
        tokenizers = policy.tokenizer, teacher.tokenizer
        if spec.learn_end and tokenizers[1].eos_token_id is None:
            raise ConfigError(
                "teacher.uld_skip_eos is false, but the teacher has no end-of-text token that could be compared with "
                "the policy's: set it to true, or eos_token in the teacher's tokenizer_config.json"
            )
        texts: Any = ([], [])
        if spec.align == "spans":
            reads = "teacher.uld_align = spans needs", "set it to positions"
            texts = tuple(token_bytes(model.tokenizer, model.net.config.vocab_size, *reads) for model in models)
        closing = (_closing_token(x, spec.template_kwargs) for x in tokenizers)
        ends: Any = tuple(x.eos_token_id for x in tokenizers), tuple(closing)
        matches: dict[Ends, np.ndarray] = {}
        for pair in set(ends) if spec.hybrid else ():
            sizes = (model.net.config.vocab_size for model in models)
            own, other = map(_named_tokens, tokenizers, sizes, texts, pair if spec.learn_end else (None, None))
            matches[pair] = np.full(policy.net.config.vocab_size, NOWHERE, np.int32)
            for name, token in own.items():
                matches[pair][token] = other.get(name, NOWHERE)
        softcap = teacher.net.config.logit_softcap
        return cls(spec, tokenizers, texts, eos, ends, matches, softcap, teacher.mesh, width, longest, pack)

    def read(self, rollouts: Rollouts, scores: np.ndarray) -> SpanRows:
        """The teacher's rows of the rollouts; the scores of these are not read."""
        del scores
        rollout, examples = rollouts.rollout, rollouts.examples
        group_size = len(rollouts.prompts) // len(examples)
        return self.rows([example for example in examples for _ in range(group_size)], rollout.tokens, rollout.mask)

    def rows(self, examples: Sequence[Row], tokens: jax.Array, mask: jax.Array) -> SpanRows:
        """The teacher's rows of rows `[N,T]` whose completions are in the mask, with the examples of this process's.

        A row whose prompt has more than `width` tokens has no spans; of a completion with more than `longest` those in
        the first of them are kept. Raises ConfigError for a prompt that the teacher's chat template refuses.
        """
        own_tokens, own_mask = local_rows((tokens, mask))
        shape, width = own_mask.shape, self.width
        ends, last = np.full(shape, NOWHERE, np.int32), np.zeros(shape, np.int32)
        teacher_ends = np.full((shape[0], width + self.longest), NOWHERE, np.int32)
        completions, segments = np.zeros((2, shape[0], self.longest), np.int32)
        prompts: list[list[int]] = []
        long = np.zeros(shape[0], np.float32)
        with all_or_none():
            for row, example in enumerate(examples):
                if not row or example is not examples[row - 1]:  # rows of a prompt are adjacent
                    options = template_options(example, self.spec.template_kwargs)
                    try:
                        prompt = render_prompt(self.tokenizers[1], example["prompt"], **options)
                    except ConfigError as error:  # which speaks of a tokenizer: not of the policy's
                        raise ConfigError(f"the teacher (teacher.path) cannot read a prompt: {error}") from error
                if PIXELS in example:
                    raise ConfigError(
                        "rows have images, but a teacher with another tokenizer (teacher.form = uld) reads text alone: "
                        "give rows without images, or a teacher with the policy's tokenizer"
                    )
                columns = np.flatnonzero(own_mask[row])
                chat = is_conversational(example["prompt"])
                theirs, spans, own, other = self._spans(prompt, own_tokens[row], columns, chat)
                long[row] = len(prompt) > width or len(theirs) > self.longest
                prompts.append([] if len(prompt) > width else prompt)
                if len(prompt) > width:
                    continue
                theirs, other, kept = theirs[: self.longest], other[: self.longest], (spans[:, 1] < self.longest).sum()
                completions[row, : len(theirs)], segments[row, : len(theirs)] = theirs, 1
                at = np.append(columns[spans[:kept, 0]], np.full(len(spans) - kept + 1, NOWHERE))  # -1 is the last
                ends[row, columns] = at[own]
                before = np.where(np.isin(np.arange(len(theirs)), spans[:, 1]), NOWHERE, at[other])
                teacher_ends[row, width : width + len(theirs)] = before
                last[row, at[:kept]] = width + spans[:kept, 1]
            read, known = pad_prompts(prompts, width)
        mask_of_theirs = np.concatenate([np.zeros_like(known), segments], axis=1).astype(np.float32)
        read, known = np.concatenate([read, completions], axis=1), np.concatenate([known, segments], axis=1)
        RowGroup.of(self.mesh).check_same(read, ends)
        arrays = rows_to_global((read, known, mask_of_theirs, ends, teacher_ends, last, long), self.mesh)
        inputs = Inputs(*arrays[:2], layout=self.pack.passing(*arrays[:3]), prompt_width=width)
        metrics = {"teacher/aligned": (arrays[3] >= 0).sum() / mask.sum(), "teacher/too_long": arrays[6].mean()}
        matches = next(iter(self.matches.values()), None)
        if len(self.matches) > 1:  # all processes take those of chats where one of them has some
            chats = any(is_conversational(example["prompt"]) for example in examples)
            matches = self.matches[self.ends[max(gather(int(chats)))]]
        return SpanRows(
            inputs, *arrays[3:6],
            metrics=metrics, temperature=self.spec.temperature, softcap=self.softcap, matches=matches,
        )  # fmt: skip

    def _spans(
        self, prompt: list[int], tokens: np.ndarray, columns: np.ndarray, chat: bool
    ) -> tuple[list[int], np.ndarray, np.ndarray, np.ndarray]:
        """The teacher's tokens of a completion behind its prompt, the last tokens `[spans,2]` of spans in either
        tokenization, and the span that each token of the policy and of the teacher is in.

        The completion is that of a row's tokens `[T]` in these columns: a turn of a `chat`, or the rest of a text.
        """
        ids, (own_end, other_end) = tokens[columns].tolist(), self.ends[chat]
        end = next((place for place, token in enumerate(ids) if token in self.eos or token == own_end), len(ids))
        content, (tokenizer, other_tokenizer) = ids[:end], self.tokenizers
        text = tokenizer.decode(content, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if content and not chat and not text.startswith(" "):
            # SentencePiece's decoders leave out a space before a text, which may be the one behind the prompt.
            unspaced = continued_ids(tokenizer, tokens[: columns[0]].tolist(), text[:1])
            pieces = tokenizer.convert_ids_to_tokens([content[0], *unspaced[:1]])
            spaced, *as_always = (str(piece).startswith("▁") for piece in pieces)
            text = f" {text}" if spaced and not any(as_always) else text
        theirs = continued_ids(other_tokenizer, prompt, text)
        if self.spec.align == "spans":
            pieces = ([texts[token] for token in x] for texts, x in zip(self.texts, (content, theirs), strict=True))
            places = [token_places(text.encode(), x) for x in pieces]
            spans = span_ends(*places)
            own, other = (span_of_each(x, [pair[side] for pair in spans]) for side, x in enumerate(places))
        else:
            shared = min(len(content), len(theirs))
            spans = [(place, place) for place in range(shared)]
            own, other = ([*range(shared), *[NOWHERE] * (len(x) - shared)] for x in (content, theirs))
        own += [NOWHERE] * (len(ids) - end)
        if end < len(ids) and self.spec.learn_end:
            own[end] = len(spans)
            other.append(len(spans))
            spans.append((end, len(theirs)))
            theirs = [*theirs, other_end]
        return theirs, np.array(spans, int).reshape(-1, 2), np.array(own, int), np.array(other, int)
