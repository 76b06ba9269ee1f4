"""Tables of jobs: named columns, each declared once with its type, meaning, limits and missing value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from synergy_core.units import Floats, Ints

if TYPE_CHECKING:
    import pandas as pd

Mask = NDArray[np.bool_]
UNKNOWN = np.nan
"""A number that is not known."""


@dataclass(frozen=True, slots=True)
class ColumnRange:
    """Range of a column: from `low` to max(`high`, `per_gpu` × the job's GPUs). above: whether `low` is excluded."""

    what: str
    low: float
    high: float
    unit: str = ""
    above: bool = False
    per_gpu: float = 0.0

    def wrong(self, values: Floats, gpus: Floats) -> Mask:
        """Mask of the values outside the limits; NaN counts as inside."""
        too_low = values <= self.low if self.above else values < self.low
        return np.asarray(too_low | (values > np.maximum(self.high, self.per_gpu * gpus)))

    def __str__(self) -> str:
        start, for_each = "above" if self.above else "from", f"{self.per_gpu:.3g} for each GPU"
        end = f"{self.high:.10g}" + f", or {for_each}" * (self.per_gpu > 0) if self.high else for_each
        return f"{self.what} {start} {self.low:.10g} to {end}{self.unit}"


@dataclass(frozen=True, slots=True)
class JobColumn:
    """One column of a table of jobs."""

    name: str
    dtype: type
    """Type of its values: a type of numpy; object for texts; or str for names that jobs share, such as users, which
    are a `pandas.Categorical`."""
    meaning: str
    """What a value says about its job, and what stands for "unknown"."""
    missing: Any = None
    """Value of jobs without one; None if every job needs one."""
    limits: ColumnRange | None = None
    """Range of the values in a log; a row with another value is impossible."""
    label: str = ""
    """Name in errors if the file has no name for the column."""
    names: tuple[str, ...] = ()
    """The names that are known beforehand; their codes are their positions here."""

    def values(self, given: Any, jobs: int) -> Any:
        """`given`, one value per job or one for all, in the type of this column. Raises ValueError for other numbers of
        values.
        """
        given = () if given is None else given
        if self.dtype is str and hasattr(given, "codes"):
            made = named(given.categories, self.names)[given.codes] if self.names else given
        else:
            made = np.asarray(given, dtype=object if self.dtype is str else self.dtype)
            made = np.full(jobs, made) if made.ndim == 0 else made
            made = named(made, self.names) if self.dtype is str else made
        if len(made) != jobs:
            raise ValueError(f"column {self.name}: got {len(made)} values, expected one for each of {jobs} jobs")
        return made


Schema = Mapping[str, JobColumn]


def schema(*columns: JobColumn) -> Schema:
    """The columns of a table by name, in order."""
    return {each.name: each for each in columns}


def named(texts: Iterable[str], known: Sequence[str] = ()) -> pd.Categorical:
    """A column of names; its categories are `known`, then the other texts in order of appearance."""
    import pandas as pd

    codes, found = pd.factorize(np.array([*known, *texts], dtype=object))
    return coded(codes[len(known) :], found)


def coded(codes: ArrayLike, names: Iterable[str]) -> pd.Categorical:
    """A column of names from the index of each job's name in `names`."""
    import pandas as pd

    return pd.Categorical.from_codes(np.asarray(codes), pd.Index(list(names), dtype=object))


def in_common(first: pd.Categorical, second: pd.Categorical) -> tuple[tuple[Ints, Ints], list[str]]:
    """(codes of both columns, names): the names of both columns in one list, those of the first column first."""
    both = named([*first.categories, *second.categories])
    of_first, of_second = np.split(both.codes.astype(np.int64), [len(first.categories)])
    return (of_first[first.codes], of_second[second.codes]), both.categories.tolist()


@dataclass(frozen=True, slots=True)
class JobTable:
    """Jobs, one row each. `table["gpus"]` is a column: an array, or a `pandas.Categorical` of names. `table[rows]`,
    with a mask or row numbers, is a table of these rows, in this order.
    """

    schema: Schema
    """Declarations of the columns."""
    columns: Mapping[str, Any]
    """Values by column, in the order of `schema`."""

    @classmethod
    def of(cls, schema: Schema, jobs: int, **values: Any) -> JobTable:
        """A table of so many jobs. values: by column, one per job or one for all; by default `JobColumn.missing`.

        Raises TypeError for an unknown column, and ValueError for a column with too few or too many values.
        """
        if odd := values.keys() - schema.keys():
            raise TypeError(f"no columns {', '.join(sorted(odd))}")
        return cls(schema, {name: each.values(values.get(name, each.missing), jobs) for name, each in schema.items()})

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @overload
    def __getitem__(self, which: str) -> Any: ...

    @overload
    def __getitem__(self, which: NDArray[Any]) -> JobTable: ...

    def __getitem__(self, which: str | NDArray[Any]) -> Any:
        if isinstance(which, str):
            return self.columns[which]
        return replace(self, columns={name: each[which] for name, each in self.columns.items()})

    def with_columns(self, **values: Any) -> JobTable:
        """The table with these columns replaced. values: see `of`."""
        return JobTable.of(self.schema, len(self), **{**self.columns, **values})

    def followed_by(self, other: JobTable) -> JobTable:
        """The rows of this table, then those of `other`, which has the same schema."""
        joined: dict[str, Any] = {}
        for name, each in self.columns.items():
            if self.schema[name].dtype is str:
                codes, found = in_common(each, other[name])
                joined[name] = coded(np.concatenate(codes), found)
            else:
                joined[name] = np.concatenate((each, other[name]))
        return replace(self, columns=joined)
