"""The byte tokenizer of the embedded models: 256 bytes and five special tokens, in the Hugging Face file format."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = (PAD, END, *ROLES)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def build_byte_tokenizer(folder: str | Path) -> Path:
    """The folder, after a byte tokenizer that `AutoTokenizer.from_pretrained` loads has been written to it.

    A byte's id is its value (0 to 255); then come `<|pad|>` 256, `<|end|>` 257 (end of sequence), `<|system|>` 258,
    `<|user|>` 259 and `<|assistant|>` 260. There are no merges, so every UTF-8 text comes back as it was, one token a
    byte. Plain text gets no special tokens. The chat template writes each message as `<|role|>content<|end|>` and
    opens the answer with `<|assistant|>`.
    """
    symbols = _byte_symbols()
    tokenizer = Tokenizer(BPE(vocab={symbol: byte for byte, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "additional_special_tokens": list(ROLES),
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return folder


def _byte_symbols() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte value.

    Printable Latin-1 bytes stand for themselves; the others are numbered from U+0100 up, in byte order.
    """
    themselves = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in themselves]
    return [chr(byte) if byte in themselves else chr(0x100 + others.index(byte)) for byte in range(256)]
