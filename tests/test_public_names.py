"""The public names: what is promised can be imported, nothing else is promised, and importing costs nothing."""

from __future__ import annotations

import ast
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import sdquant
from sdquant import backends, compat, errors

ROOT = Path(sdquant.__file__).parent
HEAVY = (
    "torch", "diffusers", "transformers", "accelerate", "safetensors", "numpy", "gradio", "bitsandbytes", "optimum",
    "nncf", "gguf", "libgguf", "sdnq", "sklearn", "PIL", "matplotlib", "tqdm", "huggingface_hub", "yaml", "packaging",
    "peft",
)  # fmt: skip

# DESIGN section 4.
PROMISED = {
    "load_model", "suffix_hint", "detect", "verify", "plan", "check", "quantize", "save", "backends", "compat", "demo",
    "dequantize",
    "SdquantError", "UnknownQuantError", "UnknownOffloadError", "IncompatibleError", "BackendUnavailableError",
    "BadFileError", "UnsupportedFileError", "ConflictError", "MissingComponentError", "BudgetError", "SettingsError",
    "DiskSpaceError", "DistributedError", "TrainingError",
}  # fmt: skip


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.strip()


def test_all_is_what_can_be_imported() -> None:
    assert len(set(sdquant.__all__)) == len(sdquant.__all__)
    assert [*sdquant.__all__] == sorted(sdquant.__all__)
    for name in sdquant.__all__:
        assert getattr(sdquant, name) is not None
    # What a fresh process sees after touching every name: these, and modules of the package, and nothing else.
    seen = _python(
        "import sdquant, types\n"
        "for name in sdquant.__all__: getattr(sdquant, name)\n"
        "mine = {name: value for name, value in vars(sdquant).items() if not name.startswith('_')}\n"
        "names = {name for name, value in mine.items() if not isinstance(value, types.ModuleType)}\n"
        "print(*sorted(names - set(sdquant.__all__)))"
    )
    assert seen in ("", "TYPE_CHECKING annotations")


def test_what_is_promised_is_there() -> None:
    assert set(sdquant.__all__) >= PROMISED
    assert set(dir(sdquant)) >= set(sdquant.__all__)
    namespace: dict[str, object] = {}
    exec("from sdquant import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(sdquant.__all__)


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="quantise"):
        _ = sdquant.quantise
    with pytest.raises(ImportError, match="loadmodel"):
        exec("from sdquant import loadmodel")


def test_lazy_names_are_the_things_themselves() -> None:
    from sdquant.loading import loader, quantizer, verification
    from sdquant.models import detection
    from sdquant.saving import model_files

    assert sdquant.load_model is loader.load_model
    assert sdquant.detect is detection.detect and sdquant.Detected is detection.Detected
    assert sdquant.quantize is quantizer.quantize and sdquant.save is model_files.save
    assert sdquant.verify is verification.verify and sdquant.check is compat.check


def test_a_submodule_does_not_hide_a_function() -> None:
    """`sdquant.plan` stays the function whatever is imported: no module of the package is called like a public name."""
    modules = {info.name for info in pkgutil.iter_modules([str(ROOT)])}
    public = {name for name in sdquant.__all__ if not isinstance(getattr(sdquant, name), ModuleType)}
    assert not modules & public


def test_every_module_defines_something() -> None:
    """A name has one home; only the `__init__` of a room hands on names of others."""
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports = any(isinstance(node, ast.ImportFrom) and node.level for node in tree.body)
        own = (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
        names = [
            node for node in tree.body if isinstance(node, own) and "__all__" not in ast.unparse(node).split(" = ")
        ]
        assert path.name in ("__init__.py", "__main__.py") or names or not imports, path


def test_other_public_names_of_the_design() -> None:
    assert {"bnb", "quanto", "gguf", "nncf"} <= set(backends.names())
    assert backends.get("bnb").name == "bnb"
    row = backends.schemes()[0]
    assert row.name and row.backend and row.bits
    assert compat.matrix(device="cpu", schemes=["nf4"])
    assert sdquant.demo.path("digits-sd").is_dir()


def test_errors_are_a_tree_under_one_root_and_all_are_public() -> None:
    classes = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    kinds = [kind for kind in classes if not issubclass(kind, Warning)]
    assert {kind.__name__ for kind in kinds} <= set(sdquant.__all__)
    for kind in kinds:
        assert issubclass(kind, sdquant.SdquantError) and kind.__doc__
        assert kind.__name__ in str(errors.__doc__)
        made = kind("It was asked for", "it cannot be", "Do this")
        assert (made.what, made.why, made.fix) == ("It was asked for", "it cannot be", "Do this")
        assert str(made) == "It was asked for: it cannot be. Do this."
        assert not isinstance(made, (KeyError, OSError))  # whose texts are quoted or replaced


def test_an_error_survives_a_worker_process() -> None:
    import pickle

    made = pickle.loads(pickle.dumps(errors.BadFileError("a", "b", "c")))
    assert type(made) is errors.BadFileError and (made.what, made.why, made.fix) == ("a", "b", "c")


@pytest.mark.parametrize(
    "code",
    [
        "import sdquant",
        "import sdquant; sdquant.backends.schemes()",
        "import sdquant; sdquant.suffix_hint('model-nf4.safetensors')",
        "import sdquant; sdquant.demo.path('digits-sd')",
        "from sdquant import load_model, plan, quantize, save, verify, check",
        "import sdquant.cli; sdquant.cli.parser()",
    ],
)
def test_importing_imports_no_library(code: str) -> None:
    loaded = set(_python(f"{code}\nimport sys\nprint(*sys.modules)").split())
    heavy = set(HEAVY) & {name.partition(".")[0] for name in loaded}
    if "schemes" in code or "load_model" in code or "cli" in code or "hint" in code:
        heavy -= {"packaging"}  # small, and needed where versions are compared
    assert not heavy


def test_importing_prints_and_logs_nothing() -> None:
    assert _python("import sdquant") == ""


def test_every_module_can_be_imported_alone() -> None:
    """In a fresh process each: none relies on another having been imported first. Those without torch, for the time."""
    light = [
        "errors", "compat.hardware", "models.detection", "planning.planner", "planning.request",
        "planning.weight_selection", "compat", "offload", "formats.checkpoint",
    ]  # fmt: skip
    for name in light:
        _python(f"import sdquant.{name}")


def test_version_is_that_of_the_distribution() -> None:
    text = (ROOT.parent / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.*)"$', text, flags=re.MULTILINE).group(1) == sdquant.__version__  # type: ignore[union-attr]
    assert (ROOT / "py.typed").exists()
