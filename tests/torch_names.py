"""The names of torch that a package uses, out of its source.

`python tests/torch_names.py SDQUANT` prints those that the torch of this Python lacks."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

# Names that torch 2.6 lacks, each used in one file, behind a question whether torch has it.
NEWER = {"torch.float4_e2m1fn_x2": "kernels/block_scaled.py"}


def used(tree: ast.AST) -> Iterator[str]:
    """Give "torch.nn.functional.linear" for such an expression, and for an import of it."""
    for node in ast.walk(tree):
        names: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        if names and isinstance(inner, ast.Name) and inner.id == "torch":
            yield ".".join(("torch", *reversed(names)))
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def lacks(package: Path) -> list[str]:
    """Return "file: name" for each name that is not there."""
    missing = []
    for file in sorted(package.rglob("*.py")):
        place = file.relative_to(package).as_posix()
        for name in dict.fromkeys(used(ast.parse(file.read_text(encoding="utf-8")))):
            if NEWER.get(name) != place and not name.startswith("torch.ops.") and not _is_there(name):
                missing.append(f"{place}: {name}")
    return missing


def _is_there(name: str) -> bool:
    """A module may have a function of its own name, so that modules are looked for from the end."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


if __name__ == "__main__":
    print("\n".join(lacks(Path(sys.argv[1]))))
