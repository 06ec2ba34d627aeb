"""Requests: the arguments of `load_model`, each field with its default, help and choices.

The flags of the command line and the settings page are generated from these fields.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from ..compat import COMPUTES, hardware, meant
from ..core import AUTO as AUTO
from ..core import COMPUTE_DTYPES, OFFLOAD_MODES, check_offload_mode, registry
from ..errors import SettingsError
from ..offload import mode_named
from ..rules import rules_of, with_rules
from ..utils.arguments import unknown
from ..utils.byte_sizes import parse_budget, parse_size
from ..utils.suggestions import did_you_mean
from . import statistics_arguments
from .component_files import ComponentFile, expanded_path, parts_of, require_parts
from .mix_arguments import refuse_auto_of_one, refuse_wrong_mix, with_options_of_auto

if TYPE_CHECKING:
    from ..core import QuantSpec
    from ..formats import Given
    from ..offload import OffloadMode
    from ..rules import QuantizationRule

_T = TypeVar("_T")
OFFLOADS = (*OFFLOAD_MODES, AUTO)
LOAD_MODES = ("auto", "pre", "post")
RUNTIMES = ("library", "plain", "openvino")
NOT_QUANTIZED = "none"
RULES = "rules"

# A scheme for all chosen components, or one for each; None means "as found on disk".
Quant = str | Mapping[str, str | None] | None


def _about(
    help: str, choices: tuple[str, ...] = (), metavar: str | None = None, *, setting: bool = True
) -> dict[str, Any]:
    """Return the metadata of a field. `setting`: whether it applies beyond one call, so it is on the settings page."""
    return {"help": help, "choices": choices, "metavar": metavar, "setting": setting}


def _option(
    default: _T,
    help: str,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    *,
    setting: bool = True,
    shown: bool = True,
) -> _T:
    """Return a field that has a default. `shown`: whether the request's repr has it."""
    return field(default=default, repr=shown, metadata=_about(help, choices, metavar, setting=setting))


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call of `load_model`, as values."""

    path: str = field(
        metadata=_about("pipeline folder, component folder, .safetensors, .gguf, or hub id", setting=False)
    )
    quant: Quant = _option(
        None,
        "scheme, backend:scheme, scheme,option=value, scheme,embeddings, component=scheme (repeat), auto, or "
        "auto,size=6GB",
        metavar="S",
    )
    offload: str = _option("none", "how weights share the fast memory", OFFLOADS)
    mode: str = _option(
        "auto", "quantize while loading (pre), after it (post), or whichever the scheme can", LOAD_MODES
    )
    components: tuple[str, ...] | None = _option(None, "which components to quantize", metavar="NAME", setting=False)
    skip: tuple[str, ...] = _option((), "modules to leave as they are: a part of their path, or a pattern with *")
    rules: tuple[QuantizationRule, ...] | None = _option(
        None, "rules, for quant=rules: a YAML or JSON file, or JSON text", metavar="FILE", setting=False
    )
    quant_stats: str | None = _option(
        None,
        "what `sdquant calibrate` found of activations, for rules with act_static_scale and for svdq-int4, svdq-nvfp4",
        metavar="FILE",
        setting=False,
    )
    base: str | None = _option(
        None,
        "pipeline folder that has the rest of a lone transformer, UNet or checkpoint",
        metavar="FOLDER",
        setting=False,
    )
    runtime: str | None = _option(
        None, "the library's own modules, sdquant's plain layers, or OpenVINO on the CPU for NNCF's schemes", RUNTIMES
    )
    compute: str | None = _option(
        None,
        "what products with quantized weights are computed in: float (the default), or, with activations quantized "
        "as well, int8, which is faster on CPUs from tens of rows, fp8, for cards that multiply 8-bit floats, or fp4, "
        "for NVFP4 weights on cards that multiply 4-bit ones",
        COMPUTES,
    )
    size: int | str | None = _option(
        None,
        "how many bytes all weights together may take, such as 6GB: each gets the scheme that is worth its bytes most "
        "(scheme auto)",
        metavar="6GB",
    )
    quality: float | None = _option(
        None,
        "instead of size: the least signal-to-noise ratio of the outputs in dB, such as 30, for as few bytes as "
        "possible (scheme auto)",
        metavar="DB",
    )
    device: str | None = _option(None, "compute device (default: the best there is)", metavar="DEVICE")
    dtype: str | None = _option(None, "dtype of what is not quantized (default: as in the file)", COMPUTE_DTYPES)
    budget: int | str | None = _option(None, "how much of the fast memory weights may take", metavar="6GB")
    allow_incompatible: bool = _option(False, "try a combination that the matrix refuses")
    allow_pickle: bool = _option(
        False, "open .ckpt, .pt and .bin files too, which are pickles, with torch's weights_only"
    )
    cache: str | None = _option(
        None,
        "keep quantized weights for the next load: on, off, or a folder (default: $SDQUANT_CACHE, else off)",
        metavar="FOLDER",
    )
    cache_limit: int | str = _option("50GB", "how much the cache may hold (default: 50GB)", metavar="SIZE")
    parts: tuple[ComponentFile, ...] = _option(
        (),
        "file of one more component, such as a text encoder or VAE, for its place in the pipeline, or, where it "
        "fits several, component=file (repeat)",
        metavar="FILE",
        setting=False,
    )
    variant: str | None = _option(
        None,
        "which of a folder's variants (fp16, ema, ...), for each component that has it",
        metavar="NAME",
        setting=False,
    )
    config: Given | None = _option(
        None,
        "for a file that does not say how it is quantized: its quantization_config, as JSON, or a JSON file with it",
        metavar="FILE",
        setting=False,
    )
    revision: str | None = _option(
        None, "branch, tag or commit of a hub repository (default: main)", metavar="NAME", setting=False
    )
    subfolder: str | None = _option(
        None, "folder in the model's folder or hub repository to load", metavar="FOLDER", setting=False
    )
    token: str | bool | None = _option(
        None,
        "the hub's access token (default: $HF_TOKEN, else that of `hf auth login`)",
        metavar="TOKEN",
        setting=False,
        shown=False,
    )
    progress: bool = _option(True, "show progress bars", setting=False)

    def __post_init__(self) -> None:
        _text("path", self.path)
        _ = self.offload_mode  # parsed now, like what follows, so that errors are raised here
        for name in ("mode", "runtime", "compute", "dtype"):
            if getattr(self, name) is not None or name == "mode":
                _one_of(name, getattr(self, name), self.__dataclass_fields__[name].metadata["choices"])
        if self.device is not None:
            hardware.device_kind(_text("device", self.device))
        if self.token is not None and not (
            isinstance(self.token, bool) or (isinstance(self.token, str) and self.token)
        ):
            raise SettingsError(
                "Invalid token",
                "it must be a non-empty string, True or False",
                "Give the access token, or set HF_TOKEN",
            )
        for name in ("base", "cache", "variant", "quant_stats", "revision", "subfolder"):
            if getattr(self, name) is not None:
                _text(name, getattr(self, name))
        _ = self.cache_bytes
        for name in ("components", "skip"):
            _names(name, getattr(self, name))
        require_parts(self.parts)
        _ = self.config_table
        for name in (row.name for row in fields(self) if isinstance(row.default, bool)):
            if not isinstance(getattr(self, name), bool):
                raise SettingsError(
                    f"Invalid {name}={getattr(self, name)!r}", f"{name} must be True or False", "Use one of them"
                )
        _ = self.budget_bytes
        if isinstance(self.quant, Mapping):
            for name in self.quant:
                _text("component in quant", name)
        _ = self.size_bytes
        refuse_wrong_mix(self)
        self._refuse_beside_auto()
        _ = self.specs

    @property
    def automatic(self) -> bool:
        """True if an "auto" has to be resolved."""
        return AUTO in (self.quant, self.offload)

    @property
    def mixed(self) -> bool:
        """True if a mix is to be chosen: each weight gets a scheme of its own."""
        return self.size is not None or self.quality is not None

    def _refuse_beside_auto(self) -> None:
        for what, given, chosen in (
            ("rules", self.rules is not None, "them"),
            ("components", self.components is not None and not self.mixed, "them"),
            ("mode='post'", self.mode == "post", "the mode"),
        ):
            if self.quant == AUTO and given:
                why = f"auto chooses {chosen} itself"
                raise SettingsError(f"Cannot combine {what} with quant='auto'", why, "Remove one of the two")

    @cached_property
    def offload_mode(self) -> OffloadMode | None:
        """The offload mode; None for "auto". Raises UnknownOffloadError if there is none of that name."""
        check_offload_mode(self.offload, AUTO)
        return None if self.offload == AUTO else mode_named(self.offload)

    @cached_property
    def budget_bytes(self) -> int | None:
        """The budget in bytes. Raises SettingsError if it is not a size, or the mode has none."""
        return parse_budget(self.budget) if self.offload_mode is None else self.offload_mode.budget_bytes(self.budget)

    @cached_property
    def size_bytes(self) -> int | None:
        """The size in bytes. Raises SettingsError if it is not one."""
        return None if self.size is None else parse_size(self.size, "A size")

    @cached_property
    def cache_bytes(self) -> int:
        """The limit of the cache in bytes. Raises SettingsError if it is not a size."""
        return parse_size(self.cache_limit, "A cache_limit")

    @cached_property
    def specs(self) -> Mapping[str, QuantSpec | None]:
        """The scheme of each component in `quant`, "*" for all others; None means "do not quantize". Components that
        are absent are loaded as they are on disk.

        Raises:
            UnknownQuantError, SettingsError: a scheme or option that does not exist.
        """
        if self.quant in (None, AUTO) and self.rules is None:
            if not self.mixed:
                statistics_arguments.refuse_useless({}, self.quant_stats)
            return {}
        quant = RULES if self.quant is None else self.quant
        each = quant if isinstance(quant, Mapping) else {"*": quant}
        specs = {name: _spec(text) for name, text in each.items() if text is not None}
        if self.rules is None:
            return statistics_arguments.calibrated(specs, self.quant_stats)
        ruled = {name: spec for name, spec in specs.items() if spec is not None and spec.scheme.name == RULES}
        if not ruled:
            raise SettingsError(
                f"Cannot combine rules with quant={self.quant!r}", "rules need quant='rules'", "Remove one of the two"
            )
        return specs | {name: with_rules(spec, self.rules, self.quant_stats) for name, spec in ruled.items()}

    @cached_property
    def config_table(self) -> Mapping[str, Any]:
        """The config; {} if there is none. Raises SettingsError if it is not one."""
        from ..formats import component_configs

        return {} if self.config is None else component_configs.config_of(self.config)

    @property
    def plain_runtime(self) -> str | None:
        """The requested runtime: by name, or "plain" if `compute` needs sdquant's plain layers."""
        return meant(self.runtime, self.compute)

    @property
    def eight_bit(self) -> str | None:
        """The type "int8", "fp8" or "fp4" if products are computed in it; None for floating point."""
        return None if self.compute == "float" else self.compute


def make_request(path: Any, **values: Any) -> Request:
    """Build a Request from the keyword arguments of `load_model`; torch dtypes, devices and paths become strings.

    Raises:
        SdquantError: an unknown argument or an invalid value.
    """
    known = [row.name for row in fields(Request)]
    for name in values:
        if name not in known:
            raise unknown(name, known, "load_model")
    arguments = with_options_of_auto(values)
    return Request(
        path=_path(path),
        **{name: _CLEAN[name](value) if name in _CLEAN else value for name, value in arguments.items()},
    )


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _switch(value: Any) -> Any:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else _path(value)


def _lower(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


def _torch_name(value: Any) -> Any:
    """Return the name of a torch dtype or device; other values unchanged, to be refused later."""
    name = str(value)
    known = isinstance(value, str) or type(value).__module__.partition(".")[0] == "torch"
    return name.removeprefix("torch.").strip().lower() if known else value


def _tuple(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else value


def _skips(value: Any) -> Any:
    return () if value is None else _tuple(value)


def _number(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value  # to be refused later


def _quant(value: Any) -> Any:
    return AUTO if isinstance(value, str) and value.strip().lower() == AUTO else value


# Converters from what callers write to field values.
_CLEAN: Mapping[str, Callable[[Any], Any]] = {
    "offload": _lower,
    "quant": _quant,
    "mode": _lower,
    "runtime": _lower,
    "compute": _lower,
    "dtype": _torch_name,
    "device": _torch_name,
    "base": expanded_path,
    "config": expanded_path,
    "quant_stats": expanded_path,
    "rules": rules_of,
    "components": _tuple,
    "cache": _switch,
    "skip": _skips,
    "quality": _number,
    "parts": parts_of,
}


def _text(name: str, value: object) -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise SettingsError(f"Invalid {name}={value!r}", f"{name} must be a non-empty string", "Give its name or path")


_EXAMPLES = {"components": "unet", "skip": "mid_block"}


def _names(name: str, value: object) -> None:
    if value is None or (isinstance(value, tuple) and all(isinstance(one, str) and one for one in value)):
        return
    raise SettingsError(
        f"Invalid {name}={value!r}", f"{name} must be a list of names", f'Use for example {name}=["{_EXAMPLES[name]}"]'
    )


def _spec(text: str) -> QuantSpec | None:
    if not isinstance(text, str):
        raise SettingsError(
            f"Invalid quant={text!r}", "a scheme must be a string", 'Use quant="nf4" or quant={"unet": "nf4"}'
        )
    refuse_auto_of_one(text)
    return None if text.strip().lower() == NOT_QUANTIZED else registry.parse(text)


def _one_of(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise SettingsError(
            f"Unknown {name} {value!r}",
            f"{name} must be one of {', '.join(choices)}",
            did_you_mean(str(value).lower(), choices, f"Remove it, or use {choices[0]!r}"),
        )
