"""An agent of two turns that knows nothing of the library that trains its model: it uses the package `openai` alone.

It asks the model to sort digits (`sort:4821=`, `1248`), then for the smallest of them (`sort:=`), a question the
model has never seen. The reward is 1 when both answers are right.
"""

from openai import OpenAI


def run(base_url: str, api_key: str, task: dict) -> float:
    """Plays one task and returns its reward."""
    text = task["prompt"]
    digits = text.removeprefix("sort:").removesuffix("=")
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        for right in ("".join(sorted(digits)), min(digits)):
            answer = client.completions.create(model="any", prompt=text, max_tokens=10).choices[0].text
            if answer != right:
                return 0.0
            text += answer + "sort:="  # which means: the smallest of them?
    return 1.0
