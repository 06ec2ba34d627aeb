"""Load weights into an empty model: unquantized tensors directly, packed ones in modules that can run them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..core import Unfit, dtype_name, packed_reader, packed_rows, read_weight, require_sound
from ..errors import BadFileError, UnsupportedFileError
from ..nn import kind_of, quantized_layer
from ..utils.malloc_trim import Trimmer
from ..utils.tensors import is_finite
from . import components, keep_in_fp32, peft_hooks
from .bias_correction import BiasCorrection
from .left_out import TOGETHER, initialize, refuse_lacking, stray_warnings
from .quantize_weight import encode

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..core import Cut, Packed, PackedSpec, PrequantizedWeight, QuantSpec
    from ..formats import Checkpoint

log = logging.getLogger(__name__)

# Values of a plain tensor up to which they are all looked at while it is loaded: norms and biases. Larger ones may be
# gigabytes that are mapped and not read before they are used; `verify` looks at those.
SMALL = 1 << 16
_PADDED_TO = 32  # ComfyUI pads the rows of NVFP4 to a multiple of 16, those of MXFP8 to one of 32


class WeightLoader:
    """Loads tensors and packed weights into an empty model, and checks at the end that none is missing."""

    def __init__(
        self,
        model: nn.Module,
        runtime: str,
        dtype: torch.dtype | None = None,
        device: str | None = None,
        schemes: Mapping[str, str] | None = None,
    ) -> None:
        """`dtype`: that floats are cast to; None keeps their own. device: see `install_packed`.

        schemes: of the tensors to be loaded: see `components.ties_in`.
        """
        self.model, self.runtime, self.dtype, self.device = model, runtime, dtype, device
        self.float32 = keep_in_fp32.float32_of_model(model)
        self.known = frozenset(model.state_dict(keep_vars=True)) | frozenset(components.tied(model))
        self.ties = components.ties_in(components.tied(model), schemes or {}, self.known)
        self.unexpected: list[str] = []
        self._biases = BiasCorrection()
        self.trimmer = Trimmer()

    def plain(self, key: str, tensor: Tensor, file: Path | None = None, *, as_it_is: bool = False) -> None:
        """Load a float (or other unquantized) tensor into its parameter and all that are tied to it.

        Args:
            file: its file, for the error. as_it_is: do not check its values; else those of small tensors are checked.
        """
        name = components.model_name(key, self.known)
        if name is None:
            self.unexpected.append(key)
            return
        fitted = self._fitted(key, name, tensor, file)
        if not as_it_is and name in self.ties and tensor.numel() <= SMALL and not is_finite(tensor):
            raise BadFileError(_asked(key, file), packed_reader.NOT_FINITE, packed_reader.AGAIN)
        self.put(name, fitted)

    def cast(self, key: str, tensor: Tensor) -> Tensor:
        """Cast an unquantized tensor of the file to its dtype in memory; float8 becomes a dtype to compute in."""
        if not tensor.is_floating_point():
            return tensor
        dtype = "bfloat16" if tensor.element_size() == 1 else dtype_name(tensor.dtype)
        return tensor.to(self._computes_in(components.model_name(key, self.known) or key, dtype))

    def _computes_in(self, name: str, dtype: str) -> torch.dtype:
        """Return the dtype that the tensor `name` of dtype `dtype` is cast to, or that its layer computes in."""
        target = dtype if self.dtype is None else dtype_name(self.dtype)
        result = getattr(torch, self.float32.dtype(name, target))
        assert isinstance(result, torch.dtype)
        return result

    def put(self, name: str, tensor: Tensor) -> None:
        """Set a tensor of the model's shape, by the model's name."""
        components.set_tensor(self.model, self._names(name), tensor)

    def quantizable(self, key: str, spec: QuantSpec) -> str | None:
        """Return the model's name for a weight to be quantized; None, and log a warning, if it cannot be quantized."""
        name = components.model_name(key, self.known)
        kind = kind_to_quantize(self.model, self._names(name)) if name is not None else None
        if name is None or kind is None or (kind == "embedding" and not spec.embeddings):
            # Planned from the name and shape alone; the model says that it is another kind of layer.
            layer = type(self._module(name)).__name__ if name is not None else "none"
            log.warning("%s is not quantized: its layer (%s) cannot be", key, layer)
            return None
        return name

    def encode(self, key: str, tensor: Tensor, spec: QuantSpec, device: str, file: Path | None = None) -> None:
        """Quantize a float weight and load it; `file`: see `plain`."""
        name = self.quantizable(key, spec)
        if name is None:
            self.plain(key, tensor, file)
            return
        tensor = self._fitted(key, name, tensor, file)
        weight = tensor.to(device)
        packed = encode(key, weight, spec)
        self._biases.add(name, key, weight, packed, spec)
        self.packed(name, packed.to(tensor.device), spec)
        self.trimmer.add(tensor.numel() * tensor.element_size())

    def load_prequantized(
        self, key: str, src: Checkpoint, files: Mapping[Path, Any], spec: QuantSpec | None = None
    ) -> None:
        """Load a weight that is quantized on disk, by its name in the file; `spec`: set if it was requested."""
        name, match = components.model_name(key, self.known), src.prequantized[key]
        if name is None:
            self.unexpected.append(key)
            return

        def get(part: str) -> Tensor:
            return src.read(files, part)

        parameter = self.model.get_parameter(name)
        try:
            packed = read_packed(match, src.specs.get(key), tuple(parameter.shape), get)
            require_sound(match, packed)
        except BadFileError as error:
            file = src.home[next(iter(match.keys.values()))]
            raise BadFileError(f"Cannot load {file}: {error.inner}", error.why, error.fix) from error
        except Unfit as reason:  # though the model tells the shape
            file = src.home[next(iter(match.keys.values()))]
            what = f"Cannot load {file}: cannot read {name!r}"
            raise BadFileError(what, str(reason), packed_reader.AGAIN) from reason
        if common_kind(self.model, self._names(name)) is None:
            # A norm or a bias in a GGUF file, say: no layer of ours runs it packed.
            log.info("%s is dequantized: its layer (%s) cannot run it packed", name, type(self._module(name)).__name__)
            self.plain(name, packed.spec.scheme.codec.decode(packed, self._computes_in(name, "float32")))
            return
        self.packed(name, _with_layout(packed), spec)

    def packed(self, name: str, packed: Packed, spec: QuantSpec | None) -> None:
        """Load a packed weight: replace its module by one that can run it."""
        dtype = self._computes_in(name, packed.spec.dtype)
        install_packed(self.model, self._names(name), packed, self.runtime, spec, dtype, self.device)

    def _fitted(self, key: str, name: str, tensor: Tensor, file: Path | None) -> Tensor:
        """Return an unquantized tensor in the shape of the model's tensor `name`.

        Raises:
            BadFileError: its shape or type does not match.
        """
        expected = self.model.get_parameter(name) if name in self.ties else self.model.get_buffer(name)
        why = misfit(tuple(tensor.shape), tensor.is_floating_point(), expected)
        if why is not None:
            raise BadFileError(_asked(key, file), why, TOGETHER)
        return tensor.reshape(expected.shape)

    def _module(self, name: str) -> nn.Module:
        return self.model.get_submodule(name.rpartition(".")[0])

    def _names(self, name: str) -> tuple[str, ...]:
        """Return all names of the tensor `name`."""
        return self.ties.get(name, (name,))

    def finish(self, src: Checkpoint) -> None:
        """Raise if a parameter has no value and its library initializes none; log a warning of tensors that turned out
        to be unused. The plan has one of those that its model has no place for."""
        empty = self.missing()
        refuse_lacking(self.model, empty, src.path)
        self.leave_out(empty)
        self._biases.apply(self.model)
        for line in stray_warnings(src.path, self.unexpected):
            log.warning("%s", line)

    def missing(self) -> list[str]:
        """Return the model's parameters that have no value."""
        return components.missing_parameters(self.model)

    def leave_out(self, names: list[str]) -> None:
        """Initialize parameters that the file may lack."""
        if names:
            initialize(self.model, [self._names(name) for name in names], self.dtype or _common_dtype(self.model))


def _common_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the first floating-point dtype among a model's parameters."""
    floats = (one for one in model.parameters() if one.is_floating_point() and one.itemsize > 1 and not one.is_meta)
    return next((one.dtype for one in floats), None)


def _asked(key: str, file: Path | None) -> str:
    return f"Cannot load tensor {key!r}{f' of {file}' if file is not None else ''}"


def misfit(shape: tuple[int, ...], floats: bool, expected: Tensor) -> str | None:
    """Return the reason that a tensor does not match the model's; None if it does. Dimensions of 1 are ignored, and the
    first two of five may be one, as stable-diffusion.cpp writes them: ggml has four."""
    folded = (expected.shape[0] * expected.shape[1], *expected.shape[2:]) if expected.ndim == 5 else None
    if shape != folded and [n for n in shape if n != 1] != [n for n in expected.shape if n != 1]:
        return f"it has shape {list(shape)}, but the model expects {list(expected.shape)}"
    if expected.is_floating_point() and not floats:
        return "it holds integers, but the model expects floats; it is probably quantized in an unknown format"
    return None


def read_packed(
    match: PrequantizedWeight, spec: PackedSpec | None, shape: tuple[int, ...] | None, get: Callable[[str], Tensor]
) -> Packed:
    """Read a weight that is quantized on disk, or some rows of it, and validate its parts.

    Args:
        shape: of the float weight in the model; None if no model is known.

    Raises:
        BadFileError: they do not belong together, or not to this model. Unfit: see `read_weight`.
    """
    if match.cut is None:
        return read_weight(match, spec, shape, get)
    if not match.cut.rows:
        return read_weight(match.cut.of, None, match.cut.shape if shape is None else shape, get)
    cut = match.cut if shape is None else _without_padding(match.cut, shape[0])
    whole = read_weight(cut.of, None, cut.shape, get)
    packed = packed_rows.cut(whole.spec.scheme.codec.cuttable(whole), cut.rows)
    if shape not in (None, packed.spec.shape):
        raise BadFileError(
            f"Cannot load weight {match.name!r} in {match.scheme}",
            f"it has shape {list(packed.spec.shape)} in the file, but the model expects {list(shape or ())}",
            "Check that base= is a pipeline of the same model",
        )
    return packed


def _without_padding(cut: Cut, rows: int) -> Cut:
    """Return a cut that the model has so many rows of: where it has fewer than the file, in which nothing but the model
    tells that the last rows are padding, the cut of as many rows as its parts have without these."""
    edges = [edge * rows for part in (*cut.rows, (0, cut.shape[0])) for edge in part]
    if rows >= cut.count or any(edge % cut.count for edge in edges):
        return cut
    scaled = [edge // cut.count for edge in edges]
    if cut.shape[0] - scaled[-1] >= _PADDED_TO:
        return cut
    return replace(cut, shape=(scaled[-1], *cut.shape[1:]), rows=tuple(zip(scaled[:-2:2], scaled[1:-2:2], strict=True)))


def _with_layout(packed: Packed) -> Packed:
    """Return a weight that no memory layout describes packed by row, if that has one; else as it is. It dequantizes to
    the same bits. So kernels read float8 with scales of blocks, each of which is repeated for the rows of its block."""
    codec = packed.spec.scheme.codec
    if codec.form(packed) is not None or packed.spec.rotation:
        return packed
    by_row = codec.cuttable(packed)
    return by_row if codec.form(by_row) is not None else packed


def common_kind(model: nn.Module, names: tuple[str, ...]) -> str | None:
    """Return the kind of the layers that own a weight (several if it is tied).

    None if one of them cannot run it packed, if they differ (a language model's head that is tied to its embeddings, or
    two layers with biases of their own: one layer takes the place of all), or if it is not a weight but a bias.
    """
    if not all(name.endswith(".weight") for name in names):
        return None
    owners = [model.get_submodule(name.rpartition(".")[0]) for name in names]
    kinds = {kind_of(owner) for owner in owners}
    same = len(kinds) == 1 and len({_apart_from_weight(owner) for owner in owners}) == 1
    return kinds.pop() if same else None


def _apart_from_weight(layer: nn.Module) -> tuple[object, ...]:
    """Return what else than its weight a layer computes with: its bias by identity, a convolution's geometry, the scale
    of Gemma's embeddings."""
    geometry = ("stride", "padding", "dilation", "groups", "padding_mode", "scalar_embed_scale")
    return id(getattr(layer, "bias", None)), *(str(getattr(layer, name, None)) for name in geometry)


def kind_to_quantize(model: nn.Module, names: tuple[str, ...]) -> str | None:
    """`common_kind` for a weight that is not quantized yet.

    None for the output projection of `nn.MultiheadAttention`: it reads the weight itself, which no library's quantized
    module allows, so transformers does not quantize such layers and cannot read a file that has them quantized.
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
    spec: QuantSpec | None = None,
    dtype: torch.dtype | None = None,
    device: str | None = None,
) -> None:
    """Replace the modules that own a weight (one, or several that are tied to it) by one that runs it packed.

    A weight of a kind that the library has no module for gets sdquant's own layer: a file may have more than it runs.
    So does one whose owner reads the weight's dtype, for which sdquant's layer returns that of the float weight.

    Args:
        names: the weight's names. dtype: that the layer computes in; None for the dtype of the float weight.
        device: that it will compute on, even if it is offloaded now; None for the device of its parts.
    """
    paths = [name.rpartition(".")[0] for name in names]
    modules = [model.get_submodule(path) for path in paths]
    kind = common_kind(model, names)
    scheme = packed.spec.scheme
    if kind is None:
        raise UnsupportedFileError(
            f"Cannot load weight {names[0]!r}, which is quantized to {scheme}",
            f"it belongs to a {' and a '.join(type(module).__name__ for module in modules)}, "
            "which sdquant cannot run quantized",
            "Quantize the model again without it (skip=)",
        )
    replacement: nn.Module
    library = runtime == "library" and "library" in scheme.runtimes and scheme.runs("library", kind, packed.spec.shape)
    in_layers = scheme.codec.library_in_layers
    if library and not in_layers and not any(components.weight_dtype_matters(model, path) for path in paths):
        replacement = scheme.codec.to_library(modules[0], packed, spec)
    else:
        compute = "library" if library and in_layers else None
        replacement = layer = quantized_layer(modules[0], packed, dtype, compute, path=paths[0])
        layer.lay_out(device or str(packed.device))
    for path in paths:
        components.set_module(model, path, replacement)
    peft_hooks.prepare(model, paths)
