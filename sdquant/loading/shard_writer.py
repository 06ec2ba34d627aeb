"""Write a share of a component's weights to files instead of into a model; see `distributed_quantize`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..core import Packed, PackedSpec, TensorSpec, dtype_named
from ..formats import safetensors_writer
from ..models import WeightLoader, components, install_packed, key_names
from ..nn import plain
from ..saving import model_files
from ..utils.malloc_trim import trim

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..core import QuantSpec
    from ..formats import Checkpoint
    from ..planning import ComponentPlan, Plan


@dataclass(frozen=True)
class File:
    """A file that a process has written, under a temporary name.

    Attributes:
        nbytes: of the whole file. keys: bytes of each tensor in it.
    """

    name: str
    nbytes: int
    keys: Mapping[str, int]


@dataclass(frozen=True)
class WeightMetadata:
    """Metadata of a quantized weight: spec, and shapes and dtypes of its parts."""

    spec: PackedSpec
    parts: Mapping[str, TensorSpec]


@dataclass
class ShardOutput:
    """The files of one process, and the tensors that are not written yet.

    Attributes:
        folder: of the files. prefix: of their names. config: of the component. limit: maximum bytes of a file, unless
            one weight has more. rules: quantization rules of the component, see `model_files.written`.
        names: keys in the files of the model's tensors, where the two differ.
        late: tensors that are written last, because their shape in the file is known last.
    """

    folder: Path
    prefix: str
    config: Mapping[str, Any]
    limit: int
    rules: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    rows: dict[str, Packed] = field(default_factory=dict)
    floats: dict[str, Tensor] = field(default_factory=dict)
    late: dict[str, Tensor] = field(default_factory=dict)
    nbytes: int = 0
    files: list[File] = field(default_factory=list)

    def make_room(self, nbytes: int) -> None:
        """Account for `nbytes` more; write the pending tensors first if the file would exceed the limit."""
        if self.nbytes and self.nbytes + nbytes > self.limit:
            self.write()
        self.nbytes += nbytes

    def write(self) -> None:
        """Write the pending tensors to a file, if there are any."""
        rows = [(self.names.get(name, name), packed) for name, packed in self.rows.items()]
        floats = {self.names.get(name, name): tensor for name, tensor in self.floats.items()}
        tensors, metadata = model_files.written(rows, floats, self.config, self.rules)
        if tensors:
            path = self.folder / f"{self.prefix}-{len(self.files)}.safetensors"
            safetensors_writer.write(path, tensors, {"format": "pt", **metadata}, part=True)
            keys = {key: tensor.numel() * tensor.itemsize for key, tensor in tensors.items()}
            self.files.append(File(path.name, path.stat().st_size, keys))
        self.rows, self.floats, self.nbytes = {}, {}, 0
        del tensors
        trim()

    def finish(self, *, guard: bool) -> None:
        """Write the rest. `guard`: write the late tensors as `model_files.guarded` does."""
        for name, tensor in self.late.items():
            self.floats[name] = tensor[None] if guard else tensor
        self.late = {}
        self.write()


class Collector(WeightLoader):
    """WeightLoader that writes tensors to files instead. The model stays on the meta device, with quantized layers.

    Attributes:
        keys: for each tensor of the model, its key in the file or the name of the quantized weight there; tied ones
            under the first name. sizes: its bytes in the file.
        forms: the quantized weights so far.
    """

    def __init__(
        self, model: nn.Module, part: ComponentPlan, model_plan: Plan, src: Checkpoint, out: ShardOutput
    ) -> None:
        dtype = dtype_named(model_plan.dtype) if model_plan.dtype else None
        super().__init__(model, part.runtime, dtype, schemes=src.schemes)
        self.out = out
        self.keys: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.forms: dict[str, WeightMetadata] = {}
        self._guard = model_files.guard_of(model)
        rows = [(key, info.nbytes) for key, info in src.plain.items()]
        rows += [(name, src.prequantized_bytes(name)) for name in src.prequantized]
        for key, nbytes in rows:
            name = components.model_name(key, self.known)
            if name is None:
                self.unexpected.append(key)
            else:  # where two keys are one tensor, the last counts, as for a model
                self.keys[self.first(name)], self.sizes[self.first(name)] = key, nbytes
        # No process has all tensors, so that none are made one of several, or several of one.
        self.out.names = {
            name: key for key, name in key_names.to_file(model, list(self.keys), self.keys.keys()).names.items()
        }

    def first(self, name: str) -> str:
        """Return the name that a tensor is written under: the first of several tied ones."""
        return self._names(name)[0]

    def put(self, name: str, tensor: Tensor) -> None:
        self.out.make_room(tensor.numel() * tensor.itemsize)
        rows = self.out.late if self.first(name) in self._guard else self.out.floats
        rows[self.first(name)] = tensor

    def packed(self, name: str, packed: Packed, spec: QuantSpec | None) -> None:
        first = self.first(name)
        form = WeightMetadata(
            packed.spec, {key: safetensors_writer.part_of(part) for key, part in packed.parts.items()}
        )
        self.stand_in({first: form})
        self.forms[first] = form
        self.out.make_room(packed.nbytes)
        self.out.rows[first] = packed

    def stand_in(self, forms: Mapping[str, WeightMetadata]) -> None:
        """Put empty quantized layers into the model for weights that this or another process has quantized."""
        for name, form in forms.items():
            if name not in self.forms:
                parts = {
                    key: torch.empty(part.shape, dtype=dtype_named(part.dtype), device="meta")
                    for key, part in form.parts.items()
                }
                install_packed(self.model, self._names(name), Packed(spec=form.spec, parts=parts), "plain")

    def buffers(self) -> None:
        """Write the buffers that the model has created itself and that no source file holds."""
        for name, tensor in plain(self.model).items():
            if tensor.device.type != "meta" and name not in self.keys:
                self.put(name, tensor)

    def missing(self) -> list[str]:
        return [name for name in components.missing_parameters(self.model) if self.first(name) not in self.keys]

    def leave_out(self, names: list[str]) -> None:
        """Do nothing: these tensors are left out of the new files too."""
