"""State dicts of an offloaded model: given and taken as if it were not offloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from sdquant import offload
from sdquant.models import pipelines

from .conftest import draw, hooked, made, same_state, state_of
from .test_modes import MODES, quantize, settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCHEMES = (None, "nf4,double_quant")


@pytest.fixture(params=SCHEMES, ids=str)
def scheme(request: pytest.FixtureRequest) -> Any:
    return request.param


def pipeline(scheme: str | None, *, other: bool = False) -> Any:
    pipe = made("sd")
    if other:
        for weight in weights(pipe):
            weight.data.mul_(1.2).add_(0.01)
    return pipe if scheme is None else quantize(pipe, scheme)


def weights(pipe: Any) -> Iterator[torch.nn.Parameter]:
    for part in pipelines.components_of(pipe).values():
        yield from (row for row in part.parameters() if row.ndim > 1)


@pytest.mark.parametrize("mode", MODES)
def test_given(mode: str, scheme: str | None, tmp_path: Path) -> None:
    pipe = pipeline(scheme)
    before, expected = state_of(pipe), draw(pipe)
    handle = offload.apply(pipe, mode, **settings(mode, pipe, tmp_path))
    assert same_state(pipe, before)
    draw(pipe)
    given = {name: part.state_dict() for name, part in pipelines.components_of(pipe).items()}
    own = pipe.unet.conv_in.state_dict()
    assert (draw(pipe) == expected).all()  # the mode is at work again
    handle.remove()
    assert all(torch.equal(row, before[f"{name}.{key}"]) for name in given for key, row in given[name].items())
    assert own and all(torch.equal(row, before[f"unet.conv_in.{key}"]) for key, row in own.items())


@pytest.mark.parametrize("mode", MODES)
def test_taken(mode: str, scheme: str | None, tmp_path: Path) -> None:
    pipe, other = pipeline(scheme), pipeline(scheme, other=True)
    expected = draw(other)
    handle = offload.apply(pipe, mode, **settings(mode, pipe, tmp_path))
    assert not (draw(pipe) == expected).all()
    for name, part in pipelines.components_of(pipe).items():
        part.load_state_dict(pipelines.components_of(other)[name].state_dict())
    for _ in range(2):  # also after the weights were given up
        assert (draw(pipe) == expected).all()
    handle.remove()
    assert not hooked(pipe) and same_state(pipe, state_of(other))


@pytest.mark.parametrize("mode", MODES)
def test_taken_by_one_layer(mode: str, scheme: str | None, tmp_path: Path) -> None:
    pipe, other = pipeline(scheme), pipeline(scheme, other=True)
    handle = offload.apply(pipe, mode, **settings(mode, pipe, tmp_path))
    draw(pipe)
    pipe.unet.conv_in.load_state_dict(other.unet.conv_in.state_dict())
    changed = draw(pipe)
    handle.remove()
    assert same_state(pipe.unet.conv_in, state_of(other.unet.conv_in))
    assert (draw(pipe) == changed).all()


@pytest.mark.parametrize("mode", MODES)
def test_what_does_not_fit_leaves_the_mode_at_work(mode: str, tmp_path: Path) -> None:
    pipe = pipeline(None)
    expected = draw(pipe)
    handle = offload.apply(pipe, mode, **settings(mode, pipe, tmp_path))
    with pytest.raises(RuntimeError, match="Missing key"):
        pipe.unet.load_state_dict({})
    assert (draw(pipe) == expected).all()
    parameters = pipe.unet.state_dict(keep_vars=True)  # the model's own, where they are
    assert all(row is parameters[name] for name, row in pipe.unet.named_parameters())
    assert parameters.keys() == pipe.unet.state_dict().keys()
    handle.remove()
    assert not hooked(pipe)
