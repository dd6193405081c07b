"""The config's fields as data: dotted key, type, default and docstring, read off the dataclasses themselves."""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from spmd_rl.config import Config


@dataclass(frozen=True)
class Field:
    """One key of the config."""

    key: str
    """Dotted, with `*` for a free name (`pools.*.nnodes`)."""
    kind: str
    """Its type as it is written, or the section's class name."""
    doc: str
    """Its docstring in one line."""
    default: Any
    """The default value; None for a section."""
    section: type | None = None
    """The dataclass, when the key is a section."""

    def describe(self) -> str:
        """The line that an error shows: `rollout.n: int = 8 (Samples a prompt: GRPO's group.)`."""
        value = "" if self.section else f" = {json.dumps(self.default)}"
        return f"{self.key}: {self.kind}{value} ({self.doc})"


@functools.cache
def docstrings(cls: type) -> dict[str, str]:
    """Field name to the string literal that follows it in the class body, white space folded."""
    tree = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    docs = {}
    for statement, after in itertools.pairwise(body):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs


def section_of(hint: Any) -> tuple[type | None, bool]:
    """(the dataclass behind a type hint, whether it sits in a dict of free names)."""
    if hasattr(hint, "__dataclass_fields__"):
        return hint, False
    args = typing.get_args(hint)
    if typing.get_origin(hint) is dict and hasattr(args[1], "__dataclass_fields__"):
        return args[1], True
    return None, False


def spell(hint: Any) -> str:
    """A type hint as a user would write it."""
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        return hint.__name__
    return str(hint).replace("typing.", "").replace("NoneType", "None").replace("None", "null")


def walk(cls: type, prefix: str = "", default: Any = None) -> Iterator[Field]:
    """Every field under a dataclass, sections before what is in them, in the order of the source."""
    hints, docs = typing.get_type_hints(cls), docstrings(cls)
    instance = cls() if default is None else default
    for field in dataclasses.fields(cls):
        key, (section, free) = prefix + field.name, section_of(hints[field.name])
        value, doc = getattr(instance, field.name), docs.get(field.name, "")
        if section is None:
            yield Field(key, spell(hints[field.name]), doc, value)
        elif free:
            yield Field(key, spell(hints[field.name]).replace(f"{section.__module__}.", ""), doc, {})
            yield Field(f"{key}.*", section.__name__, (section.__doc__ or "").strip(), None, section)
            yield from walk(section, f"{key}.*.")
        else:
            yield Field(key, section.__name__, doc, None, section)
            yield from walk(section, f"{key}.", value)


@functools.cache
def all_fields() -> dict[str, Field]:
    """Key to field, for the whole config."""
    return {field.key: field for field in walk(Config)}


def pattern(key: str) -> str:
    """A concrete key with its free name as `*`: `pools.reward.nnodes` becomes `pools.*.nnodes`."""
    parts = key.split(".")
    return ".".join(["pools", "*", *parts[2:]]) if parts[0] == "pools" and len(parts) > 1 else key


def find(key: str) -> Field | None:
    """The field of a concrete dotted key, or None."""
    return all_fields().get(pattern(key))


def is_free(key: str) -> bool:
    """Whether the key lies inside a field that takes any keys (`rollout.engine_kwargs.seed`)."""
    parts = key.split(".")
    parents = (find(".".join(parts[:size])) for size in range(1, len(parts)))
    return any(parent is not None and parent.kind == "dict[str, Any]" for parent in parents)


def nearest(name: str, known: typing.Iterable[str], count: int = 3) -> list[str]:
    """The names most like `name`, best first; empty when nothing is close."""
    known = list(known)
    folded: dict[str, str] = {}
    for candidate in known:
        folded.setdefault(candidate.lower().replace("-", "_"), candidate)
    close = difflib.get_close_matches(name.lower().replace("-", "_"), folded, n=count, cutoff=0.6)
    return [folded[match] for match in close]


def nearest_keys(key: str, count: int = 3) -> list[str]:
    """Valid keys that the user may have meant: a like name in the same section, the same name elsewhere, a like key."""
    key, keys = pattern(key), list(all_fields())
    parent, _, last = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == parent}
    elsewhere = [k for k in keys if k.rpartition(".")[2] == last]
    elsewhere.sort(key=lambda k: -difflib.SequenceMatcher(None, key, k).ratio())
    found = [siblings[name] for name in nearest(last, siblings, count)] + elsewhere
    if not found or last in siblings:
        found = nearest(key, keys, count) + found
    if not found:
        names = nearest(last, {k.rpartition(".")[2] for k in keys}, 1)
        found = [k for k in keys if k.rpartition(".")[2] in names]
    return list(dict.fromkeys(found))[:count]
