"""Declared types and ranges for message fields, and the check that holds values against them.

A message's fields are annotated `Annotated[python_type, spec]`, and `record_of` reads the annotations once. A check
takes what MessagePack decoded (or what a caller passed) and returns the value to keep, or raises `Mismatch`. Types are
strict: `True` is not an integer, 1.0 is not an integer, NaN is never a number, text must be encodable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Protocol, Union, get_args, get_origin, get_type_hints

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1
UINT64_MAX = 2**64 - 1
FLOAT_MAX = sys.float_info.max


class Mismatch(ValueError):
    """A value that does not fit its spec; `path` leads to it from the outermost field, innermost part first."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.path = path

    def inside(self, part: str) -> Mismatch:
        """The same fault seen from one container further out."""
        joint = "" if not self.path or self.path.startswith("[") else "."
        return Mismatch(self.message, f"{part}{joint}{self.path}")


class Spec(Protocol):
    """A declared type."""

    def check(self, value: Any) -> Any:
        """Return the value to keep. Raises Mismatch."""

    def describe(self) -> str:
        """What is allowed, in words, for errors and documentation."""


def shown(value: object) -> str:
    """A value as an error may show it: type and a short form, whatever its size."""
    if value is None or isinstance(value, bool | int | float):
        return repr(value) if not isinstance(value, int) or abs(value) <= UINT64_MAX else "a huge integer"
    if isinstance(value, str):
        return repr(value[:32]) + ("..." if len(value) > 32 else "")
    kind = type(value).__name__
    return {"tuple": "an array", "list": "an array", "dict": "a map"}.get(kind, kind)


def refuse(spec: Spec, value: object) -> Mismatch:
    return Mismatch(f"must be {spec.describe()}, not {shown(value)}")


@dataclass(frozen=True, slots=True)
class Integer:
    low: int = INT64_MIN
    high: int = INT64_MAX

    def check(self, value: Any) -> int:
        if type(value) is int and self.low <= value <= self.high:
            return value
        raise refuse(self, value)

    def describe(self) -> str:
        return f"an integer from {self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Real:
    """A float; an integer is taken as one. Infinity passes only where a bound is infinite, NaN never."""

    low: float = -FLOAT_MAX
    high: float = FLOAT_MAX

    def check(self, value: Any) -> float:
        if (type(value) is float or type(value) is int) and self.low <= value <= self.high:
            return float(value)
        raise refuse(self, value)

    def describe(self) -> str:
        if (self.low, self.high) == (-FLOAT_MAX, FLOAT_MAX):
            return "a finite number"
        return f"a number from {self.low:.10g} to {self.high:.10g}"


@dataclass(frozen=True, slots=True)
class Flag:
    def check(self, value: Any) -> bool:
        if type(value) is bool:
            return value
        raise refuse(self, value)

    def describe(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class Text:
    """Unicode text of at most `max_bytes` as UTF-8."""

    max_bytes: int
    min_bytes: int = 0

    def check(self, value: Any) -> str:
        if type(value) is not str:
            raise refuse(self, value)
        try:
            size = len(value) if value.isascii() else len(value.encode())
        except UnicodeEncodeError:
            raise Mismatch("must be text without lone surrogates") from None
        if not self.min_bytes <= size <= self.max_bytes:
            raise Mismatch(f"must be {self.describe()}, not of {size}")
        return value

    def describe(self) -> str:
        return f"text of {self.min_bytes} to {self.max_bytes} bytes"


@dataclass(frozen=True, slots=True)
class Name:
    """Text that people see in tables and logs: printable, so that it cannot forge a line of either."""

    max_bytes: int = 128
    min_bytes: int = 1

    def check(self, value: Any) -> str:
        if type(value) is str and value.isprintable() and self.min_bytes <= len(value.encode()) <= self.max_bytes:
            return value
        raise refuse(self, value)

    def describe(self) -> str:
        return f"printable text of {self.min_bytes} to {self.max_bytes} bytes"


@dataclass(frozen=True, slots=True)
class Choice:
    values: tuple[str, ...]

    def check(self, value: Any) -> str:
        if type(value) is str and value in self.values:
            return value
        raise refuse(self, value)

    def describe(self) -> str:
        return "one of " + ", ".join(self.values)


@dataclass(frozen=True, slots=True)
class Binary:
    max_bytes: int
    min_bytes: int = 0

    def check(self, value: Any) -> bytes:
        if type(value) is bytes and self.min_bytes <= len(value) <= self.max_bytes:
            return value
        raise refuse(self, value)

    def describe(self) -> str:
        return f"bytes, {self.min_bytes} to {self.max_bytes} of them"


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes, or where they lie in the arena's bulk region: [cursor, number of bytes]."""

    max_bytes: int

    def check(self, value: Any) -> bytes | tuple[int, int]:
        if type(value) is bytes and len(value) <= self.max_bytes:
            return value
        if type(value) in (tuple, list) and len(value) == 2:
            return Integer(0, INT64_MAX).check(value[0]), Integer(0, self.max_bytes).check(value[1])
        raise refuse(self, value)

    def describe(self) -> str:
        return f"at most {self.max_bytes} bytes, or [cursor, number of bytes] in the arena's bulk region"


@dataclass(frozen=True, slots=True)
class Optional:
    spec: Spec

    def check(self, value: Any) -> Any:
        return None if value is None else self.spec.check(value)

    def describe(self) -> str:
        return f"{self.spec.describe()} or nil"


@dataclass(frozen=True, slots=True)
class ListOf:
    """An array with elements of one kind, kept as a tuple."""

    element: Spec
    max_items: int
    min_items: int = 0

    def check(self, value: Any) -> tuple[Any, ...]:
        if type(value) is not tuple and type(value) is not list:
            raise refuse(self, value)
        if not self.min_items <= len(value) <= self.max_items:
            raise Mismatch(f"must have {self.min_items} to {self.max_items} items, not {len(value)}")
        check = self.element.check
        kept: list[Any] = []
        try:
            for item in value:
                kept.append(check(item))  # noqa: PERF401 (its length says where the fault is)
        except Mismatch as fault:
            raise fault.inside(f"[{len(kept)}]") from None
        return tuple(kept)

    def describe(self) -> str:
        return f"an array of {self.min_items} to {self.max_items} items, each {self.element.describe()}"


@dataclass(frozen=True, slots=True)
class Many:
    """Annotates a `tuple[X, ...]`: how many X there may be."""

    max_items: int
    min_items: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """An array of exactly two values."""

    first: Spec
    second: Spec

    def check(self, value: Any) -> tuple[Any, Any]:
        if type(value) not in (tuple, list) or len(value) != 2:
            raise refuse(self, value)
        return self.first.check(value[0]), self.second.check(value[1])

    def describe(self) -> str:
        return f"an array of two: {self.first.describe()}, and {self.second.describe()}"


@dataclass(frozen=True, slots=True)
class Plain:
    """Free-form data for which a handler has its own check: nil, booleans, 64-bit integers, finite floats, text, bytes,
    arrays, and maps whose keys are text; nested at most `max_depth` deep."""

    max_depth: int = 6

    def check(self, value: Any) -> Any:
        self._walk(value, self.max_depth)
        return value

    def _walk(self, value: Any, depth: int) -> None:
        kind = type(value)
        if value is None or kind in (bool, bytes):
            return
        if kind is int and INT64_MIN <= value <= UINT64_MAX:
            return
        if kind is float and -FLOAT_MAX <= value <= FLOAT_MAX:
            return
        if kind is str:
            Text(max_bytes=INT64_MAX).check(value)
        elif kind in (tuple, list) and depth:
            for index, item in enumerate(value):
                self._step(item, depth, f"[{index}]")
        elif kind is dict and depth:
            for key, item in value.items():
                Name(max_bytes=256, min_bytes=0).check(key)
                self._step(item, depth, key)
        else:
            raise refuse(self, value)

    def _step(self, item: Any, depth: int, part: str) -> None:
        try:
            self._walk(item, depth - 1)
        except Mismatch as fault:
            raise fault.inside(part) from None

    def describe(self) -> str:
        return f"plain data at most {self.max_depth} levels deep"


@dataclass(frozen=True, slots=True)
class PlainMap:
    """A map of free-form data."""

    max_depth: int = 6

    def check(self, value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise refuse(self, value)
        checked: dict[str, Any] = Plain(self.max_depth).check(value)
        return checked

    def describe(self) -> str:
        return f"a map with text keys, at most {self.max_depth} levels deep"


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a record: its name, its spec, and the value that stands for leaving it out."""

    name: str
    spec: Spec
    required: bool
    default: Any
    check: Callable[[Any], Any]  # the spec's, looked up once


_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Record:
    """A map with declared keys, kept as an instance of `make`. Unknown keys are refused, defaults may be left out."""

    make: type[Any]
    fields: tuple[Field, ...]

    def check(self, value: Any) -> Any:
        if type(value) is not dict:
            raise refuse(self, value)
        kept: list[Any] = []
        num_present = 0
        field = None
        try:
            for field in self.fields:
                item = value.get(field.name, _ABSENT)
                if item is not _ABSENT:
                    kept.append(field.check(item))
                    num_present += 1
                elif field.required:
                    raise Mismatch("is missing")
                else:
                    kept.append(field.default)
        except Mismatch as fault:
            raise fault.inside(field.name if field else "") from None
        if num_present != len(value):
            known = {field.name for field in self.fields}
            unknown = next(key for key in value if key not in known)
            raise Mismatch("is not a known field", shown(unknown) if type(unknown) is not str else unknown[:64])
        return self.make(*kept)

    def describe(self) -> str:
        return "a map of " + ", ".join(field.name for field in self.fields)


def spec_of(hint: Any) -> Spec:
    """The spec that a field's annotation declares. Raises TypeError for an annotation that declares none."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        declared = arguments[1]
        if isinstance(declared, Many):
            return ListOf(spec_of(get_args(arguments[0])[0]), declared.max_items, declared.min_items)
        spec: Spec = declared
        return spec
    if origin in (Union, UnionType) and len(arguments) == 2 and arguments[1] is type(None):
        return Optional(spec_of(arguments[0]))
    if origin is tuple and len(arguments) == 2:
        return Pair(spec_of(arguments[0]), spec_of(arguments[1]))
    if isinstance(hint, type) and is_dataclass(hint):
        return record_of(hint)
    if hint is bool:
        return Flag()
    raise TypeError(f"{hint} declares no range")


def record_of(make: type[Any]) -> Record:
    """The declared fields of a dataclass."""
    hints = get_type_hints(make, include_extras=True)
    return Record(
        make,
        tuple(
            Field(
                name=field.name,
                spec=spec,
                required=field.default is MISSING,
                default=None if field.default is MISSING else field.default,
                check=spec.check,
            )
            for field in fields(make)
            for spec in (spec_of(hints[field.name]),)
        ),
    )
