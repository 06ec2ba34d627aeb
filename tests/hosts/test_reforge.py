"""reForge's loads, by its stand-in: quantized before its mover sees the model, and anew when a setting changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdquant import IncompatibleError
from sdquant.errors import ConflictError
from sdquant.hosts import load_hooks

from .conftest import Running

pytestmark = pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated:FutureWarning")

Start = Callable[[str], Running]


def _schemes(engine: Any) -> tuple[set[str], set[str]]:
    objects = engine.forge_objects
    modules = objects.unet.model.diffusion_model, objects.clip.cond_stage_model
    return load_hooks.schemes_in(modules[0]), load_hooks.schemes_in(modules[1])


def test_a_changed_setting_takes_effect_with_the_next_request(host: Start, sd: Path) -> None:
    """Also for a model that is kept beside another one."""
    running = host("reforge")
    running.start()
    opts, models = running.modules.shared.opts, running.modules.sd_models
    opts.data["sd_checkpoints_limit"] = 2
    one, other = (SimpleNamespace(filename=str(name)) for name in (sd, sd / "unet" / ".."))
    floats = models.reload_model_weights(info=one)
    whole = floats.forge_objects.unet.model_size()
    assert models.reload_model_weights(info=one) is floats
    models.reload_model_weights(info=other)
    opts.set("sdquant_quant_model", "int8")
    opts.set("sdquant_quant_text_encoder", "nf4")
    engine = models.reload_model_weights(info=one)
    assert engine is not floats
    assert _schemes(engine) == ({"int8"}, {"nf4"})
    assert engine.forge_objects.unet.size < 0.7 * whole
    assert models.reload_model_weights(info=one) is engine
    assert {row["component"]: row["how"] for row in running.status["components"]} == {
        "unet": "after loading",
        "text_encoder": "after loading",
    }
    assert running.shown == []


def test_a_load_that_fails_leaves_no_model(host: Start, sd: Path) -> None:
    running = host("reforge")
    running.start({"sdquant_quant_model": "int8", "sdquant_skip": "*"})
    models = running.modules.sd_models
    with pytest.raises(IncompatibleError, match="no weight that would be quantized"):
        models.reload_model_weights(info=SimpleNamespace(filename=str(sd)))
    assert models.model_data.sd_model is None
    assert models.model_data.loaded_sd_models == []
    assert "no weight" in running.status["error"]


def test_it_saves_no_packed_weights(host: Start, sd: Path) -> None:
    running = host("reforge")
    running.start({"sdquant_quant_text_encoder": "int8"})
    objects = running.modules.sd_models.reload_model_weights(info=SimpleNamespace(filename=str(sd))).forge_objects
    from ldm_patched.modules.sd import save_checkpoint

    assert save_checkpoint("floats", objects.unet) == "floats"
    with pytest.raises(ConflictError, match="reForge saves float ones"):
        save_checkpoint("packed", objects.unet, objects.clip)
