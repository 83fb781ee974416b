"""The argument of a callback, and its answers: end the run, save or evaluate at this step."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxrl_llm.config import ConfigDict
from jaxrl_llm.models.model import Model

STOP, SAVE, EVALUATE = "stop", "save", "evaluate"


@dataclasses.dataclass(frozen=True)
class Moment:
    """The view of a run that a callback gets: the step, its metrics by name, the configuration and the folder."""

    step: int
    metrics: Mapping[str, float]  # those of an evaluation are named eval/...
    config: ConfigDict  # a copy: changes have no effect
    folder: Path  # output_dir
    make_model: Callable[[], Model]

    def model(self) -> Model:
        """The current model. The next step reuses the memory of its parameters: copy those that you keep.

        With several processes all must call it, and use the model alike.
        """
        return self.make_model()
