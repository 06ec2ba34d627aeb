"""Shared parts of the quantizers for diffusers and transformers: select, load and dequantize weights."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import compat
from ..compat import hardware
from ..core import LONE, is_range, read_weight
from ..errors import BadFileError, IncompatibleError, UnsupportedFileError
from ..formats import safetensors, sdquant_metadata
from ..models import (
    BiasCorrection,
    common_kind,
    install_packed,
    key_names,
    misfit,
    quantize_weight,
    set_module,
    tied,
    ties_in,
)
from ..nn import QuantizedLayer, float_layer, packed_of, quantized_layer, set_compute
from ..planning import rule_checks, source_of_model, statistics_arguments, weight_selection
from ..rules import (
    RulesSpec,
    attach_rules,
    model_rules,
    product_ranges,
    require_magnitudes,
    require_ranges,
    rules_in,
    unweighed,
)

if TYPE_CHECKING:
    from ..core import Packed, PackedSpec, PrequantizedWeight, TensorInfo
    from .config import Config

log = logging.getLogger(__name__)


class LoadingWeights:
    """The weights of one model that diffusers or transformers is loading, in sdquant's plain layers.

    Attributes:
        planned: names of parameters that are quantized while they are loaded.
        found: weights that are quantized in the files, by parameter.
        ties: see `components.tied`.
        rules: recorded in the files, if they were quantized by rules. ranges: keys of products' static ranges in them.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.spec = config.spec
        self.planned: set[str] = set()
        self.prequantized: dict[str, PrequantizedWeight] = {}
        self.specs: dict[str, PackedSpec] = {}
        self.headers: dict[str, TensorInfo] = {}
        self.home: dict[str, Path] = {}
        self._files: dict[Path, safetensors.SafetensorsFile] = {}
        self.ties: dict[str, tuple[str, ...]] = {}
        self.rules: RulesSpec | None = None
        self.ranges: tuple[str, ...] = ()
        self._biases = BiasCorrection()

    def check(self, *, quantized: bool, device_map: Any = None) -> None:
        """Check the compatibility matrix, and refuse a device map with the disk in it.

        accelerate itself writes what goes there: float weights unquantized, and scales cast to the model's dtype.
        """
        if isinstance(device_map, Mapping) and "disk" in device_map.values():
            raise IncompatibleError(
                f"Cannot load {self.config.quant} with a device_map that puts parts of the model on disk",
                "weights on disk would stay unquantized, or their scales would lose precision",
                "Leave device_map out, and use sdquant.load_model(..., offload='balanced')",
            )
        mode = "found" if quantized else "pre"
        compat.check(self.config.quant, mode=mode, runtime="plain", compute=self.config.compute)

    def read(self, files: Iterable[str]) -> None:
        """Read the headers of a model's files.

        Raises:
            BadFileError: sdquant did not quantize them. UnsupportedFileError: they are of another format.
        """
        paths = [Path(file) for file in files]
        if any(path.suffix != ".safetensors" for path in paths) or not paths:
            raise UnsupportedFileError(
                f"Cannot load {paths[0] if paths else 'a quantized model'} with sdquant",
                "it is not a safetensors file",
                "Save the model again",
            )
        metadata: dict[Path, Mapping[str, str]] = {}
        for path in paths:
            header = safetensors.read_header(path)
            metadata[path] = header.metadata
            self.headers |= header.tensors
            self.home |= dict.fromkeys(header.tensors, path)
        own = sdquant_metadata.merged_own(metadata)
        if not own.get("weights") and "rules" not in own:
            raise BadFileError(
                f"Cannot load {paths[0]} with sdquant",
                "config.json says that it is quantized, but the file has no sdquant metadata",
                "Save the model again, or import the package that wrote it",
            )
        self.specs = sdquant_metadata.specs_in(paths[0], own)
        self.prequantized = sdquant_metadata.found_in(paths[0], own, self.specs, self.headers)
        self.rules = rules_in(paths[0], sdquant_metadata.rule_rows(paths[0], own))
        self.ranges = tuple(key for key in self.headers if is_range(key))

    def hold_against(self, model: nn.Module) -> None:
        """Rename the weights as in this (empty) model. Raise BadFileError if they do not belong to it."""
        self.ties = tied(model)
        here = {key: name for name, key in key_names.to_model(model, self.specs.keys(), self.ties.keys()).names.items()}
        self.specs = {here.get(key, key): spec for key, spec in self.specs.items()}
        self.prequantized = {here.get(key, key): weight for key, weight in self.prequantized.items()}
        parts = {key for weight in self.prequantized.values() for key in (*weight.keys.values(), *weight.extra)}
        schemes = dict.fromkeys(self.headers.keys() - parts, "") | {n: w.scheme for n, w in self.prequantized.items()}
        self.ties = ties_in(self.ties, schemes, frozenset(self.ties))
        for name, spec in self.specs.items():
            why = None
            if name not in self.ties:
                why = "the model has no such weight"
            elif tuple(model.get_parameter(name).shape) != spec.shape:
                why = f"the model expects {list(model.get_parameter(name).shape)}"
            elif common_kind(model, self.ties[name]) is None:
                why = "the model has it in a layer that cannot run quantized"
            if why is not None:
                raise BadFileError(
                    f"Cannot load weight {name!r} of shape {list(spec.shape)}",
                    why,
                    "Check that the weights and the config belong together",
                )

    def packed(self, name: str, parts: Mapping[str, Tensor]) -> Packed:
        """Return a quantized weight by its name in the model, from the parts that the library has read.

        Raises:
            BadFileError: they are damaged or inconsistent, as when sdquant loads the file.
        """
        entry, spec = self.prequantized[name], self.specs[name]
        read = {key: parts[part] for part, key in entry.keys.items()}

        def get(key: str) -> Tensor:
            if key in read:
                return read[key]
            return self._read(key)  # a table or description, which is not a part of the weight

        return read_weight(entry, spec, spec.shape, get)

    def compute_device(self, packed: Packed) -> str:
        """Return the device that a weight will compute on: its own, or for one on the CPU the default device, to which
        `model.to(...)` will most likely move it."""
        return self._default_device if packed.device.type == "cpu" else str(packed.device)

    @cached_property
    def _default_device(self) -> str:
        return hardware.default_device(hardware.probe())

    def _read(self, key: str) -> Tensor:
        path = self.home[key]
        self._files[path] = self._files.get(path) or safetensors.SafetensorsFile(path)
        return self._files[path].get(key)

    def mark(self, model: nn.Module) -> None:
        """Correct biases, and attach rules, their static ranges and `compute`, after the model's weights are loaded."""
        rules = self.rules or self.spec
        if isinstance(rules, RulesSpec):
            product_ranges.register_ranges(
                model, {key: self._read(key) for key in self.ranges}
            )  # the libraries have cast them, if at all
            attach_rules(model, rules)
        self._biases.apply(model)
        if self.config.compute is not None:
            set_compute(model, self.config.compute)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def plan(self, model: nn.Module, keep: Iterable[str]) -> None:
        """Choose the weights of an empty model that will be quantized.

        Args:
            keep: modules that the library wants to stay unquantized.

        Raises:
            IncompatibleError: there are no such weights.
        """
        self.ties = tied(model)
        src = source_of_model(model)
        shapes = {name: (info.shape, info.dtype) for name, info in src.tensors.items()}
        skip = (*self.config.skip, *keep)
        weights, kept = weight_selection.select(shapes, self.spec, "plain", skip, src.class_name, src.layers)
        self.planned = {weight.name for weight in weights}
        marked = rule_checks.marked_in(model, self.spec) if isinstance(self.spec, RulesSpec) else None
        layers = rule_checks.weights_in(src)
        extent = weight_selection.Extent(
            spec=self.spec, weights=len(weights), products=len(marked or ()), kept=kept, layers=layers
        )
        if isinstance(self.spec, RulesSpec):
            require_ranges(self.spec, ((name, shapes[name][0]) for name in sorted(self.planned)))
            for line in rule_checks.unused(self.spec, layers, [marked]):
                log.warning("%s", line[0].upper() + line[1:])
        statistics_arguments.require_statistics(self.spec)
        planned = [(name, shapes[name][0]) for name in sorted(self.planned)]
        require_magnitudes(self.spec, planned)
        for line in unweighed(self.spec, planned):
            log.warning("%s", line)
        weight_selection.require_something(f"a {type(model).__name__}", {LONE: extent})

    def quantize(self, model: nn.Module, name: str, tensor: Tensor) -> None:
        """Put a float weight into the model, quantized.

        Raises:
            BadFileError: its shape is not the model's. Nothing checks that later, once the weight is packed.
        """
        parameter = model.get_parameter(name)
        why = misfit(tuple(tensor.shape), tensor.is_floating_point(), parameter)
        if why is not None:
            fix = "Check that the weights and the config belong together"
            raise BadFileError(f"Cannot load tensor {name!r}", why, fix)
        weight = tensor.reshape(parameter.shape)
        packed = quantize_weight.encode(name, weight, self.spec)
        self._biases.add(name, name, weight, packed, self.spec)
        install_packed(model, self.ties.get(name, (name,)), packed, "plain", self.spec)


def dequantize(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace the quantized layers by float ones; tied ones stay tied.

    Args:
        dtype: of the weights; None for the compute dtype of each layer.
    """
    layers: dict[int, nn.Module] = {}
    for path, module in [*model.named_modules(remove_duplicate=False)]:
        packed = packed_of(module) if path else None
        if packed is not None:
            layers[id(module)] = layers.get(id(module)) or _float(module, packed, dtype)
            set_module(model, path, layers[id(module)])
    model_rules.forget(model)
    key_names.remember(model, key_names.conversions(model), quantized=False)


def _float(module: nn.Module, packed: Packed, dtype: torch.dtype | None) -> nn.Module:
    """Return the float layer for one of sdquant's or a library's, without the library's additional attributes."""
    if isinstance(module, QuantizedLayer):
        return float_layer(module, dtype)
    floats = float_layer(quantized_layer(module, packed), dtype)
    cls: Any = type(floats)
    sizes = (1, 1, 1) if isinstance(floats, nn.modules.conv._ConvNd) else (1, 1)
    usual = vars(cls(*sizes, device="meta"))
    for name in vars(floats).keys() - usual.keys():
        delattr(floats, name)
    return floats
