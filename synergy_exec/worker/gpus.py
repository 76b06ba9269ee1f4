"""Which GPUs a process sees: by an environment variable that it has before it touches one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""ROCm heeds both, and looks at its own first (HIP's documentation, "GPU isolation techniques"); CUDA heeds its own."""


def see_only(gpus: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """What is to be in the environment of a process that sees only these of the GPUs that are seen in `environment`: a
    library that takes the first it finds takes one of them.
    """
    name = next((each for each in _VARIABLES if environment.get(each)), _VARIABLES[-1])
    visible = environment.get(name, "").split(",")
    return {name: ",".join(str(each) if visible == [""] else visible[each] for each in gpus)}
