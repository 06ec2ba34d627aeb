"""Import quantization and offload options from SD.Next's config.json, including those of old versions, as Settings.

SD.Next stores only values that differ from its defaults. They are imported unchanged; the settings page reports whether
they work here. The tables below list all options that are known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import SdquantError, SettingsError
from ..planning import Settings
from .file import FORMAT, from_value, parse, short

if TYPE_CHECKING:
    from ..compat import Machine

AUTO, POST = "auto", "post"


@dataclass(frozen=True, kw_only=True)
class Migrated:
    """Settings read from elsewhere.

    Attributes:
        taken: names of the options that were imported into `settings`, at least in part.
        left: the other options about quantization or offload, each with the reason why it was left out.
    """

    settings: Settings
    taken: tuple[str, ...]
    left: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class SDNextQuantizer:
    """One of SD.Next's ways to quantize.

    Attributes:
        title: its name in SD.Next.
        targets: the option with the components to quantize.
        type, default: the option with the type, and its value if the file has none.
        type_te: the option with the type for text encoders, if there is one; otherwise `type` applies to them too.
        schemes: type in lower case to sdquant's scheme.
        mode: "auto", "post", or the option with the mode.
        options: switches and numeric options to the options of the scheme.
        skip: the option with the modules not to quantize.
    """

    title: str
    targets: str
    type: str
    default: str
    schemes: Mapping[str, str]
    type_te: str | None = None
    mode: str = AUTO
    options: Mapping[str, str] = field(default_factory=dict)
    skip: str | None = None

    @property
    def others(self) -> tuple[str, ...]:
        """Return the names of all its options except the targets."""
        named = (self.type, self.type_te, self.mode if self.mode not in (AUTO, POST) else None, self.skip)
        return (*(name for name in named if name), *self.options)


# In the order in which SD.Next asks them: of two that are ticked for a part, the first quantizes it.
QUANTIZERS = (
    SDNextQuantizer(
        title="SDNQ",
        targets="sdnq_quantize_weights",
        type="sdnq_quantize_weights_mode",
        default="int8",
        type_te="sdnq_quantize_weights_mode_te",
        schemes={
            "int8": "sdnq-int8", "float8_e4m3fn": "sdnq-fp8", "int6": "sdnq-int6", "int4": "sdnq-int4",
            "uint4": "sdnq-uint4", "uint3": "sdnq-uint3",
        },
        mode="sdnq_quantize_mode",
        options={
            "sdnq_group_size": "group_size", "sdnq_use_hadamard": "hadamard", "sdnq_use_svd": "svd",
            "sdnq_svd_rank": "rank", "sdnq_use_dynamic_quantization": "dynamic",
        },
        skip="sdnq_modules_to_not_convert",
    ),
    SDNextQuantizer(
        title="BitsAndBytes",
        targets="bnb_quantization",
        type="bnb_quantization_type",
        default="nf4",
        schemes={"nf4": "nf4", "fp4": "fp4", "fp8": "bnb-int8"},  # its "fp8" is bitsandbytes' LLM.int8
    ),
    SDNextQuantizer(
        title="Quanto",
        targets="quanto_quantization",
        type="quanto_quantization_type",
        default="int8",
        schemes={"int8": "qint8", "int4": "qint4", "int2": "qint2", "float8": "qfloat8"},
    ),
    SDNextQuantizer(
        title="Optimum Quanto after loading",
        targets="optimum_quanto_weights",
        type="optimum_quanto_weights_type",
        default="qint8",
        schemes={"qint8": "qint8", "qint4": "qint4", "qint2": "qint2", "qfloat8_e4m3fn": "qfloat8"},
        mode=POST,
    ),
    SDNextQuantizer(
        title="NNCF",
        targets="nncf_compress_weights",
        type="nncf_compress_weights_mode",
        default="int8_sym",
        schemes={"int8": "int8", "int8_sym": "int8_sym", "int4": "int4", "int4_asym": "int4", "int4_sym": "int4_sym"},
    ),
)  # fmt: skip

SAME = "same as model"

# SD.Next's names of components, in lower case, and their roles in sdquant; "" if sdquant does not load them.
ROLES_OF = {
    "model": "model", "transformer": "model", "te": "text_encoder", "text encoder": "text_encoder", "vae": "vae",
    "llm": "", "control": "", "controlnet": "",
}  # fmt: skip

# Switches of versions before there was diffusers_offload_mode; of both, the first counted.
OLD_OFFLOADS = {"diffusers_seq_cpu_offload": "sequential", "diffusers_model_cpu_offload": "model"}

OFFLOAD, WATERMARK = "diffusers_offload_mode", "diffusers_offload_max_gpu_memory"

# Why an option is left out, by a pattern for its whole name; the first match counts. Other options are ignored.
LEFT = (
    (r"torchao_.*", "sdquant only reads TorchAO's files; int8 and int4 are nearest to its weight-only types"),
    (r"layerwise_quantization.*", "it casts to float8 without scales; fp8 takes as little memory and is closer"),
    (r"trt_quantization.*", "sdquant has no TensorRT"),
    (r"nunchaku_.*", "sdquant reads Nunchaku's files as they are; svdq-int4 and svdq-nvfp4 make such of other models"),
    (r"nncf_quantize.*", "it quantizes activations inside OpenVINO, which sdquant does not use"),
    (r"optimum_quanto_activations_type", "activations have a setting of their own here, compute"),
    (r"bnb_quantization_storage", "sdquant stores 4-bit codes in bytes"),
    (r"models_not_to_quant", "it names kinds of models, and sdquant's skip names modules"),
    (r"sdnq_modules_dtype_dict", "sdquant has one type for each part of a pipeline, and skip for single modules"),
    (r"diffusers_offload_min_gpu_memory", "balanced offload needs none: it evicts only what is in the way"),
    (r"diffusers_offload_(always|never)|models_not_to_offload", "balanced offload chooses by need, not by name"),
    (r"(sdnq|bnb|quanto|optimum_quanto|nncf)_.*|diffusers_offload_.*|group_offload_.*", "sdquant has nothing like it"),
)


def read(text: str, *, machine: Machine | None = None) -> Migrated:
    """Import the text of SD.Next's config.json.

    Args:
        machine: its GPU memory converts options that are a share of it; None leaves them out.

    Raises:
        SettingsError: the text is not a JSON object, or too large.
    """
    return _of_config(_table(text), machine)


def read_any(text: str, *, machine: Machine | None = None) -> Migrated:
    """Import a settings file of sdquant, or else SD.Next's config.json.

    Raises:
        SettingsError: it is neither, or an invalid settings file.
    """
    config = _table(text)
    if config.get("format") == FORMAT:
        settings = from_value(config, "the file")
        return Migrated(settings=settings, taken=tuple(settings.to_dict()), left=())
    result = _of_config(config, machine)
    if not result.taken and not result.left:
        raise SettingsError(
            "Cannot read the file as settings",
            "it has neither sdquant's settings nor SD.Next options for quantization or offload",
            "Choose a file written by the export button, or SD.Next's config.json",
        )
    return result


def _table(text: str) -> dict[str, Any]:
    config = parse(text, "the file")
    if not isinstance(config, dict):
        raise SettingsError(
            "Cannot read the file as settings", "it is not a table of names and values", "Choose another file"
        )
    return config


def _of_config(config: Mapping[str, Any], machine: Machine | None) -> Migrated:
    book = _Book(config)
    _schemes(book)
    _offload(book, machine)
    for name, value in config.items():
        if value not in (None, False, "", [], {}) and name not in book.handled:
            why = next((why for pattern, why in LEFT if re.fullmatch(pattern, name)), None)
            if why is not None:
                book.leave(name, why)
    return Migrated(settings=book.settings, taken=tuple(book.taken), left=tuple(book.left))


class _Book:
    """Options imported and left out so far, and the settings that result."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.settings = Settings()
        self.taken: dict[str, None] = {}
        self.left: list[tuple[str, str]] = []
        self.handled: set[str] = set()

    def get(self, name: str) -> Any:
        """Return an option's value; None if it is off or missing."""
        return self.config.get(name) or None

    def word(self, name: str, default: str) -> str:
        """Return an option's text in lower case."""
        return str(self.get(name) or default).strip().lower()

    def take(self, option: str, changes: Mapping[str, Any]) -> bool:
        """Import an option if the resulting settings are valid; otherwise leave it out with the reason."""
        try:
            self.settings = self.settings.but(changes)
        except SdquantError as error:
            self.leave(option, f"{short(error.what)} ({error.why})")
            return False
        self.taken[option] = None
        self.handled.add(option)
        return True

    def leave(self, option: str, why: str) -> None:
        """Leave an option out, for a reason."""
        self.handled.add(option)
        if (option, why) not in self.left:
            self.left.append((option, why))


def _schemes(book: _Book) -> None:
    owners: dict[str, SDNextQuantizer] = {}
    for row in QUANTIZERS:
        for role, target in _targets(book, row):
            if role in owners:
                why = f"{owners[role].title} is ticked for {target} too and takes precedence in SD.Next"
                book.leave(row.targets, why)
            elif _take_scheme(book, row, role):
                owners[role] = row
    quantizers = list({row.targets: row for row in owners.values()}.values())
    for row in QUANTIZERS:
        for name in row.others:
            if book.get(name) is not None and row not in quantizers and name not in book.handled:
                book.leave(name, f"it has no effect here: {row.targets} quantizes nothing that was imported")
    for row in quantizers:
        if row.skip is not None and book.get(row.skip) is not None:
            names = [word for word in re.split(r"[;|,\s]+", str(book.get(row.skip))) if word]
            book.take(row.skip, {"skip": names})
    _mode(book, quantizers)


def _targets(book: _Book, row: SDNextQuantizer) -> list[tuple[str, str]]:
    """Return the roles that a quantizer is ticked for, each with SD.Next's name for it."""
    value = book.get(row.targets)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        book.leave(row.targets, f"{short(repr(value))} is not a list of components")
        return []
    roles = []
    for word in dict.fromkeys(value):
        role = ROLES_OF.get(word.strip().lower())
        if role:
            roles.append((role, word))
        else:
            what = "not a component that sdquant knows" if role is None else "not loaded by sdquant"
            book.leave(row.targets, f"{short(word)} is {what}")
    return roles


def _take_scheme(book: _Book, row: SDNextQuantizer, role: str) -> bool:
    option, kind = row.type, book.word(row.type, row.default)
    if role == "text_encoder" and row.type_te is not None and book.word(row.type_te, SAME) != SAME:
        option, kind = row.type_te, book.word(row.type_te, SAME)
    scheme = row.schemes.get(kind)
    if scheme is None:
        known = ", ".join(row.schemes)
        book.leave(option, f"of {row.title}'s types sdquant supports {known}, not {short(kind)}")
        book.leave(row.targets, f"{role}: there is no such scheme, see {option}")
        return False
    if not book.take(row.targets, {f"quant.{role}": scheme}):
        return False
    for name in (row.type, row.type_te):
        if name is not None and book.get(name) is not None:
            book.taken[name] = None
            book.handled.add(name)
    for name, word in row.options.items():
        value = book.get(name)
        if value is not None:
            more = f"{scheme},{word}" if value is True else f"{scheme},{word}={short(value)}"
            scheme = more if book.take(name, {f"quant.{role}": more}) else scheme
    return True


def _mode(book: _Book, quantizers: list[SDNextQuantizer]) -> None:
    """Import the mode: SD.Next has one for each quantizer, sdquant one for all."""
    modes = {row.mode if row.mode in (AUTO, POST) else book.word(row.mode, AUTO): row for row in quantizers}
    for mode, row in modes.items():
        option = row.targets if row.mode in (AUTO, POST) else row.mode
        if len(modes) > 1 and mode != AUTO:
            book.leave(option, f"mode {mode}: all components share one mode, and others use another one")
        elif len(modes) == 1 and (mode != AUTO or book.get(option) is not None):
            book.take(option, {"mode": mode})


def _offload(book: _Book, machine: Machine | None) -> None:
    mode = book.get(OFFLOAD)
    if mode is not None:
        book.take(OFFLOAD, {"offload": mode})
    ticked = [name for name in OLD_OFFLOADS if book.get(name) is True]
    for name in ticked:
        if mode is not None or name != ticked[0]:
            book.leave(name, f"{OFFLOAD if mode is not None else ticked[0]} already sets it")
        else:
            book.take(name, {"offload": OLD_OFFLOADS[name]})
    share = book.get(WATERMARK)
    if share is None:
        return
    if not isinstance(share, (int, float)) or isinstance(share, bool) or not share > 0:
        book.leave(WATERMARK, f"{short(repr(share))} is not a share of the memory")
        return
    # Old versions had gigabytes there, whose numbers are above one.
    total = machine.best.memory_total if machine is not None and machine.best.kind != "cpu" else None
    if share <= 1 and total is None:
        book.leave(WATERMARK, "it is a share of the graphics card's memory, whose size is not known here")
        return
    size = share if share > 1 else share * (total or 0) / 1e9
    book.take(WATERMARK, {"budget": f"{size:.1f}GB"})
