"""Host-side data: rows of any source become token rows, and token rows an endless, resumable stream of batches.

`sources` gives the rows of whatever names data (`files`, and data sets with their `splits`), `opening` those that a
`DataSpec` asks for; `formats` makes examples of rows, `tokenize` token rows of examples (with the chat `templates`, of
`conversations`, whose turns a `transcript` finds, and of `pairs`), and `length_limit` bounds them; `loading` does this
for whole sources, and `pipeline` puts token rows in order. Numpy only.
"""

from typing import Any

Row = dict[str, Any]  # values by column: of a data set's row, of an example, or of a token row
