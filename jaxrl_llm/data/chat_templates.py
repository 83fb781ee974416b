"""Chat templates by name, for tokenizers that have none or another: `data.chat_template`."""

import copy
import logging
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.config.resolve import ConfigError, closest

log = logging.getLogger(__name__)


class ChatTemplate(NamedTuple):
    """A template in Jinja, and the token that ends a turn."""

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


def with_chat_template(tokenizer: Any, template: str) -> Any:
    """A copy of the tokenizer with the chat template of that name, of that file, or of that text (`{{ ... }}`).

    The token that ends a turn of a named template becomes the tokenizer's end-of-text token where it is one token, so
    that sampling stops there; otherwise there is a warning. Raises ConfigError for a name that is none of these.
    """
    own = copy.deepcopy(tokenizer)
    if template in TEMPLATES:
        named = TEMPLATES[template]
        own.chat_template = named.text
        if len(own(named.end, add_special_tokens=False)["input_ids"]) == 1:
            own.eos_token = named.end
        else:
            log.warning(
                "data.chat_template = %s ends turns with %s, which is no single token of this tokenizer: samples end "
                "with %s all the same; another template may be the model's",
                template,
                named.end,
                own.eos_token,
            )
    elif "{{" in template or "{%" in template:
        own.chat_template = template
    elif (file := Path(template).expanduser()).is_file():
        own.chat_template = file.read_text(encoding="utf-8-sig")
    else:
        raise ConfigError(
            f"data.chat_template is {template!r}, which is no file, no text of a template and no name; the closest is "
            f"{closest(template, TEMPLATES)}, of {', '.join(TEMPLATES)}"
        )
    return own
