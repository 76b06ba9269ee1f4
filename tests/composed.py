"""Settings as a command line gives them."""

from synergy_runs.files import conf_folder
from synergy_runs.settings import build
from synergy_sim.settings import Settings


def composed(*overrides):
    """The simulator's settings under these overrides."""
    return build(Settings, composed_values(*overrides))


def composed_values(*overrides):
    """The same as plain values, which runs are stored with."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return OmegaConf.to_container(compose("config", list(overrides)), resolve=True)
