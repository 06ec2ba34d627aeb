"""ControlNet, Control-LoRA and IP-Adapter in AUTOMATIC1111 by Mikubill's sd-webui-controlnet, on digits-sd.

    python -m tools.hosts.a1111_controlnet CHECKOUT --extension SD_WEBUI_CONTROLNET --python VENV/bin/python

The environment: A1111's requirements and the extension's. The extension knows models by Stable Diffusion's sizes: it is
told those of digits-sd, which has fewer blocks. All files have random weights. An IP-Adapter gets what an image encoder
would give, as the extension's API takes it. Saving is by hako-mikan's supermerger, if its folder is in the variable
SDQUANT_SUPERMERGER.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from . import a1111, measure, neo_features
from .classic import AS_FOUND, PROMPT

NAME = "sd-webui-controlnet"
TOKENS, CONTEXT = 4, 128  # what is made of an image encoder's output, and the text's width
# digits-sd in the extension's words
SIZES = {
    "model_channels": 32, "num_res_blocks": 1, "attention_resolutions": [1, 2], "transformer_depth": [1, 1],
    "channel_mult": [1, 2], "context_dim": CONTEXT, "num_heads": 4, "num_head_channels": -1,
    "transformer_depth_middle": 1, "use_linear_in_transformer": False, "num_classes": None, "adm_in_channels": None,
}  # fmt: skip
PLACES = {"input": {1: 32, 3: 64}, "output": {0: 64, 1: 64, 2: 32, 3: 32}, "middle": {0: 64}}  # of attention, by width
OUTPUTS, THEIRS = 5, 13  # of a ControlNet, here and in Stable Diffusion
FILES = {
    "ControlNet": "control", "ControlNet saved as differences": "difference", "Control-LoRA": "control_lora",
    "IP-Adapter": "ip_adapter",
}  # fmt: skip


def inside(checkout: Path, work: Path, schemes: list[str]) -> list[dict[str, Any]]:
    """Measure, in A1111's process."""
    host = _Controlled(checkout, work)
    host.choose(AS_FOUND, text=False)
    floats, rows = host.others(), []
    for scheme in schemes:
        host.choose(scheme, text=False)
        before = host.draw(PROMPT)
        found = host.others()
        same = bool((host.draw(PROMPT) == before).all())
        print(f"{scheme}: {host.saved()}", flush=True)
        weights = host.decoded()
        host.choose(AS_FOUND, text=False)
        originals = host.put(weights)
        decoded = host.others()
        host.put(originals)
        rows += [
            measure.row(name, scheme, effect, floats[name], decoded=measure.cosine(effect, decoded[name]), removed=same)
            for name, effect in found.items()
        ]
        print(measure.table(rows[-len(found) :]), flush=True)
    return rows


class _Controlled(a1111._A1111):
    """A1111 with both extensions."""

    def __init__(self, checkout: Path, work: Path) -> None:
        folder = work / "data" / "models" / "ControlNet"
        folder.mkdir(parents=True)
        _write(folder)
        shutil.copytree(measure.extension(), work / "data" / "extensions" / NAME)
        super().__init__(checkout, work)
        from modules import scripts  # type: ignore[import-not-found]

        _know_the_model()
        self.runner = scripts.ScriptRunner()
        self.runner.initialize_scripts(is_img2img=False)
        for kind in (self.runner.scripts, self.runner.alwayson_scripts, self.runner.selectable_scripts):
            kind[:] = [script for script in kind if script.title() == "ControlNet"]
        (self.script,) = self.runner.scripts
        self.script.args_from, self.script.args_to = 1, 2
        self.unit: Any = None

    def scripts(self) -> Any:
        return self.runner

    def load(self) -> None:
        super().load()
        if hasattr(self, "script"):
            self.script.clear_control_model_cache()  # which keeps what it has read of another model of this file

    def saved(self) -> str:
        """Save the model by supermerger, as a checkpoint: all of its state dict."""
        import copy
        import importlib

        from safetensors.torch import load_file

        if "SDQUANT_SUPERMERGER" not in os.environ:
            return "not saved: supermerger's folder is not in SDQUANT_SUPERMERGER"
        sys.path.insert(0, os.environ["SDQUANT_SUPERMERGER"])
        info, weights = self.model.sd_checkpoint_info, self.decoded()[0]
        self.model.sd_checkpoint_info = merged = copy.copy(info)  # it saves only what it takes for merged
        merged.filename = str(Path(info.filename).with_name("merged.safetensors"))
        for kind in (".yaml", ".safetensors"):  # A1111 looks for both when it loads the model again
            shutil.copy(Path(info.filename).with_suffix(kind), Path(merged.filename).with_suffix(kind))
        said = importlib.import_module("scripts.mergers.model_util").savemodel(None, None, "saved", ["safetensors"])
        self.model.sd_checkpoint_info = info
        (file,) = (self.data / "models" / "Stable-diffusion").glob("saved*")
        found = load_file(file)
        file.unlink()
        same = all(bool((found[f"model.diffusion_model.{path}.weight"] == one).all()) for path, one in weights.items())
        return f"{said}: {len(found)} tensors, {len(weights)} of them decoded, equal: {same}"

    def arguments(self) -> list[Any]:
        return [0, self.unit or _of_extension("internal_controlnet.args").ControlNetUnit()]

    def others(self) -> dict[str, Any]:
        """What each does to the UNet's first output in a drawing."""
        found, before, words = {}, self.text_in(PROMPT), f"{PROMPT} {self.features['LoRA']}"
        for name, file in FILES.items():
            self.unit = self._unit(file)
            found[name] = self.text_in(PROMPT) - before
            self.unit = None
        with_lora = self.text_in(words)
        self.unit = self._unit(FILES["ControlNet"])
        found["ControlNet beside a LoRA"] = self.text_in(words) - with_lora
        self.unit = None
        # A1111 takes a LoRA off a float layer when it next runs; a Control-LoRA would read the layer before that
        self.draw(PROMPT)
        return found

    def _unit(self, file: str) -> Any:
        """What the extension's panel or API asks for."""
        import numpy as np
        import torch

        state = _of_extension("scripts.global_state")
        (model,) = (name for name in state.cn_models if name.startswith(f"{file} ["))
        more: dict[str, Any] = {}
        if file == FILES["IP-Adapter"]:
            seen = io.BytesIO()
            torch.save({"image_embeds": neo_features._random(1, neo_features.IMAGE_WIDTH)}, seen)
            more["ipadapter_input"] = [base64.b64encode(seen.getvalue()).decode()]
        image = (neo_features._random(64, 64, 3).sigmoid() * 255).byte().numpy()
        kind = _of_extension("internal_controlnet.args").ControlNetUnit
        return kind(enabled=True, module="none", model=model, image=np.ascontiguousarray(image), **more)


def _of_extension(name: str) -> Any:
    return sys.modules[name]


def _write(folder: Path) -> None:
    """Write the files of the three."""
    import torch
    from safetensors.torch import save_file

    # where the extension reads the text's width in Stable Diffusion's file; digits-sd has no such block
    width = {"input_blocks.5.1.transformer_blocks.0.attn2.to_k.weight": torch.zeros(64, CONTEXT)}
    save_file(neo_features.controlnet_tensors() | width, folder / f"{FILES['ControlNet']}.safetensors")
    net = {
        key: 0 * one if key.startswith(("time", "input_blocks", "middle_block.")) else one
        for key, one in neo_features.controlnet_tensors().items()
    }
    different = net | width | {"difference": torch.zeros(())}
    save_file(different, folder / f"{FILES['ControlNet saved as differences']}.safetensors")
    save_file(neo_features.control_lora_tensors(), folder / f"{FILES['Control-LoRA']}.safetensors")
    tensors = {"image_proj.proj.weight": neo_features._random(TOKENS * CONTEXT, neo_features.IMAGE_WIDTH)}
    tensors |= {"image_proj.proj.bias": torch.zeros(TOKENS * CONTEXT), "image_proj.norm.bias": torch.zeros(CONTEXT)}
    tensors["image_proj.norm.weight"] = torch.ones(CONTEXT)
    sizes = [size for blocks in PLACES.values() for size in blocks.values()]
    tensors |= {
        f"ip_adapter.{2 * at + 1}.to_{name}_ip.weight": neo_features._random(size, CONTEXT)
        for at, size in enumerate(sizes)
        for name in "kv"
    }
    save_file(tensors, folder / f"{FILES['IP-Adapter']}.safetensors")


def _know_the_model() -> None:
    """Tell the extension what digits-sd is like."""
    guess, enums, nets = (_of_extension(f"scripts.{name}") for name in ("controlnet_model_guess", "enums", "cldm"))
    for known in (guess.controlnet_default_config, guess.controlnet_sdxl_config):  # it takes the second for a LoRA
        known.update(SIZES)
    forward = nets.PlugableControlModel.forward

    def padded(self: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Its outputs where the extension expects those of the last of 13 blocks."""
        outputs = list(forward(self, *args, **kwargs))
        assert len(outputs) == OUTPUTS
        return [0.0] * (THEIRS - OUTPUTS) + outputs

    nets.PlugableControlModel.forward = padded
    places = [
        enums.TransformerID(enums.UnetBlockType(kind), block, 0, at)
        for at, (kind, block) in enumerate((kind, block) for kind, blocks in PLACES.items() for block in blocks)
    ]
    enums.StableDiffusionVersion.transformer_ids = property(lambda _: enums.TransformerIDResult(places, [], []))


if __name__ == "__main__":
    measure.main("a1111_controlnet", inside)
