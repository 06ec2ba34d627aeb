"""The shipped models, and what sdquant makes of them, once per session."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sdquant
from sdquant import backends
from sdquant.models.components import quiet

from .fast import COLLECTED, is_slow
from .field.table import rows_of

Saved = Callable[..., Path]


_frozen: tuple[int, Path | None] = 0, None  # how many modules there were, and the file of the test


# What is faster is found out while models run, and kept beside the user's settings: in tests it is never asked.
os.environ.setdefault("SDQUANT_TUNE", "0")
# One thread, also without the variable that the README names: the memory that torch takes inside of convolutions and
# the last bits of its SVD depend on it.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))


def _freeze(file: Path | None = None) -> None:
    """What was imported and collected stays to the end. Without this every full collection of garbage, of which there
    is one whenever a model is offloaded, walks through all of it, which takes as long as loading a shipped model."""
    global _frozen
    gc.collect()
    gc.freeze()
    _frozen = len(sys.modules), file


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Nothing that is collected becomes garbage; to look for some took a fifth of the time."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)  # before those that `-m` leaves out are
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that try again what reports showed, `pytest -m field`, and those that `fast.yaml` has not."""
    config.stash[COLLECTED] = [item.nodeid for item in items]
    for item in items:
        if rows_of(item.nodeid):
            item.add_marker("field")
        if is_slow(item.nodeid):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    gc.enable()
    _freeze()


@pytest.fixture(autouse=True)
def forgotten_graphs() -> Iterator[None]:
    """What a test compiled is not there in the next: dynamo refuses the ninth graph of a function, such as a layer's
    `forward`, whichever tests of the same process compiled the others."""
    yield
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is not None and utils.counters["stats"]:
        import torch

        torch.compiler.reset()
        utils.counters.clear()


def pytest_unconfigure() -> None:
    """As it was, for what libraries look at when the interpreter ends."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Libraries are imported by the first test that needs them, and keep what they compiled for the tests of a file."""
    modules, file = _frozen
    if len(sys.modules) > modules + 100 or item.path != file:
        _freeze(item.path)


@pytest.fixture(scope="session")
def sd() -> Path:
    """The shipped Stable Diffusion pipeline."""
    return sdquant.demo.path("digits-sd")


@pytest.fixture(scope="session")
def flux() -> Path:
    """The shipped Flux pipeline."""
    return sdquant.demo.path("digits-flux")


@pytest.fixture(scope="session")
def loaded() -> Callable[..., Any]:
    """loaded(scheme, model="digits-sd", runtime=None): the quantized pipeline, loaded once. Do not change it."""
    made: dict[tuple[str, ...], Any] = {}

    def load(scheme: str, model: str = "digits-sd", runtime: str | None = None) -> Any:
        key = (scheme, model, str(runtime))
        if key not in made:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what other libraries say while they are imported
                made[key] = sdquant.load_model(sdquant.demo.path(model), scheme, runtime=runtime, progress=False)
        return made[key]

    return load


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, loaded: Callable[..., Any]) -> Saved:
    """saved(scheme, model="digits-sd", runtime="plain"): the folder with that model in that scheme, written once.

    Schemes that only files have are written by `quantize_file`. Do not change the folder: copy it.
    """
    made: dict[tuple[str, ...], Path] = {}

    def save(scheme: str, model: str = "digits-sd", runtime: str | None = "plain") -> Path:
        key = (scheme, model, str(runtime))
        if key not in made:
            target = tmp_path_factory.mktemp("saved") / model
            if backends.parse(scheme).scheme.on_the_fly:
                sdquant.save(loaded(scheme, model, runtime), target)
            else:
                from sdquant.saving.export_gguf import quantize_file

                quantize_file(sdquant.demo.path(model), scheme, target, progress=False)
            made[key] = target
        return made[key]

    return save


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """foreign(name): a file or folder that another tool wrote, or writes in the same way; see `foreign.py`."""
    from . import foreign as makers

    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecations of diffusers' quantizers
                made[name] = makers.ROWS[name].make(tmp_path_factory.mktemp("foreign"))
        return made[name]

    return get


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """small("sdxl" | "sd3" | "sd3-no-t5"): the folder of a small pipeline with random weights. Do not change it."""
    from . import small_pipelines as makers

    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            with warnings.catch_warnings(), quiet():
                warnings.simplefilter("ignore")  # what other libraries say while they are imported
                made[name] = makers.ROWS[name](tmp_path_factory.mktemp("small") / name)
        return made[name]

    return get


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder for gigabytes, gone as soon as the test is over: pytest keeps the folders of its last runs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def shell(source: Path, target: Path) -> Path:
    """A copy of a pipeline's folder without any weights: configs, tokenizers, scheduler."""
    return Path(shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors")))


def header_length(path: Path) -> int:
    """Bytes of a safetensors file before its data."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def headers_only(source: Path, target: Path) -> Path:
    """A copy of a model folder whose weight files end where their headers do: nothing in it can be loaded."""
    shutil.copytree(source, target)
    for path in target.rglob("*.safetensors"):
        with path.open("r+b") as file:
            file.truncate(header_length(path))
    for path in target.rglob("*.gguf"):
        from sdquant.formats.gguf.file import read_header

        start = read_header(path).data_offset
        with path.open("r+b") as file:
            file.truncate(start)
    return target


@pytest.fixture
def compiled_kernels(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Triton keeps what it compiles: one place for all tests, processes and runs. What has changed
    it compiles again, and all of it after a change of its own version."""
    path: Path = pytestconfig.cache.mkdir("triton")  # type: ignore[union-attr]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(path))
    return path
