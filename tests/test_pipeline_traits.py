"""Samplers: the chosen one is what its name says, whatever the model's own is."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest

from sdquant.errors import SettingsError
from sdquant.models import sampling_with, traits


def _config(own: Any, sampler: str) -> Any:
    pipe = SimpleNamespace(scheduler=own)
    with sampling_with(pipe, sampler):
        other = pipe.scheduler
    assert pipe.scheduler is own
    return other.config


def test_options_of_the_own_sampler_are_not_those_of_another() -> None:
    own = diffusers.DPMSolverMultistepScheduler(
        use_karras_sigmas=True, algorithm_type="sde-dpmsolver++", beta_end=0.015, solver_order=3
    )
    plain, karras = _config(own, "DPM++ 2M"), _config(own, "DPM++ 2M Karras")
    assert (plain.use_karras_sigmas, plain.algorithm_type, plain.solver_order) == (False, "dpmsolver++", 2)
    assert karras.use_karras_sigmas and karras.beta_end == plain.beta_end == 0.015
    assert not _config(own, "UniPC").use_karras_sigmas


def test_what_a_sampler_is_by_its_options() -> None:
    euler = diffusers.EulerDiscreteScheduler()
    assert _config(euler, "PLMS").skip_prk_steps and not _config(euler, "DDIM").clip_sample
    assert _config(diffusers.DDIMScheduler(clip_sample=True), "DDIM").clip_sample  # of a model of pixels


@pytest.mark.parametrize("options", [{"use_flow_sigmas": True}, {"prediction_type": "flow_prediction"}])
def test_flow_matching_has_samplers_of_its_own(options: dict[str, Any], tmp_path: Path) -> None:
    own = diffusers.UniPCMultistepScheduler(**options)
    with pytest.raises(SettingsError, match="does not support it"):
        _config(own, "Euler")
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    own.save_pretrained(tmp_path / "scheduler")
    assert traits(tmp_path).negative and not traits(tmp_path).samplers
    (tmp_path / "model_index.json").write_text("[" * 100_000)
    assert not traits(tmp_path).negative
