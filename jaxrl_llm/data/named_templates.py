"""Chat templates by name, for tokenizers that have none or another: `data.chat_template`."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from jaxrl_llm.config.resolve import ConfigError, closest

log = logging.getLogger(__name__)


class ChatTemplate(NamedTuple):
    """The text of a chat template in Jinja, and the token that ends a turn in it."""

    text: str
    end: str


_BOS = "{%- if bos_token -%}{{- bos_token -}}{%- endif -%}"
# A system message goes into the first turn of the user, as these models have no role for it.
_SYSTEM_FIRST = (
    "{%- if messages[0]['role'] == 'system' -%}{%- set system = messages[0]['content'] -%}{%- set loop_messages = "
    "messages[1:] -%}{%- else -%}{%- set system = '' -%}{%- set loop_messages = messages -%}{%- endif -%}"
)
TEMPLATES = {
    "chatml": ChatTemplate(
        "{%- for message in messages -%}"
        "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}",
        "<|im_end|>",
    ),
    "llama3": ChatTemplate(
        _BOS + "{%- for message in messages -%}"
        "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim "
        "+ '<|eot_id|>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}",
        "<|eot_id|>",
    ),
    "zephyr": ChatTemplate(
        "{%- for message in messages -%}"
        "{{- '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' -}}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}",
        "</s>",
    ),
    "gemma": ChatTemplate(
        _BOS + _SYSTEM_FIRST + "{%- for message in loop_messages -%}"
        "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
        "{{- '<start_of_turn>' + role + '\\n' + (system + '\\n\\n' if loop.first and system else '') "
        "+ message['content'] | trim + '<end_of_turn>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}",
        "<end_of_turn>",
    ),
    "llama2": ChatTemplate(
        _SYSTEM_FIRST + "{%- for message in loop_messages -%}{%- if message['role'] == 'user' -%}"
        "{{- (bos_token or '') + '[INST] ' + ('<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' if loop.first and system "
        "else '') + message['content'] | trim + ' [/INST]' -}}{%- else -%}"
        "{{- ' ' + message['content'] | trim + ' ' + eos_token -}}{%- endif -%}{%- endfor -%}",
        "</s>",
    ),
    "mistral": ChatTemplate(
        _BOS + _SYSTEM_FIRST + "{%- for message in loop_messages -%}{%- if message['role'] == 'user' -%}"
        "{{- '[INST] ' + (system + '\\n\\n' if loop.first and system else '') + message['content'] + ' [/INST]' -}}"
        "{%- else -%}{{- ' ' + message['content'] + eos_token -}}{%- endif -%}{%- endfor -%}",
        "</s>",
    ),
    "phi3": ChatTemplate(
        "{%- for message in messages -%}"
        "{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' -}}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}",
        "<|end|>",
    ),
}


def with_chat_template(
    tokenizer: Any, template: str, find: Callable[[str], Any] | None = None, setting: str = "data.chat_template"
) -> Any:
    """A copy of the tokenizer with the chat template of that name, of that file, or of that text (`{{ ... }}`).

    A folder, hub id or URL is that of a tokenizer with a template, which `find` loads. The token that ends a turn of a
    named template, or a text of such a tokenizer, becomes the end-of-text token where it is one token here, so that
    sampling stops there; otherwise there is a warning. Raises ConfigError, which names the setting, for a name that is
    none of these, and for what is no template.
    """
    own, end = copy.deepcopy(tokenizer), None
    file = Path(template).expanduser()
    if template in TEMPLATES:
        own.chat_template, end = TEMPLATES[template]
    elif "{{" in template or "{%" in template:
        own.chat_template = template
    elif file.is_file():
        own.chat_template = file.read_text(encoding="utf-8-sig")
    elif find is not None and (file.is_dir() or template.count("/") == 1 or "://" in template):
        other = find(template)
        if not other.chat_template:
            raise ConfigError(f"{setting} is {template!r}, whose tokenizer has no chat template: name another")
        own.chat_template, end = other.chat_template, other.eos_token
    else:
        raise ConfigError(
            f"{setting} is {template!r}, which is no file, no text of a template and no name; the closest is "
            f"{closest(template, TEMPLATES)}, of {', '.join(TEMPLATES)}"
        )
    try:
        own.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{setting} is {template!r:.200}, no template, by line {error.lineno}: {error}") from error
    except Exception as error:  # of this conversation alone, perhaps: it comes where one is read
        log.debug("%s: %s", setting, error)
    if end is not None and len(own(end, add_special_tokens=False)["input_ids"]) == 1:
        own.eos_token = end
    elif end is not None:
        log.warning(
            "%s = %s ends turns with %s, which is no single token of this tokenizer: samples end with %s all the same; "
            "another template may be the model's",
            setting,
            template,
            end,
            own.eos_token,
        )
    return own


def with_eos_token(tokenizer: Any, token: str) -> Any:
    """A copy of the tokenizer whose texts end with that token; raises ConfigError where it has no such token."""
    vocabulary = tokenizer.get_vocab()
    if token not in vocabulary:
        raise ConfigError(
            f"model.eos_token is {token!r}, which is no token of this tokenizer; the closest is "
            f"{closest(token, vocabulary)}"
        )
    own = copy.deepcopy(tokenizer)
    own.eos_token = token
    return own
