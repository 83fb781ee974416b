"""Host-side data: rows of any source become token rows, and token rows an endless, resumable stream of batches.

`sources` opens data, `formats` makes examples of its rows, `tokenize` makes token rows of examples (with the chat
`templates`), `loading` does all three as a `DataSpec` says, and `pipeline` puts token rows in order. Numpy only.
"""

from typing import Any

Row = dict[str, Any]  # values by column: of a data set's row, of an example, or of a token row
