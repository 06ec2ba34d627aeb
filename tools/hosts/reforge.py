"""reForge's LoRAs on quantized layers, by its own processing of prompts such as "seven <lora:name:0.8>".

    python -m tools.hosts.reforge CHECKOUT --python VENV/bin/python

CHECKOUT: with Stable Diffusion's own code and generative-models in its folder `repositories`, as its launcher makes it.
The environment: reForge's requirements_versions.txt. reForge knows a model by its sizes: its row of Stable Diffusion
1.5 gets those of digits-sd. All is measured three times: with the whole model on the device, and with as much of it as
--always-low-vram and --always-no-vram leave there on a GPU that is too small. On a CPU reForge ignores these flags.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from . import a1111, forge_host, measure, neo_features, sd_checkpoint

# The memory for a model that reForge's mover is given, as a part of the model's bytes; None for all that it asks for.
WAYS = {"whole": None, "half": 0.5, "none": 0.0}


def inside(checkout: Path, work: Path, schemes: list[str]) -> list[dict[str, Any]]:
    """Measure, in reForge's process."""
    host, rows = _ReForge(checkout, work), []
    for way in measure.ways(WAYS):
        host.part = WAYS[way]
        host.loaded.clear()
        rows += [{**row, "feature": f"{row['feature']} ({way})"} for row in host.measured(schemes)]
        print(f"{way}: of quantized models {sorted(host.loaded)} were loaded", flush=True)
    return rows


class _ReForge(forge_host.ForgeHost):
    def __init__(self, checkout: Path, work: Path) -> None:
        super().__init__(work)
        encoder = work / "encoder"
        a1111.write_config(self.data / "models" / "Stable-diffusion" / "digits.yaml", encoder)
        neo_features.embedding(self.data / "embeddings")
        sys.argv = ["launch.py", "--data-dir", str(self.data), "--always-cpu", "--all-in-fp32", "--skip-version-check"]
        sys.path.insert(0, str(checkout))
        os.chdir(checkout)
        from modules_forge.initialization import initialize_forge  # type: ignore[import-not-found]

        initialize_forge()
        from modules import initialize  # type: ignore[import-not-found]

        initialize.imports()
        a1111.set_groups()
        _know_the_model(encoder)
        initialize.initialize()
        from modules import script_callbacks
        from modules_forge import main_thread

        threading.Thread(target=main_thread.loop, daemon=True).start()  # which reForge loads models in
        script_callbacks.before_ui_callback()
        script_callbacks.ui_settings_callback()
        from ldm_patched.modules import model_management  # type: ignore[import-not-found]

        self.limit_memory(model_management.LoadedModel)

    def load(self) -> None:
        from modules import sd_models

        self.set(sd_model_checkpoint="digits.safetensors", live_previews_enable=False)  # which downloads
        self.engine = sd_models.reload_model_weights()

    def scripts(self) -> Any:
        from modules import scripts

        return scripts.ScriptRunner()  # without any, but reForge looks into it

    def unet(self) -> Any:
        return self.engine.forge_objects.unet.model.diffusion_model

    def encoder(self) -> Any:
        return self.engine.forge_objects.clip.cond_stage_model.clip_l.transformer

    def read_embeddings(self) -> None:
        from modules.sd_hijack import model_hijack  # type: ignore[import-not-found]

        model_hijack.embedding_db.load_textual_inversion_embeddings(force_reload=True)

    def saved(self) -> str:
        from ldm_patched.modules import sd  # type: ignore[import-not-found]

        objects = self.engine.forge_objects
        try:
            return str(sd.save_checkpoint(str(self.data / "saved.safetensors"), objects.unet, objects.clip))
        except Exception as error:
            return str(error)


def _know_the_model(encoder: Path) -> None:
    """Give reForge's row of the model the sizes of digits-sd, and the configs of its VAE and text encoder."""
    from ldm_patched.ldm.modules.diffusionmodules import model  # type: ignore[import-not-found]
    from ldm_patched.modules import sd1_clip, supported_models

    row = supported_models.SD15
    row.unet_config = row.unet_config | {"context_dim": 128, "model_channels": 32}
    row.unet_extra_config = row.unet_extra_config | {"num_heads": sd_checkpoint.HEADS}
    row.latent_format = sd_checkpoint.latents(row.latent_format)
    config = sd1_clip.CLIPTextConfig.from_pretrained(encoder)
    sd1_clip.CLIPTextConfig.from_json_file = classmethod(lambda cls, file: config)
    _make_with(sd1_clip.SDTokenizer, tokenizer_path=str(encoder), embedding_size=config.hidden_size)
    for kind in (model.Encoder, model.Decoder):
        _make_with(kind, **a1111.vae_sizes())


def _make_with(kind: Any, **ours: Any) -> None:
    """Have a class make its objects with these arguments."""
    make = kind.__init__
    kind.__init__ = lambda self, *args, **kwargs: make(self, *args, **{**kwargs, **ours})


if __name__ == "__main__":
    measure.main("reforge", inside)
