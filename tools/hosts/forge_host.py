"""What Forge and Forge Neo share beyond AUTOMATIC1111: an engine with patchers, into which features are put."""

from __future__ import annotations

from typing import Any

from . import neo_features
from .classic import PROMPT, Host


class ForgeHost(Host):
    """A web UI with Forge's engine in this process.

    Attributes:
        engine: the model that is loaded, as the web UI has it.
    """

    engine: Any

    def others(self) -> dict[str, Any]:
        """What ControlNet and the like do to the UNet's first output in a drawing, and an embedding to the text's."""
        before = self._first()
        found = {name: self._first(add) - before for name, add in neo_features.FEATURES.items()}
        embeddings = self.engine.text_processing_engine.embeddings
        embeddings.expected_shape = 128
        embeddings.load_textual_inversion_embeddings()
        plain = self.text_in(PROMPT)
        return found | {"textual inversion": self.text_in(f"{PROMPT} {neo_features.WORD}") - plain}

    def _first(self, add: Any = None) -> Any:
        """The UNet's first output in a drawing, with what `add` makes of its patcher in the place of it."""
        outputs: list[Any] = []
        original = self.engine.forge_objects_original
        kept = original.unet
        handle = self.unet().register_forward_hook(lambda _, __, out: outputs.append(out.flatten().clone()))
        try:
            original.unet = kept if add is None else add(kept)
            self.engine.current_lora_hash = ""  # so that the web UI takes it
            self.draw(PROMPT)
        finally:
            original.unet = kept
            handle.remove()
        self.engine.current_lora_hash = ""
        return outputs[0]

    def saved(self) -> str:
        """What the web UI says to saving the model."""
        try:
            return str(self.engine.save_checkpoint(str(self.data / "saved.safetensors")))
        except Exception as error:
            return str(error)
