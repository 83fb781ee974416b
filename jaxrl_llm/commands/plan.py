"""Plan the memory, time and traffic of a run on devices that are not at hand: no weights, no data, no accelerator.

    python -m jaxrl_llm plan --config=configs/grpo.py --config.model.path=FOLDER --devices=8 --device=h200

Reads only the model's config.json. Compiles the programs of a step for the named devices and prints their needs per
device: parameters, optimizer, keys and values, temporaries, the largest tensors, traffic between devices, the least
time of a step, and what to change when it does not fit. The compiler is the devices' own where it is installed (`pip
install libtpu`, `"jaxrl_llm[plan-cuda]"`), and otherwise the CPU's, which needs more for temporaries.
"""

import sys

from jaxrl_llm.config.flags import load_flags
from jaxrl_llm.config.setting import Setting
from jaxrl_llm.distributed.devices import DEVICES, named
from jaxrl_llm.tools.plan.advice import advice
from jaxrl_llm.tools.plan.planned import Plan, is_split, make_plan
from jaxrl_llm.tools.plan.split import make_split, split_lines
from jaxrl_llm.tools.plan.text import lines
from jaxrl_llm.tools.plan.topology import target
from jaxrl_llm.training.logging.console import stderr_console, waiting

FLAGS = (
    Setting("device", "h100", f"Device type: {', '.join(device.name for device in DEVICES)}, or cpu (this machine)."),
    Setting("devices", 1, "Number of devices.", int, minimum=1),
    Setting("simulate", False, "Compile with the CPU's compiler even where the device's own is installed.", bool),
    Setting(
        "image_tokens",
        0,
        "Tokens of the images of each prompt, or of each row of given data, to plan with.",
        int,
        minimum=0,
    ),
    Setting(
        "advice",
        "auto",
        "Suggest savings: always, never, or (auto) when the run may not fit.",
        choices=("auto", "always", "never"),
    ),
)


def plan(config, device: str = "h100", devices: int = 1, simulate: bool = False, image_tokens: int = 0) -> Plan:
    """The plan of a configuration on this number of `devices` of a type; the process must not have used jax before.

    Raises ConfigError for an unknown device, a mesh of another size, images that do not fit, and as training does.
    """
    named(device)
    return make_plan(config, target(config, device, devices, simulate), image_tokens=image_tokens)


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    config, options = load_flags(argv, __doc__ or "", FLAGS)
    places = tuple(options[name] for name in ("device", "devices", "simulate", "image_tokens"))
    with waiting(f"compiling the programs of {config.model.path}, minutes for large models", stderr_console(), False):
        if is_split(config):
            split = make_split(config, *places)
            sys.stdout.write("\n".join(split_lines(split)) + "\n")
            return
        planned = plan(config, *places)
        wanted = options["advice"] == "always" or (planned.is_tight and options["advice"] == "auto")
        advised = advice(planned, compiled=wanted) if wanted else []
    sys.stdout.write("\n".join(lines(planned, advised)) + "\n")
