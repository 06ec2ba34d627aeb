"""The rooms: each says what it is for and exports what others use, and others import these names, not its insides."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import sdquant

ROOT = Path(sdquant.__file__).parent
ROOMS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
FILES = sorted(ROOT.rglob("*.py"))
# Not rooms with insides: others import their files.
OPEN = {"utils": "independent helpers, whose names need that of their file", "errors": "a file by itself"}
# (a module, what it imports) that the room does not export to it, and why.
EXCEPTIONS = {
    ("backends", "core.registry"): "exports the registry's functions as its own",
    ("", "planning.preparation"): "its `plan` is `sdquant.plan`; in `planning` the name is that of a module",
}
IN_THREADS = """
import threading
from sdquant import core, models, nn, planning, rules

def use(number):
    barrier.wait()
    for room in rooms[number % len(rooms):] + rooms[:number % len(rooms)]:
        for name in room.__all__:
            try:
                exec(f"from {room.__name__} import {name}", {})
            except BaseException as error:
                wrong.append(f"{room.__name__}.{name}: {error!r}")

rooms, wrong, barrier = [core, models, nn, planning, rules], [], threading.Barrier(8)
threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("; ".join(wrong), end="")
"""


def _name(path: Path) -> str:
    """The dotted name of a module below `sdquant`; empty for the package itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _insides(path: Path) -> list[tuple[ast.ImportFrom, str]]:
    """Imports of a file, those in functions and for types as well, from a module inside another room."""
    name = _name(path)
    package = ["sdquant", *filter(None, name.split("."))]
    if path.name != "__init__.py":
        package = package[:-1]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        start = package[: len(package) - node.level + 1] if node.level else []
        top, _, place = ".".join([*start, *filter(None, [node.module])]).partition(".")
        room, _, inside = place.partition(".")
        if top != "sdquant" or not room or room in OPEN or room == name.partition(".")[0]:
            continue
        if inside or not set(_exports(room)) >= {alias.name for alias in node.names}:
            found.append((node, place))
    return found


def _exports(room: str) -> list[str]:
    return list(getattr(importlib.import_module(f"sdquant.{room}"), "__all__", ()))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_is_for(room: str) -> None:
    text = importlib.import_module(f"sdquant.{room}").__doc__ or ""
    assert len(text.strip().splitlines()) <= 10
    assert "May import" in text and (room in OPEN or ("In: " in text and "Out: " in text) or "In and out: " in text)


@pytest.mark.parametrize("room", sorted({*ROOMS} - {*OPEN}))
def test_a_room_exports_what_it_lists(room: str) -> None:
    """And no name is that of a module of the room, which would take its place as soon as it is imported."""
    names = _exports(room)
    assert len(set(names)) == len(names)
    namespace: dict[str, object] = {}
    for name in names:
        exec(f"from sdquant.{room} import {name}", namespace)
    modules = {path.stem for path in (ROOT / room).glob("*.py")} | {
        path.parent.name for path in (ROOT / room).glob("*/__init__.py")
    }
    assert not [name for name in {*names} & modules if not isinstance(namespace[name], ModuleType)]


def test_other_rooms_import_what_is_exported() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: import from sdquant.{place.partition('.')[0]}, and export there what "
        f"is missing, instead of: {ast.unparse(node)}"
        for path in FILES
        for node, place in _insides(path)
        if (_name(path), place) not in EXCEPTIONS
    ]
    assert not found, "\n".join(found)


def test_exceptions_are_needed() -> None:
    assert {(_name(path), place) for path in FILES for _, place in _insides(path)} >= {*EXCEPTIONS}


def test_first_uses_in_threads() -> None:
    done = subprocess.run([sys.executable, "-c", IN_THREADS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr[-2000:]


def test_a_name_that_is_not_exported() -> None:
    with pytest.raises(ImportError, match="planing"):
        exec("from sdquant.planning import planing")
