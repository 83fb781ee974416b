"""Conversations that a server keeps: a request of the Responses API goes on with a response by its id alone."""

import json
from collections import OrderedDict
from typing import Any

from jaxrl_llm.serving.errors import BadRequestError

MOST_BYTES = 2**26  # of the conversations that a server, or a session, keeps


class Conversations:
    """The messages up to the end of each response, by its id; the latest, of up to `most` bytes as JSON in all."""

    def __init__(self, most: int = MOST_BYTES):
        self.most, self._bytes = most, 0
        self._kept: OrderedDict[str, tuple[list[dict[str, Any]], int]] = OrderedDict()

    def add(self, name: str, messages: list[dict[str, Any]]) -> None:
        """Keeps the messages of a response, as long as there is room."""
        size = len(json.dumps(messages))
        self._kept[name], self._bytes = (messages, size), self._bytes + size
        while self._bytes > self.most:
            self._bytes -= self._kept.popitem(last=False)[1][1]

    def of(self, name: Any) -> list[dict[str, Any]]:
        """The messages of a response; raises BadRequestError where it is not kept."""
        if not isinstance(name, str) or name not in self._kept:
            raise BadRequestError(
                f"previous_response_id is {name!r:.100}, which is not kept here: the latest responses are, without "
                f"store=false, up to {self.most} bytes; send the whole conversation as input",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        self._kept.move_to_end(name)
        return self._kept[name][0]
