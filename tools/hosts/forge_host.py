"""What Forge and Forge Neo share beyond AUTOMATIC1111: an engine with patchers, into which features are put."""

from __future__ import annotations

from typing import Any

from . import measure, neo_features
from .classic import AS_FOUND, PROMPT, Host

LEAST = 0.1  # bytes: what a mover is given for nothing, since it takes 0 for all


class ForgeHost(Host):
    """A web UI with Forge's engine in this process.

    Attributes:
        engine: the model that is loaded, as the web UI has it.
        part: the memory for a model that the mover is given, as a part of its bytes; None for what it asks for.
        loaded: what of quantized models was loaded then, as a part of their bytes, by the class of the model.
    """

    engine: Any

    def limit_memory(self, entry: Any) -> None:
        """Give the mover the memory of a small GPU, where its class of loaded models loads one."""
        from sdquant.hosts import load_hooks

        load = entry.model_load
        self.part: float | None = None
        self.loaded: set[tuple[str, float]] = set()

        def limited(one: Any, lowvram_model_memory: float = 0, *args: Any, **kwargs: Any) -> Any:
            patcher, memory = one.model, lowvram_model_memory
            if self.part is not None:  # beside what is loaded of it, as the mover counts
                memory = max(self.part * patcher.model_size() - patcher.loaded_size(), LEAST)
            result = load(one, memory, *args, **kwargs)
            if load_hooks.schemes_in(patcher.model):
                share = patcher.loaded_size() / patcher.model_size()
                self.loaded.add((type(patcher.model).__name__, round(share, 2)))
            return result

        entry.model_load = limited

    def measured(self, schemes: list[str]) -> list[dict[str, Any]]:
        """What LoRAs and the rest do to the quantized model beside what they do to the float one."""
        rows = self.rows(schemes) + self.other_rows(schemes)
        print(f"Save: {self.saved()}", flush=True)
        return rows

    def other_rows(self, schemes: list[str]) -> list[dict[str, Any]]:
        """What the rest does, without LoRAs."""
        self.choose(AS_FOUND)
        floats, rows = self.others(), []
        for scheme in schemes:
            self.choose(scheme)
            before = self.draw(PROMPT)
            found = self.others()
            same = bool((self.draw(PROMPT) == before).all())
            rows += [measure.row(name, scheme, effect, floats[name], removed=same) for name, effect in found.items()]
            print(measure.table(rows[-len(found) :]), flush=True)
        return rows

    def others(self) -> dict[str, Any]:
        """What ControlNet and the like do to the UNet's first output in a drawing, and an embedding to the text's."""
        before = self._first()
        found = {name: self._first(add) - before for name, add in neo_features.FEATURES.items()}
        self.read_embeddings()
        plain = self.text_in(PROMPT)
        return found | {"textual inversion": self.text_in(f"{PROMPT} {neo_features.WORD}") - plain}

    def read_embeddings(self) -> None:
        """Have the web UI read the folder of embeddings for the model that is loaded."""
        embeddings = self.engine.text_processing_engine.embeddings
        embeddings.expected_shape = 128
        embeddings.load_textual_inversion_embeddings()

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
