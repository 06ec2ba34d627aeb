"""diffusers and transformers, imported by several threads at once: the first things that a server's threads do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import sdquant

ROOT = Path(sdquant.__file__).parent
# What runs alone in its process, or after diffusers: the makers of the shipped models, a benchmark's worker, and the
# classes that diffusers and transformers themselves import this package for.
ALONE = ("demo/", "evaluation/benchmark/", "integrations/", "models/libraries.py")
FIRST_USES = """
import sys, threading, time
import sdquant

def use(number):
    time.sleep(number * 0.1)
    try:
        sdquant.detect(folder) if number % 2 else sdquant.load_model(folder, progress=False)
    except BaseException as error:
        wrong.append(repr(error))

folder, wrong = sdquant.demo.path("digits-sd"), []
threads = [threading.Thread(target=use, args=(number,)) for number in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit("; ".join(wrong) or None)
"""


def test_first_uses_in_threads() -> None:
    """A statement `import diffusers` in a second thread gave a module without a name in it."""
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-2000:]


def test_no_statement_imports_their_names() -> None:
    """An import of a module inside them, such as `from diffusers.hooks import ModelHook`, is no trouble once a model is
    there; one of the package's own names may be the first import of all."""
    found = []
    for path in ROOT.rglob("*.py"):
        place = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        typing = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if node not in typing and {"diffusers", "transformers"} & set(names) and not place.startswith(ALONE):
                found.append(f"{place}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "use models/libraries.py: " + ", ".join(found)
