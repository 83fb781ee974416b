"""Data formats: functions `row -> Example`, from the columns that people have to those that training reads.

An Example is a dictionary with the columns of one of these kinds, and whatever else rewards read:

| kind | columns |
|---|---|
| prompts | `prompt` |
| completions | `prompt` and `completion`, or `messages`, or `text` |
| pairs | `prompt` (or none: the common beginning), `chosen`, `rejected`, and maybe `margin` |
| triples | those of pairs, and a gold completion in `reference` |
| labels | `prompt`, `completion`, `label`; or those of pairs, which become two rows |
| steps | `prompt`, and the lists `completions` and `labels` |

A prompt or completion is text or a list of messages; `tools` and `chat_template_kwargs` go to the chat template.
`lookup.find` gives the function of a name; docs/data.md shows what each makes of a row.
"""
