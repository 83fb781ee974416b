"""Tokenizers that put a space before a text, as SentencePiece's do."""

import string
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

# Where a space is put: before a text alone, behind special tokens too, by a normaliser as in older files, by bytes.
SPACINGS = ("first", "always", "prepend", "bytes")
MARKED = "[U]"  # an added token that is no special one: normalised text has it
TEMPLATE = (
    "{%- for m in messages -%}{{- '<|' + m.role + '|>\n' + m.content + eos_token + '\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"
)


def spacing_tokenizer(spacing: str) -> Any:
    """A tokenizer of letters and of letters with a space before them, which puts a space as `spacing` says."""
    space = "Ġ" if spacing == "bytes" else "▁"
    letters = string.ascii_letters + string.digits + string.punctuation
    line = "Ċ" if spacing == "bytes" else "\n"
    pieces = ["<unk>", "<s>", "</s>", space, line, *letters, *(space + letter for letter in letters)]
    merges = [(space, letter) for letter in letters]
    backend = Tokenizer(BPE({piece: index for index, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    if spacing == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        backend.decoder = decoders.ByteLevel()
    elif spacing == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
        replace, strip = decoders.Replace(space, " "), decoders.Strip(" ", 1, 0)
        backend.decoder = decoders.Sequence([replace, decoders.Fuse(), strip])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=spacing, split=False)
        backend.decoder = decoders.Metaspace(prepend_scheme=spacing, split=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )
    tokenizer.add_tokens(AddedToken(MARKED, normalized=True))
    return tokenizer
