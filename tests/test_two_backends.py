"""A file whose layers two libraries have quantized: each is read as what it is, and the matrix is asked about both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import sdquant
from sdquant.errors import ConflictError, IncompatibleError
from sdquant.nn.weights import quantized

from .entry_points import answers
from .malformed import CONFIG, NAME, OTHER, tiny
from .malformed import WEIGHTS as FILE

KEEP = ["time_text_embed", "context_embedder", "x_embedder", "norm", "norm_out", "attn", "proj_out*"]
# The more bytes are in the first.
PAIRS = [("nf4", "qint8"), ("qint8", "nf4"), ("bnb-int8", "qint4"), ("nf4", "qint4")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model in each scheme alone."""
    folder = tmp_path_factory.mktemp("alone")
    source = tiny(folder / "float")
    for scheme in {name for pair in PAIRS for name in pair}:
        model = sdquant.load_model(source, scheme, runtime="plain", skip=KEEP, progress=False)
        sdquant.save(model, folder / scheme)
    return {path.name: path for path in folder.iterdir()}


def _joined(alone: dict[str, Path], first: str, second: str, place: Path) -> Path:
    """NAME of `first`, OTHER of `second`, and the rest, without sdquant's metadata."""
    place.mkdir()
    one, two = (load_file(alone[scheme] / FILE) for scheme in (first, second))
    stem = OTHER.removesuffix("weight")
    tensors = {key: tensor for key, tensor in one.items() if not key.startswith(stem)}
    save_file(tensors | {key: tensor for key, tensor in two.items() if key.startswith(stem)}, place / FILE)
    (place / "config.json").write_text((alone["float"] / "config.json").read_text())
    return place


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("runtime", ["plain", "library"])
def test_each_layer_is_what_it_was(
    first: str, second: str, runtime: str, alone: dict[str, Path], tmp_path: Path
) -> None:
    folder = _joined(alone, first, second, tmp_path / "both")
    assert set(answers(folder).values()) == {None}
    wanted = {
        name: dict(quantized(sdquant.load_model(alone[scheme], runtime="plain", progress=False)))[name]
        for name, scheme in ((NAME, first), (OTHER, second))
    }
    loaded = dict(quantized(sdquant.load_model(folder, runtime=runtime, progress=False)))
    assert loaded.keys() == wanted.keys()
    for name, packed in loaded.items():
        assert packed.spec.scheme == wanted[name].spec.scheme
        values = (one.spec.scheme.codec.decode(one, torch.float32) for one in (packed, wanted[name]))
        assert torch.equal(*values)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_matrix_is_asked_about_both(first: str, second: str, alone: dict[str, Path], tmp_path: Path) -> None:
    """It was asked about that of the most bytes."""
    folder = _joined(alone, first, second, tmp_path / "both")
    for ask in (sdquant.plan, sdquant.load_model):
        with pytest.raises(IncompatibleError, match="QBytesTensor"):
            ask(folder, None, "balanced", runtime="library", budget="1MB", progress=False)
    model = sdquant.load_model(folder, None, "balanced", runtime="plain", budget="1MB", progress=False)
    assert len(dict(quantized(model))) == 2


def test_another_scheme_is_refused(alone: dict[str, Path], tmp_path: Path) -> None:
    assert CONFIG["num_single_layers"] == 1
    folder = _joined(alone, "nf4", "qint8", tmp_path / "both")
    with pytest.raises(ConflictError, match="quantized to"):
        sdquant.load_model(folder, "int8", progress=False)
