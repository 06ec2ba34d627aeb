"""Load a Config: the defaults, overridden by a file, overridden by key=value arguments."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import SdquantError, SettingsError
from ...utils import strict_yaml
from ...utils.suggestions import nearest
from . import topology
from .config import RunConfig
from .keys import did_you_mean, key, keys
from .quantization import quantization_of
from .value_types import COMMANDS, KINDS, Key, format_value

if TYPE_CHECKING:
    from .topology import Shards

log = logging.getLogger(__name__)

FILE, OVERRIDE = "file", "override"
EXAMPLES = Path(__file__).parent / "examples"


def _place(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the path, or the shipped file of that name if the path does not exist."""
    name = os.fspath(path)
    shipped = EXAMPLES / name
    return shipped if os.path.basename(name) == name and shipped.is_file() and not os.path.exists(path) else path


def load(path: str | os.PathLike[str] | None, overrides: Sequence[str] = (), *, command: str = "generate") -> RunConfig:
    """Load a config file with overrides, for a command.

    A file may serve all commands: keys of other commands are checked, kept and logged, except for those about loading
    the model, which are refused. An override may only set keys of this command.

    Args:
        path: of a YAML file, or the name of a shipped one ("digits-sd.yml"); None for the defaults alone.
        overrides: "key=value" each, split at the first "="; the last one for a key counts. The text is parsed as the
            key's type; "" and "null" mean null if that is the key's default.
        command: one of value_types.COMMANDS.

    Raises:
        SettingsError: there is no such file, an invalid key or value, or keys that contradict each other.
        UnknownQuantError: no such preset or scheme. BadFileError: the YAML is invalid.
    """
    if command not in COMMANDS:
        raise SettingsError(f"Unknown command {command!r}", f"it must be one of {', '.join(COMMANDS)}", "Use one")
    values: dict[str, Any] = {row.name: row.default for row in keys()}
    origins: dict[str, str] = {}
    path = None if path is None else _place(path)
    source = "" if path is None else os.fspath(path)
    lines: Mapping[str, int] = {}
    if path is not None:
        document = strict_yaml.read(path)
        lines = document.lines
        for name, value in document.values.items():
            values[name] = _of_file(name, value, f"{source}, line {document.lines[name]}")
            origins[name] = FILE
    for text in overrides:
        name, value = _of_text(text, command)
        values[name] = value
        origins[name] = OVERRIDE
    config = RunConfig(values, source=source, command=command, given=origins)
    _tell_unused(config, lines)
    return config


def shards_of(config: RunConfig) -> Shards:
    """Resolve and log the number of parts that ranges are computed in. Counts accelerators only if needed.

    Raises:
        SettingsError: the environment is not one that torchrun sets.
    """
    return topology.resolve(
        config.compile_topology_num_slices,
        config.quantization_local_shard_count,
        environment=os.environ,
        accelerators=topology.visible_accelerators,
    )


def _of_file(name: str, value: Any, where: str) -> Any:
    row = _known(name, f"{where} sets {name!r:.80}")
    return checked(row, value, f"{where} sets {name}")


def _of_text(text: str, command: str) -> tuple[str, Any]:
    name, sign, word = text.partition("=")
    name = name.strip()
    what = f"Cannot apply override {text!r:.120}"
    if not sign:
        raise SettingsError(what, "an override has the form key=value", "Write it like seed=1")
    row = _known(name, what)
    if command not in row.commands:
        why = f"{name} is a key of {' and '.join(row.commands)}, and {command} does not use it"
        raise SettingsError(what, why, "Leave it out")
    if row.default is None and word.strip() in ("", "null"):
        return name, None
    kind = KINDS[row.kind]
    try:
        value = kind.parse(word)
    except ValueError as error:
        raise SettingsError(
            what, f"{name} must be {_said(row)}, but {error}", f"Write it like {name}={kind.example}"
        ) from error
    return name, checked(row, value, what)


def checked(row: Key, value: Any, what: str) -> Any:
    """Convert a YAML value to the value of a key.

    Args:
        what: first part of an error.

    Raises:
        SettingsError: the key cannot have this value.
    """
    kind = KINDS[row.kind]
    if value is None and row.default is None:
        return None
    fix = f"Write it like {row.name}={kind.example}"
    if row.choices:
        fix = f"Use one of {', '.join(row.choices)}"
    if value is None:
        raise SettingsError(
            what, f"it has no value, but {row.name} must be {_said(row)}", f'{fix}, or "" for an empty text'
        )
    try:
        result = kind.read(value)
    except ValueError as error:
        raise SettingsError(what, f"{error}, but {row.name} must be {_said(row)}", fix) from error
    if isinstance(result, str) and row.choices:
        result = result.strip().lower()
    if row.choices and result not in row.choices:
        raise SettingsError(what, f"{row.name} must be one of {', '.join(row.choices)}", _near(result, row.choices))
    if (row.least is not None and result < row.least) or (row.most is not None and result > row.most):
        raise SettingsError(what, f"{row.name} must be {_said(row)}", "Use a number in this range")
    if row.check is not None:
        try:
            row.check(result)
        except SdquantError as error:
            raise type(error)(what, error.why, error.fix) from error
    return result


def _known(name: str, what: str) -> Key:
    try:
        return key(name)
    except SettingsError as error:
        raise SettingsError(what, f"there is no such key: {error.why}", did_you_mean(name)) from None


def _said(row: Key) -> str:
    """Describe a key's values, for errors."""
    text = KINDS[row.kind].said
    if row.least is not None and row.most is not None:
        text += f" from {row.least} to {row.most}"
    elif row.least is not None:
        text += f", at least {row.least}"
    return text + (", or null" if row.default is None else "")


def _near(value: Any, choices: Sequence[str]) -> str:
    near = nearest(str(value), choices, cutoff=0.5)
    return f"Did you mean {near}?" if near else "Use one of them"


def _tell_unused(config: RunConfig, lines: Mapping[str, int]) -> None:
    """Refuse overrides that have no effect, and loading keys that belong to another command; log the file's other keys
    that have no effect."""
    others = [
        name
        for name in config.given
        if config.command not in key(name).commands and config[name] != checked(key(name), key(name).default, name)
    ]
    for name in others:
        if key(name).field:  # whoever asks for an offload mode would take the run for one in it
            _refuse_other_loading(config, key(name), lines)
    if others:
        log.info("%s does not use these keys of %s: %s", config.command, config.source, ", ".join(others))
    unused = {**quantization_of(config).unused, **unused_in_training(config)}
    for name, reason in unused.items():
        if config.given.get(name) == OVERRIDE:
            raise SettingsError(f"Cannot use {name}", f"it has no effect here: {reason}", "Leave it out")
        log.warning("%s of %s has no effect here: %s", name, config.source, reason)


def _refuse_other_loading(config: RunConfig, row: Key, lines: Mapping[str, int]) -> None:
    whose, value = " and ".join(row.commands), format_value(config[row.name])
    raise SettingsError(
        f"{config.source}, line {lines[row.name]} sets {row.name}: {value}",
        f"{row.name} is a key of {whose}, and {config.command} does not use it: it loads the model in its own way",
        f"Remove it from the file, and add {row.name}={value} to `sdquant {row.commands[0]}` where you want it",
    )


_OF_LORA = ("lora_alpha", "lora_dropout", "lora_target_modules")
_OF_LAYERS = ("components", "skip", "runtime")


def unused_in_training(config: RunConfig) -> Mapping[str, str]:
    """Return the training keys that are set but have no effect beside the others, by name, each with the reason."""
    if config.command != "train":
        return {}
    reasons: dict[str, str] = {}
    if config.lora_rank:
        reasons["dtype"] = "it sets the dtype of a saved model, and LoRA weights are always float32"
    else:
        reasons |= dict.fromkeys(_OF_LORA, "lora_rank is 0, so no LoRA is trained")
        if not config.quantization and not config.rules:
            reasons |= dict.fromkeys(_OF_LAYERS, "nothing is quantized")
    if config.dataset_name:
        reasons["caption_column"] = "dataset_name has its own captions"
    if config.lr_scheduler == "constant":
        reasons["warmup_steps_fraction"] = "lr_scheduler: constant has no warmup; constant_with_warmup has one"
    return {name: reason for name, reason in reasons.items() if config[name] != key(name).default}
