"""Video models in files of their authors: told by their names, read tensor by tensor, quantized as from a folder.

Small models with random weights. diffusers' own `from_single_file` is the judge of the names, where it serves.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

import sdquant
from sdquant.weights import plain, quantized

from . import video_models
from .video_models import MODELS

if TYPE_CHECKING:
    from .video_models import Made, State


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    yield video_models.made(request.param, tmp_path_factory.mktemp("video"))


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> int:
    """Both have the same tensors and packed weights, bit for bit; returns how many of the latter."""
    packed, floats = dict(quantized(one)), plain(one)
    others = dict(quantized(other)), plain(other)
    assert packed.keys() == others[0].keys() and floats.keys() == others[1].keys()
    for name, weight in packed.items():
        assert weight.spec == others[0][name].spec, name
        assert all(torch.equal(part, others[0][name].parts[key]) for key, part in weight.parts.items()), name
    for name, tensor in floats.items():
        assert torch.equal(tensor, others[1][name]), name
    return len(packed)


def of_diffusers(made: Made) -> State:
    """What diffusers itself makes of the authors' file."""
    import diffusers
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    cls = getattr(diffusers, made.row.class_name)
    if not hasattr(cls, "from_single_file"):  # listed among those that have it, and without it
        return dict(SINGLE_FILE_LOADABLE_CLASSES[made.row.class_name]["checkpoint_mapping_fn"](dict(made.authors)))
    file, config = str(made.files[made.row.theirs]), str(made.folder)
    return dict(cls.from_single_file(file, config=config, torch_dtype=torch.bfloat16).state_dict())


def test_diffusers_reads_the_same_file(made: Made) -> None:
    """Or it does not, and then we do it ourselves: should it learn to, our own way is to go."""
    try:
        state = of_diffusers(made)
    except (RuntimeError, KeyError, NotImplementedError, ValueError):
        state = {}
    wanted = made.state
    same = state.keys() == wanted.keys() and all(torch.equal(tensor, wanted[name]) for name, tensor in state.items())
    assert same == made.row.served


def test_family_and_component_are_told(made: Made) -> None:
    for prefix in made.row.prefixes:
        seen = sdquant.detect(made.files[prefix])
        assert (seen.family, seen.component) == (made.row.family, made.row.component), prefix


def test_every_tensor_arrives(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    for prefix in made.row.prefixes:
        with caplog.at_level(logging.WARNING):
            state = sdquant.load_model(made.files[prefix], progress=False).state_dict()
        assert state.keys() == made.state.keys()
        for name, tensor in made.state.items():
            assert torch.equal(state[name], tensor), name
    assert not caplog.records


def test_quantized_on_the_fly_as_from_a_folder(made: Made) -> None:
    prefix = made.row.prefixes[-1]
    got = sdquant.load_model(made.files[prefix], "int8", progress=False)
    assert same_weights(got, sdquant.load_model(made.folder, "int8", progress=False)) > 5
