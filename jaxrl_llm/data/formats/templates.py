"""The fixed prompt texts of axolotl's `chatml.*`, `llama3.*` and `zephyr.*` formats.

They hold no beginning-of-sequence token: the tokenizer writes it, once.
"""

from typing import NamedTuple


class Template(NamedTuple):
    """How a system text, a user's turn with the opening of the answer, and an answer are written."""

    system: str
    user: str
    answer: str

    def prompt(self, user: str, system: str | None = None) -> str:
        """The text an answer starts from; the system part only where there is a system text."""
        return (self.system.format(system) if system else "") + self.user.format(user)

    def completion(self, answer: str) -> str:
        """The answer with what ends it."""
        return self.answer.format(answer)


CHATML = Template(
    system="<|im_start|>system\n{}<|im_end|>\n",
    user="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    answer="{}<|im_end|>",
)
LLAMA3 = Template(
    system="<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
    user="<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    answer="{}<|eot_id|>",
)
ZEPHYR = Template(system="", user="<|system|>\n</s>\n<|user|>\n{}</s>\n<|assistant|>\n", answer="{}")
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3}
