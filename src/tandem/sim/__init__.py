"""A simulated vLLM engine: vLLM's HTTP, metrics, KV events and KV hand-off, in time given by a cost model.

    async with Fleet([EngineSpec(parse(["--model", "m"]))]) as fleet:
        fleet.urls

`cost` says how long a step takes, `scheduler` what is in it, `blocks` which KV is where, `nixl` how KV
crosses, `faults` what can go wrong. `virtual.run` makes the time of a whole test virtual.
"""

from tandem.sim.args import UsageError, VllmArgs, parse
from tandem.sim.cost import CostProfile, ProfileError
from tandem.sim.faults import FaultError
from tandem.sim.fleet import EngineSpec, Fleet
from tandem.sim.server import EngineServer

__all__ = [
    "CostProfile",
    "EngineServer",
    "EngineSpec",
    "FaultError",
    "Fleet",
    "ProfileError",
    "UsageError",
    "VllmArgs",
    "parse",
]
