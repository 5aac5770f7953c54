"""What a flag is. It is declared where its value is: as the default of the field in `config.py` it fills.

    max_fetches: int = flag("--max-media-fetches", COUNT, 64, "Downloads at once.", roles=WITH_MEDIA)

The type checker holds field, kind and default to one type. `utils/` makes the rest of the declaration: the
command line, the variable, `--help`, the note to a role that has no use for it, and README's table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Generic, ParamSpec, TypeVar

from dynamo.trtllm.roles import EngineKind, Role
from dynamo.trtllm.values import SWITCH, Kind

ENVIRONMENT_PREFIX = "DYN_TRTLLM_"
_METADATA = "flag"

Value = TypeVar("Value")
Declared = TypeVar("Declared", covariant=True)
Parameters = ParamSpec("Parameters")


@dataclass(frozen=True)
class Flag(Generic[Declared]):
    """One flag. `name` is the spelling that sentences use, `also` are other spellings of the same."""

    name: str
    kind: Kind[Declared]
    default: Declared
    help: str
    _: KW_ONLY
    also: tuple[str, ...] = ()
    shared: str | None = None
    """Variable of the guide's launch scripts, the same for all roles; read when nothing else says a value."""
    argument: str | None = None
    """Dotted name of the engine argument that it fills, where it fills no field."""
    roles: frozenset[Role] | None = None
    """Roles that have a use for it, the others ignore it with a note; None: all."""
    engines: frozenset[EngineKind] | None = None
    """Engines that have a use for it, the others refuse it; None: all."""
    in_environment: bool = True
    default_text: str | None = None
    """What help says of a default that is not said by its value."""
    group: str | None = None
    """Title it stands under in help and README, where that is not its layer's."""
    no_op: str | None = None
    """Why it does nothing any more: the end of a sentence."""

    @property
    def is_switch(self) -> bool:
        return self.kind is SWITCH

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.name, *self.also)

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment names, the first that is set wins; the shared one is not among them."""
        if not self.in_environment:
            return ()
        return tuple(ENVIRONMENT_PREFIX + each[2:].upper().replace("-", "_") for each in self.spellings)

    @property
    def shown_default(self) -> str | None:
        """The default as a user would write it; None where the engine or another setting decides."""
        if self.default_text is not None or self.default is None:
            return self.default_text
        return self.kind.show(self.default)


def _as_field(make: Callable[Parameters, Flag[Value]]) -> Callable[Parameters, Value]:
    def declare(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Value:
        declared = make(*args, **kwargs)
        default = declared.default
        is_shared = isinstance(default, Mapping)  # which a dataclass takes only from a function
        given: dict[str, Any] = {"default_factory": lambda: default} if is_shared else {"default": default}
        found: Value = field(**given, metadata={_METADATA: declared})
        return found

    return declare


flag = _as_field(Flag)
"""A field of a configuration layer and the `Flag` that fills it; the flag's default is the field's."""


def flags_of(layer: type[Any]) -> Mapping[str, Flag[Any]]:
    """The flags that fill a layer's fields, by the names of these."""
    return {each.name: each.metadata[_METADATA] for each in fields(layer) if _METADATA in each.metadata}
