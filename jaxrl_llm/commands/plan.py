"""Memory, time and traffic of a run before anyone pays for it: no weights, no data, no accelerator.

    python -m jaxrl_llm plan --config=configs/grpo.py --config.model.path=FOLDER --devices=8 --device=h200

The model's config.json is all that is read. The programs of a step are compiled for the devices that are named, and
what they need of each device is printed: parameters, optimizer, keys and values, temporaries, the largest tensors, what
devices send each other, the least time of a step, and what to change when it does not fit. A TPU is compiled for by its
own compiler where the package libtpu is installed; anything else by the CPU's, which needs more for temporaries.
"""

import sys

from jaxrl_llm.config.flags import load_flags
from jaxrl_llm.config.schema import Key
from jaxrl_llm.tools.plan.advice import advice
from jaxrl_llm.tools.plan.devices import DEVICES, named
from jaxrl_llm.tools.plan.planned import Plan, make_plan
from jaxrl_llm.tools.plan.text import lines
from jaxrl_llm.tools.plan.topology import target

FLAGS = (
    Key("device", "h100", f"What to plan for: {', '.join(device.name for device in DEVICES)}, or cpu (this machine)."),
    Key("devices", 1, "How many of them.", int, minimum=1),
    Key("simulate", False, "Compile with the CPU's compiler, even for a TPU whose own is installed: faster.", bool),
    Key(
        "advice",
        "auto",
        "Say what would need less: always, never, or when it may not fit.",
        choices=("auto", "always", "never"),
    ),
)


def plan(config, device: str = "h100", devices: int = 1, simulate: bool = False) -> Plan:
    """The plan of a configuration on `devices` of a kind; the process must not have used jax before.

    Raises ConfigError for an unknown device, a mesh of another size, and whatever training would refuse.
    """
    named(device)
    return make_plan(config, target(config, device, devices, simulate))


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    config, options = load_flags(argv, __doc__ or "", FLAGS)
    found = plan(config, options["device"], options["devices"], options["simulate"])
    tight = bool(found.target.device.memory) and found.peak.peak > found.capacity
    wanted = options["advice"] == "always" or (tight and options["advice"] == "auto")
    advised = advice(found, compiled=wanted) if wanted else []
    sys.stdout.write("\n".join(lines(found, advised)) + "\n")
