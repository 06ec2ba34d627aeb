"""What the scripts of AUTOMATIC1111 and its forks share: drawing, and what their LoRAs do to networks."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import measure, merging, sd_checkpoint

PROMPT, SEED = "a handwritten seven", 3
AS_FOUND = "as found"
# what is asked for, by the web UIs' words in a prompt
FEATURES = {
    "LoRA": "<lora:digits_lora:1>",
    "LoRA, 0.5": "<lora:digits_lora:0.5>",
    "LoHa": "<lora:digits_loha:1>",
    "LoKr": "<lora:digits_lokr:1>",
    "LoCon": "<lora:digits_locon:1>",
    "two": "<lora:digits_lora:0.6><lora:digits_lokr:0.7>",
    "DoRA": "<lora:digits_dora:1>",
    "text encoder": "<lora:digits_text:1>",
}
OF_TEXT = ("text encoder", "textual inversion")  # seen in what the text encoder gives


class Host:
    """A web UI in this process, with sdquant's extension and the model digits-sd.

    Attributes:
        data: its folder of models and extensions, made here.
        features: what is asked for, by words in a prompt.
    """

    def __init__(self, work: Path) -> None:
        self.data = work / "data"
        for folder in ("Lora", "Stable-diffusion"):
            (self.data / "models" / folder).mkdir(parents=True)
        sd_checkpoint.write(self.data / "models" / "Stable-diffusion" / "digits.safetensors")
        for file in measure.loras().glob("*.safetensors"):
            shutil.copy(file, self.data / "models" / "Lora")
        from sdquant.hosts import extension

        shutil.copytree(Path(extension.__file__).parent / "webui", self.data / "extensions" / "sdquant")
        self.calls: list[Any] = []
        self.features = dict(FEATURES)

    def unet(self) -> Any:
        """The network that draws."""
        raise NotImplementedError

    def encoder(self) -> Any:
        """The text encoder of transformers."""
        raise NotImplementedError

    def load(self) -> None:
        """Load the model anew, with the options as they are."""
        raise NotImplementedError

    def set(self, **options: Any) -> None:
        """Set options of the web UI."""
        from modules import shared  # type: ignore[import-not-found]

        for name, value in options.items():
            shared.opts.set(name, value)

    def draw(self, prompt: str) -> Any:
        """The pixels of an image."""
        import numpy as np
        from modules import processing

        processing.StableDiffusionProcessing.cached_c = [None, None, None]  # what A1111 and its forks keep of prompts
        processing.StableDiffusionProcessing.cached_uc = [None, None, None]
        p = processing.StableDiffusionProcessingTxt2Img(
            prompt=prompt, seed=SEED, steps=6, width=64, height=64, cfg_scale=3.0, do_not_save_samples=True,
            do_not_save_grid=True, sampler_name="Euler",
        )  # fmt: skip
        p.scripts = self.scripts()
        if arguments := self.arguments():
            p.script_args = arguments
        return np.array(processing.process_images(p).images[0])

    def scripts(self) -> Any:
        """What runs the scripts of a drawing: nothing."""

    def arguments(self) -> list[Any]:
        """What these scripts are given: nothing."""
        return []

    def record(self) -> None:
        """Keep the inputs of the UNet in a drawing."""

        def keep(module: Any, args: Any, kwargs: Any) -> None:
            self.calls.append((args, dict(kwargs)))

        self.calls.clear()
        handle = self.unet().register_forward_pre_hook(keep, with_kwargs=True)
        self.draw(PROMPT)
        handle.remove()

    def unet_after(self, prompt: str) -> Any:
        """What the UNet gives for the recorded inputs after a drawing, whose LoRAs stay on it."""
        import torch

        self.draw(prompt)
        with torch.inference_mode():
            return torch.cat([self.unet()(*args, **kwargs).flatten() for args, kwargs in self.calls])

    def text_in(self, prompt: str) -> Any:
        """What the text encoder gives in a drawing."""
        import torch

        found: list[Any] = []
        handle = self.encoder().register_forward_hook(lambda _, __, out: found.append(out.last_hidden_state.flatten()))
        self.draw(prompt)
        handle.remove()
        return torch.cat(found)

    def effects(self, features: Iterable[str]) -> dict[str, Any]:
        """Output with the LoRA - output without, by feature. The last LoRA stays on."""
        found = {}
        for name in features:
            of = self.text_in if name in OF_TEXT else self.unet_after
            before = of(PROMPT)
            found[name] = of(f"{PROMPT} {self.features[name]}") - before
        return found

    def rows(self, schemes: list[str], text: bool = True) -> list[dict[str, Any]]:
        """The effects on the quantized model beside those on the float one, and on one with the decoded weights.

        Args:
            text: with its text encoder.
        """
        self.choose(AS_FOUND, text)
        self.record()
        floats, rows = self.effects(self.features), []
        for scheme in schemes:
            self.choose(scheme, text)
            before = self.draw(PROMPT)
            found, removed = {}, {}
            for name in self.features:
                found |= self.effects([name])
                removed[name] = bool((self.draw(PROMPT) == before).all())
            weights = self.decoded()
            self.choose(AS_FOUND, text)
            originals = self.put(weights)
            same = self.effects(self.features)
            self.draw(PROMPT)  # without a LoRA
            self.put(originals)
            for name, effect in found.items():
                decoded = measure.cosine(effect, same[name])
                rows.append(measure.row(name, scheme, effect, floats[name], decoded=decoded, removed=removed[name]))
            print(measure.table(rows[-len(found) :]), flush=True)
        return rows

    def merged(self) -> dict[str, Any]:
        """What merging does while the model is loaded as it is."""
        folder = self.data / "models" / "Stable-diffusion"
        merging.write(folder)
        return merging.row(folder)

    def choose(self, scheme: str, text: bool = True) -> None:
        """Load the model anew with a scheme. text: for its text encoder, too."""
        self.set(sdquant_quant_model=scheme, **({"sdquant_quant_text_encoder": scheme} if text else {}))
        self.load()

    def decoded(self) -> list[dict[str, Any]]:
        """What the packed weights stand for, by layers: of the network, and of the text encoder."""
        return measure.decoded([self.unet(), self.encoder()])

    def put(self, weights: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Write them into the float model; returns those that were there."""
        return measure.put([self.unet(), self.encoder()], weights)
