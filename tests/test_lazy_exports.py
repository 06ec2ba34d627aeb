"""Exports that are imported when they are first used, also where another tool's loader stands before Python's own."""

from __future__ import annotations

import subprocess
import sys

WRAPPED = """
import sys, importlib.abc
class Loader(importlib.abc.Loader):  # as slipcover's: it has no get_source
    def __init__(self, own): self.own = own
    def create_module(self, spec): return self.own.create_module(spec)
    def exec_module(self, module): self.own.exec_module(module)
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if not name.startswith("sdquant"): return None
        for finder in [one for one in sys.meta_path if one is not self]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = Loader(spec.loader)
                return spec
sys.meta_path.insert(0, Finder())
from sdquant.core import PackedSpec
print(PackedSpec.__module__)
"""


def test_a_loader_without_sources() -> None:
    done = subprocess.run([sys.executable, "-c", WRAPPED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["sdquant.core.backend"]
