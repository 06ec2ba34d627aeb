"""Puts weights into an empty model: plain tensors as they are, packed ones inside modules that can run them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..core import registry
from ..core.packed_reader import AGAIN, NOT_FINITE, read_weight, require_sound
from ..core.packed_rows import cut
from ..errors import BadFileError, UnsupportedFileError
from ..nn import kind_of, quantized_layer
from ..utils.finite import finite
from ..utils.malloc_trim import Trimmer
from . import components, keep_in_fp32, peft_hooks
from .left_out import initialize, may_lack
from .quantize_weight import encode

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..core.backend import Packed, PackedSpec
    from ..formats.checkpoint import Source

log = logging.getLogger(__name__)

# Values of a plain tensor up to which they are all looked at while it is loaded: norms and biases. Larger ones may be
# gigabytes that are mapped and not read before they are used; `verify` looks at those.
SMALL = 1 << 16


class Installer:
    """Puts tensors and packed weights into an empty model, and knows at the end whether all came."""

    def __init__(
        self, model: nn.Module, runtime: str, dtype: torch.dtype | None = None, device: str | None = None
    ) -> None:
        """`dtype`: what floats are cast to; None leaves them as they are. device: as for `install_packed`."""
        self.model, self.runtime, self.dtype, self.device = model, runtime, dtype, device
        self.float32 = keep_in_fp32.float32_of_model(model)
        self.known = frozenset(model.state_dict(keep_vars=True)) | frozenset(components.tied(model))
        self.ties = components.tied(model)
        self.unexpected: list[str] = []
        self.trimmer = Trimmer()

    def plain(self, key: str, tensor: Tensor, file: Path | None = None, *, as_it_is: bool = False) -> None:
        """A float (or other unquantized) tensor, and all parameters that are tied to it.

        Args:
            file: it is from, for the error. as_it_is: its values are not looked at; else those of small ones are.
        """
        name = components.model_name(key, self.known)
        if name is None:
            self.unexpected.append(key)
            return
        fitted = self._fitted(key, name, tensor, file)
        if not as_it_is and name in self.ties and tensor.numel() <= SMALL and not finite(tensor):
            raise BadFileError(_asked(key, file), NOT_FINITE, AGAIN)
        self.put(name, fitted)

    def cast(self, key: str, tensor: Tensor) -> Tensor:
        """A tensor of the file that is not quantized, as it will be in memory. Nothing computes in float8."""
        if not tensor.is_floating_point():
            return tensor
        found = "bfloat16" if tensor.element_size() == 1 else str(tensor.dtype).removeprefix("torch.")
        return tensor.to(self._computes_in(components.model_name(key, self.known) or key, found))

    def _computes_in(self, name: str, dtype: str) -> torch.dtype:
        """What the tensor called `name` is cast to, or a layer with it computes in, where it was `dtype`."""
        asked = dtype if self.dtype is None else str(self.dtype).removeprefix("torch.")
        made = getattr(torch, self.float32.dtype(name, asked))
        assert isinstance(made, torch.dtype)
        return made

    def put(self, name: str, tensor: Tensor) -> None:
        """A tensor in the model's shape, under the model's name."""
        components.set_tensor(self.model, self._names(name), tensor)

    def quantizable(self, key: str, spec: registry.QuantSpec) -> str | None:
        """The model's name for a weight that is planned to be quantized; None, and a warning, where it cannot be."""
        name = components.model_name(key, self.known)
        kind = kind_to_quantize(self.model, self._names(name)) if name is not None else None
        if name is None or kind is None or (kind == "embedding" and not spec.embeddings):
            # Planned from the name and shape alone; the model says that it is another kind of layer.
            layer = type(self._module(name)).__name__ if name is not None else "none"
            log.warning("%s is not quantized: its layer (%s) cannot be", key, layer)
            return None
        return name

    def encode(self, key: str, tensor: Tensor, spec: registry.QuantSpec, device: str, file: Path | None = None) -> None:
        """A float weight that is to be quantized now; `file` as for `plain`."""
        name = self.quantizable(key, spec)
        if name is None:
            self.plain(key, tensor, file)
            return
        tensor = self._fitted(key, name, tensor, file)
        packed = encode(key, tensor.to(device), spec)
        self.packed(name, packed.to(tensor.device), spec)
        self.trimmer.add(tensor.numel() * tensor.element_size())

    def found(self, key: str, src: Source, files: Mapping[Path, Any], spec: registry.QuantSpec | None = None) -> None:
        """A weight that is quantized on disk, by its name in `src.found`; `spec` if it is there because it was asked
        for."""
        name, found = components.model_name(key, self.known), src.found[key]
        if name is None:
            self.unexpected.append(key)
            return
        backend = registry.of_scheme(found.scheme)

        def get(part: str) -> Tensor:
            return src.read(files, part)

        wanted = self.model.get_parameter(name)
        try:
            packed = _read(found, src.specs.get(key), tuple(wanted.shape), get)
            require_sound(found, packed)
        except BadFileError as error:
            file = src.home[next(iter(found.keys.values()))]
            raise BadFileError(f"Cannot load {file}: {error.what}", error.why, error.fix) from error
        if common_kind(self.model, self._names(name)) is None:
            # A norm or a bias in a GGUF file, say: no layer of ours runs it packed.
            log.info("%s is dequantized: its layer (%s) cannot run it packed", name, type(self._module(name)).__name__)
            self.plain(name, backend.decode(packed, self._computes_in(name, "float32")))
            return
        self.packed(name, packed, spec)

    def packed(self, name: str, packed: Packed, spec: registry.QuantSpec | None) -> None:
        """A packed weight: its module is replaced by one that can run it."""
        dtype = self._computes_in(name, packed.spec.dtype)
        install_packed(self.model, self._names(name), packed, self.runtime, spec, dtype, self.device)

    def _fitted(self, key: str, name: str, tensor: Tensor, file: Path | None) -> Tensor:
        """A plain tensor in the shape of the model's tensor called `name`.

        Raises:
            BadFileError: it is not that one's.
        """
        wanted = self.model.get_parameter(name) if name in self.ties else self.model.get_buffer(name)
        why = misfit(tuple(tensor.shape), tensor.is_floating_point(), wanted)
        if why is not None:
            raise BadFileError(_asked(key, file), why, "Check that the weights and the config belong together")
        return tensor.reshape(wanted.shape)

    def _module(self, name: str) -> nn.Module:
        return self.model.get_submodule(name.rpartition(".")[0])

    def _names(self, name: str) -> tuple[str, ...]:
        """All names of the tensor called `name`."""
        return self.ties.get(name, (name,))

    def finish(self, src: Source) -> None:
        """Raise if a parameter got no value, and its library gives it none; tell of tensors that nobody wanted."""
        empty = self.missing()
        missing = [name for name in empty if not may_lack(self.model, name)]
        if missing:
            raise BadFileError(
                f"Cannot load {src.path}",
                f"it lacks {len(missing)} of the model's tensors, the first is {missing[0]!r}",
                "Check that the weights and the config belong together",
            )
        self.leave_out(empty)
        strays = [*src.strays, *self.unexpected]
        if strays:
            log.warning(
                "%s contains %d tensors that the model does not use, the first is %r", src.path, len(strays), strays[0]
            )

    def missing(self) -> list[str]:
        """The model's parameters that got no value."""
        return components.missing(self.model)

    def leave_out(self, names: list[str]) -> None:
        """Give values to parameters that the file may lack."""
        if names:
            initialize(self.model, [self._names(name) for name in names], self.dtype or _common_dtype(self.model))


def _common_dtype(model: nn.Module) -> torch.dtype | None:
    """The first dtype of floats that a model's parameters have."""
    given = (one for one in model.parameters() if one.is_floating_point() and one.itemsize > 1 and not one.is_meta)
    return next((one.dtype for one in given), None)


def _asked(key: str, file: Path | None) -> str:
    return f"Cannot load tensor {key!r}{f' of {file}' if file is not None else ''}"


def misfit(shape: tuple[int, ...], floats: bool, wanted: Tensor) -> str | None:
    """Why a plain tensor cannot be the model's of that name; None if it can. Dimensions of 1 do not count."""
    if [n for n in shape if n != 1] != [n for n in wanted.shape if n != 1]:
        return f"it has shape {list(shape)}, but the model expects {list(wanted.shape)}"
    if wanted.is_floating_point() and not floats:
        return "it holds integers, but the model expects floats; it is probably quantized in an unknown format"
    return None


def _read(
    found: registry.Found, spec: PackedSpec | None, shape: tuple[int, ...], get: Callable[[str], Tensor]
) -> Packed:
    """A weight of `shape` that is quantized on disk, its parts held against each other.

    Raises:
        BadFileError: they do not belong together, or not to this model.
    """
    if found.cut is not None:
        return _read_cut(found, shape, get)
    return read_weight(found, spec, shape, get)


def _read_cut(found: registry.Found, shape: tuple[int, ...], get: Callable[[str], Tensor]) -> Packed:
    """Some rows of a weight that is quantized on disk."""
    assert found.cut is not None
    whole, backend = found.cut.of, registry.of_scheme(found.scheme)
    if not found.cut.rows:
        return read_weight(whole, None, shape, get)
    packed = cut(backend.cuttable(read_weight(whole, None, found.cut.shape, get)), found.cut.rows)
    if packed.spec.shape != shape:
        raise BadFileError(
            f"Cannot load weight {found.name!r} in {found.scheme}",
            f"it has shape {list(packed.spec.shape)} in the file, but the model expects {list(shape)}",
            "Check that base= is a pipeline of the same model",
        )
    return packed


def common_kind(model: nn.Module, names: tuple[str, ...]) -> str | None:
    """The kind of the layers that own a weight (several where it is tied); None if one of them cannot run it packed,
    or they differ, as a language model's head that is tied to its table of embeddings does, or it is not their weight
    but a bias."""
    if not all(name.endswith(".weight") for name in names):
        return None
    kinds = {kind_of(model.get_submodule(name.rpartition(".")[0])) for name in names}
    return kinds.pop() if len(kinds) == 1 else None


def kind_to_quantize(model: nn.Module, names: tuple[str, ...]) -> str | None:
    """The same for a weight that nobody has quantized yet.

    The output of `nn.MultiheadAttention` is not: that reads the weight itself, which no library's module allows, so
    that transformers leaves such layers floats and cannot read a file of theirs that is quantized.
    """
    from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

    owners = (model.get_submodule(name.rpartition(".")[0]) for name in names)
    read = any(isinstance(one, NonDynamicallyQuantizableLinear) for one in owners)
    return None if read else common_kind(model, names)


def install_packed(
    model: nn.Module,
    names: tuple[str, ...],
    packed: Packed,
    runtime: str,
    spec: registry.QuantSpec | None = None,
    dtype: torch.dtype | None = None,
    device: str | None = None,
) -> None:
    """Replace the modules that own a weight (one, or several that are tied to it) by one that runs it packed.

    A weight of a kind that the library has no module for gets a plain layer: a file may hold more than it runs.
    So does one whose owner reads the weight's dtype, which a plain layer answers with that of the float weight.

    Args:
        names: the weight's names. dtype: what the layer is to compute in; None is the dtype of the float weight.
        device: what it will compute on, wherever it waits; None is where its parts are.
    """
    paths = [name.rpartition(".")[0] for name in names]
    modules = [model.get_submodule(path) for path in paths]
    kind = common_kind(model, names)
    row = registry.scheme(packed.spec.scheme)
    if kind is None:
        raise UnsupportedFileError(
            f"Cannot load weight {names[0]!r}, which is quantized to {row.name}",
            f"it belongs to a {' and a '.join(type(module).__name__ for module in modules)}, "
            "which sdquant cannot run quantized",
            "Quantize the model again without it (skip=)",
        )
    made: nn.Module
    library = runtime == "library" and "library" in row.runtimes and row.runs("library", kind, packed.spec.shape)
    if library and not any(components.weight_dtype_matters(model, path) for path in paths):
        made = registry.get(row.backend).to_library(modules[0], packed, spec)
    else:
        made = layer = quantized_layer(modules[0], packed, dtype, path=paths[0])
        layer.lay_out(device or str(packed.device))
    for path in paths:
        components.set_module(model, path, made)
    peft_hooks.prepare(model, paths)
