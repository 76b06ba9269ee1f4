"""Which compressor each layer gets."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from synergy_core.errors import InputError
from synergy_exec.training.compression.scheme import GradientLayer, Scheme
from synergy_exec.training.compression.schemes import kinds
from synergy_exec.training.compression.schemes.plain import Plain


def scheme_named(name: str) -> Scheme:
    """The scheme of a compressor's name. Raises InputError."""
    for kind in kinds():
        if (scheme := kind.named(name)) is not None:
            return scheme
    known = ", ".join(example for kind in kinds() for example in kind.EXAMPLES)
    raise InputError(f"there is no compressor '{name}'; write one like {known}.")


@dataclass(frozen=True, slots=True)
class SchemeByLayer:
    """Schemes by parameter. layers: (pattern of names, scheme), of which the first that fits counts; else `rest`."""

    rest: Scheme
    layers: tuple[tuple[str, Scheme], ...] = ()

    @classmethod
    def named(cls, text: str) -> SchemeByLayer:
        """As in `PlanMessage.compressor`: `q4`, by layer `q4,token.weight=none,layers.*=q2`. Raises InputError."""
        rest, *layers = text.split(",")
        chosen = []
        for each in layers:
            pattern, equals, name = each.partition("=")
            if not (pattern and equals):
                raise InputError(f"compressor '{text}': '{each}' is no choice for a layer; write NAME=COMPRESSOR.")
            chosen.append((pattern, scheme_named(name)))
        return cls(scheme_named(rest), tuple(chosen))

    @property
    def schemes(self) -> list[Scheme]:
        """Every scheme that a layer may get."""
        return [self.rest, *(scheme for _, scheme in self.layers)]

    @property
    def nothing(self) -> bool:
        """Whether every layer is sent as it is."""
        return all(isinstance(scheme, Plain) for scheme in self.schemes)

    def of(self, layer: GradientLayer, replicas: int) -> Scheme:
        """What a layer gets: what was chosen, unless its scheme does not take it or it would send no fewer bytes."""
        found = (scheme for pattern, scheme in self.layers if fnmatchcase(layer.name, pattern))
        chosen = next(found, self.rest).of(layer)
        plain = Plain()
        saves = chosen.sent_bytes(layer, replicas) < plain.sent_bytes(layer, replicas)
        return chosen if saves and chosen.takes(layer) else plain
