"""Small byte-level BPE tokenizers, each trained on texts of its own."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{%- for message in messages -%}[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}[assistant]{%- endif -%}"
)


def bpe_tokenizer(texts: Sequence[str], size: int, eos: str = "</s>", regex: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer of up to `size` tokens: all bytes, frequent pairs of the texts, and `eos`, which pads too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=size, special_tokens=[eos], initial_alphabet=alphabet, show_progress=False),
    )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=eos)
    made.chat_template = TEMPLATE
    return made
