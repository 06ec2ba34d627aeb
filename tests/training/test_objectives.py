"""What the network is asked and is to answer, against numpy; and how it is called, against the pipelines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sdquant
from sdquant.errors import SettingsError
from sdquant.models.generate import draw
from sdquant.models.pipelines import main_part
from sdquant.training import losses, pipeline_types, rng
from sdquant.training.latent_cache import Batch, Encoded

from .. import small_pipelines

if TYPE_CHECKING:
    from sdquant.training.settings import TrainingSettings


def _batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(3, 4, 2, 2, generator=generator) for _ in range(2))
    return Batch(
        clean=clean,
        noise=noise,
        time=torch.tensor([0.0, 0.4217, 0.9999]),
        guidance=torch.ones(3),
        conditions={},
        teaching={},
    )


@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
def test_noised_as_the_formulas_say(kind: str, loaded: Callable[..., Any]) -> None:
    """x_t = sqrt(a) x + sqrt(1 - a) e, and v = sqrt(a) e - sqrt(1 - a) x (arXiv:2202.00512); a by numpy."""
    import copy

    pipe = copy.copy(loaded("none"))
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, prediction_type=kind)
    batch = _batch()
    noisy, time, target = losses.of(pipe, pipeline_types.of(pipe)).question(batch)
    beta = np.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=np.float64) ** 2
    alpha = np.cumprod(1 - beta)[[0, 421, 999]][:, None, None, None]
    clean, noise = batch.clean.double().numpy(), batch.noise.double().numpy()
    assert time.tolist() == [0, 421, 999]
    assert np.allclose(noisy.numpy(), np.sqrt(alpha) * clean + np.sqrt(1 - alpha) * noise, atol=1e-5)
    wanted = {"epsilon": noise, "sample": clean, "v_prediction": np.sqrt(alpha) * noise - np.sqrt(1 - alpha) * clean}
    assert np.allclose(target.numpy(), wanted[kind], atol=1e-5)


def test_flow_as_the_formulas_say() -> None:
    """x_t = (1 - t) x + t e, its derivative e - x, and the time moved by the scheduler's shift."""
    batch = _batch()
    objective = losses.Objective(family=pipeline_types.FAMILIES["FluxPipeline"], shift=3.0)
    noisy, time, target = objective.question(batch)
    u = batch.time.double().numpy()
    t = 3 * u / (1 + 2 * u)
    clean, noise = batch.clean.double().numpy(), batch.noise.double().numpy()
    assert np.allclose(time.numpy(), t)
    t = t[:, None, None, None]
    assert np.allclose(noisy.numpy(), (1 - t) * clean + t * noise, atol=1e-6)
    assert np.allclose(target.numpy(), noise - clean, atol=1e-6)


def test_other_schedulers_and_pipelines_are_refused(loaded: Callable[..., Any]) -> None:
    import copy

    from diffusers import FlowMatchEulerDiscreteScheduler

    pipe = copy.copy(loaded("none"))
    pipe.scheduler = FlowMatchEulerDiscreteScheduler()
    with pytest.raises(SettingsError, match="prediction_type is None"):
        losses.of(pipe, pipeline_types.of(pipe))
    with pytest.raises(SettingsError, match="a FluxPipeline is trained by flow matching"):
        flux = copy.copy(loaded("none", "digits-flux"))
        flux.scheduler = loaded("none").scheduler
        losses.of(flux, pipeline_types.of(flux))
    with pytest.raises(SettingsError, match=r"a Module.*only StableDiffusionPipeline"):
        pipeline_types.of(torch.nn.Module())


def _calls(net: Any, run: Callable[[], object]) -> tuple[list[tuple[Any, dict[str, Any]]], list[Any]]:
    """What the network is called with while `run` runs, and what it answers."""
    calls, answers = [], []

    def keep(_: Any, args: Any, kwargs: dict[str, Any], answer: Any) -> None:
        calls.append((args, kwargs))
        answers.append(answer[0] if isinstance(answer, tuple) else answer.sample)

    handle = net.register_forward_hook(keep, with_kwargs=True)
    try:
        run()
    finally:
        handle.remove()
    return calls, answers


@pytest.mark.parametrize("kind", ["sd", "flux", "sdxl", "sd3"])
def test_called_as_the_pipeline_calls_it(kind: str, tmp_path: Path, sd: Path, flux: Path) -> None:
    """The same question gives the same answer. Text in batches of another size, and 1000 * (t / 1000), round."""
    exact = {"sd": 0.0, "flux": 0.0, "sdxl": 1e-5, "sd3": 1e-5}
    made = {
        "sd": lambda: sd,
        "flux": lambda: flux,
        "sdxl": lambda: small_pipelines.sdxl(tmp_path / "m"),
        "sd3": lambda: small_pipelines.sd3(tmp_path / "m"),
    }
    pipe = sdquant.load_model(made[kind](), dtype="float32", progress=False)
    net, prompt = main_part(pipe), "a handwritten seven"
    calls, answers = _calls(net, lambda: draw(pipe, [prompt], seeds=[0], steps=1))
    args, kwargs = calls[0]
    inputs: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    time = kwargs["timestep"] if "timestep" in kwargs else args[1]
    guided = kind in ("sd", "sdxl", "sd3")  # in one batch: the empty prompt, then the prompt
    conditions = pipeline_types.encode(pipe, ["", prompt] if guided else [prompt], 0, 32)
    guidance = torch.full((1,), 3.5)
    answer = answers[0]
    if kind == "flux":
        side = int(inputs.shape[1] ** 0.5)
        inputs, answer = (
            torch.nn.functional.pixel_shuffle(row.transpose(1, 2).unflatten(2, (side, side)), 2)
            for row in (inputs, answer)
        )
    if kind == "sd3":
        time = time / 1000
    with torch.no_grad():
        mine = pipeline_types.of(pipe).call(net, inputs, time.expand(len(inputs)), conditions, guidance)
    assert torch.allclose(mine, answer, rtol=0, atol=exact[kind])


def _encoded(count: int = 5) -> Encoded:
    return Encoded(
        latents=torch.arange(count).float().reshape(count, 1, 1, 1).expand(-1, 1, 2, 2).clone(),
        prompts=("", "a", "b"),
        captions=((1, 2),) * count,
        conditions={"states": torch.arange(3).float()[:, None]},
        teaching={},
        side=8,
    )


def test_every_picture_once_an_epoch() -> None:
    for epoch in range(3):
        seen = [rng.item_at(7, position, 5) for position in range(5 * epoch, 5 * epoch + 5)]
        assert sorted(seen) == list(range(5))
    orders = {tuple(rng.item_at(7, 5 * epoch + k, 5) for k in range(5)) for epoch in range(8)}
    assert len(orders) > 4


def test_an_example_does_not_depend_on_its_batch(settings: Callable[..., TrainingSettings]) -> None:
    data = _encoded()
    whole = data.batch(settings(), range(8), flow=True)
    part = data.batch(settings(), range(4, 8), flow=True)
    assert torch.equal(whole.noise[4:], part.noise) and torch.equal(whole.clean[4:], part.clean)
    assert torch.equal(whole.time[4:], part.time) and len(set(whole.time.tolist())) == 8
    assert torch.equal(whole.conditions["states"][4:], part.conditions["states"])


def test_what_is_drawn(settings: Callable[..., TrainingSettings]) -> None:
    """Shares over 2000 examples, which a fair coin misses by more than this once in 10**4."""
    many = _encoded().batch(settings(cond_dropout=0.25, guidance_min=1.0, guidance_max=4.0), range(2000), flow=False)
    prompts = many.conditions["states"][:, 0]
    assert abs((prompts == 0).float().mean() - 0.25) < 0.04
    assert abs((prompts == 1).float().mean() - 0.375) < 0.045
    assert abs(many.noise.mean()) < 0.05 and abs(many.noise.std() - 1) < 0.04
    assert abs(many.time.mean() - 0.5) < 0.03 and many.time.min() >= 0 and many.time.max() < 1
    assert many.guidance.min() >= 1 and many.guidance.max() <= 4 and abs(many.guidance.mean() - 2.5) < 0.08
    never = _encoded().batch(settings(cond_dropout=0.0), range(200), flow=True)
    assert (never.conditions["states"] > 0).all()
