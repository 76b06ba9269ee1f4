"""Settings as a command line gives them."""

from synergy_runs.inputs.command_line import composed_of
from synergy_runs.inputs.keys import build
from synergy_sim.settings import SIMULATOR, SimulatorSettings


def composed(*overrides):
    """The simulator's settings under these overrides."""
    return build(SimulatorSettings, composed_values(*overrides))


def composed_values(*overrides):
    """The same as plain values, which runs are stored with."""
    return composed_of(SIMULATOR, overrides)
