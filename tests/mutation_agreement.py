"""Models in one format each, with one thing changed: do `plan` and `verify` say of them what `load_model` does?

The models are those of `malformed`, the same one in the hub's formats, and those of `mutation_models`. A change is of
bytes, as in `test_mutations`, or of something that a sound file may have: a tensor's shape, dtype, name or values, a
setting.
"""

from __future__ import annotations

import math
import random
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import sdquant
from sdquant.errors import SdquantError

from . import hub_formats, malformed, mutation_models
from .entry_points import WAYS, answers
from .malformed import NAME, OTHER, Model
from .mutation_models import GgufModel, Sound
from .test_malformed_gguf import Row
from .test_mutations import mutated

SIZES = {NAME: (256, 64), OTHER: (64, 320)}
_DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32, torch.int64
)  # fmt: skip
_VALUES = (float("nan"), float("inf"), 0.0, -1.0, 1e30)


def originals(folder: Path) -> dict[str, Sound]:
    """A sound model in each format, by its name. folder: to write in."""
    source, stems = malformed.tiny(folder / "float"), tuple(key.removesuffix("weight") for key in SIZES)
    tiny = {name: form.make(source, folder / name.replace(" ", "-")) for name, form in malformed.FORMATS.items()}
    tiny |= {f"hub {name}": model for name in hub_formats.KINDS if (model := _of_hub(source, name)) is not None}
    models = {name: Sound(model, stems) for name, model in tiny.items()}
    models |= mutation_models.originals(folder / "others")
    outcomes = {name: disagreement(model, model.write(folder / "model")) for name, model in models.items()}
    unlike = {name: outcome for name, outcome in outcomes.items() if outcome != ("loaded", None)}
    assert all(name.startswith("hub ") for name in unlike), unlike  # some need layers of other sizes
    return {name: model for name, model in models.items() if name not in unlike}


def _of_hub(source: Path, name: str) -> Model | None:
    """The model in a format of the hub; None if layers of these sizes are not in it."""
    model, kind = Model.read(source), hub_formats.KINDS[name]
    dice = torch.Generator().manual_seed(0)
    try:
        for key, size in SIZES.items():
            parts, _ = kind.make(torch.randn(size, generator=dice) * 0.05)
            stem = key.removesuffix("weight")
            del model.tensors[key]
            model.tensors |= {stem + part: tensor for part, tensor in parts.items()}
    except (RuntimeError, ValueError, AssertionError):
        return None
    model.files["config.json"]["quantization_config"] = dict(kind.config)
    return model


def changed(sound: Sound, dice: random.Random) -> Sound:
    """A copy with one thing of a quantized layer, or of what is said about it, changed."""
    sound = sound.copy()
    model, name = sound.model, dice.choice(sound.names())
    if isinstance(model, GgufModel):
        dice.choice(_GGUF_CHANGES)(model, name, dice)
        return sound
    try:
        dice.choice(_CHANGES)(model, name, dice)
    except (RuntimeError, NotImplementedError):  # what torch does not do with this dtype
        _drop(model, dice.choice([name for name in sound.names() if name in model.tensors]), dice)
    return sound


def _drop(model: Model, key: str, dice: random.Random) -> None:
    del model.tensors[key]


def _cast(model: Model, key: str, dice: random.Random) -> None:
    model.tensors[key] = model.tensors[key].to(dice.choice(_DTYPES))


def _cut(model: Model, key: str, dice: random.Random) -> None:
    tensor = model.tensors[key]
    shapes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t.flatten(), lambda t: t.unsqueeze(0), lambda t: t.t() if t.ndim == 2 else t[None], lambda t: t[:-1],
        lambda t: t[..., : t.shape[-1] // 2], lambda t: torch.cat([t, t]), lambda t: t[:0], lambda t: t.unsqueeze(-1),
    ]  # fmt: skip
    model.tensors[key] = dice.choice(shapes)(tensor) if tensor.ndim else tensor.repeat(dice.choice((0, 1, 2, 64)))


def _fill(model: Model, key: str, dice: random.Random) -> None:
    shape, flat = model.tensors[key].shape, model.tensors[key].contiguous().flatten().clone()
    if not flat.is_floating_point() or flat.itemsize == 1:
        flat.view(torch.uint8).fill_(dice.choice((0, 127, 128, 255)))
    elif flat.numel():
        flat[dice.randrange(flat.numel())] = dice.choice(_VALUES)
    model.tensors[key] = flat.view(shape)


def _rename(model: Model, key: str, dice: random.Random) -> None:
    other = dice.choice(sorted(model.tensors))
    model.tensors[key], model.tensors[other] = model.tensors[other], model.tensors[key]


def _add(model: Model, key: str, dice: random.Random) -> None:
    words = ("weight_scale", "scale", "zero_point", "qzeros", "absmax", "comfy_quant", "svd_up", "g_idx", "weight")
    word = dice.choice(words)
    model.tensors.setdefault(f"{key.rpartition('.')[0]}.{word}", torch.ones(dice.choice((1, 64, 256))))


def _settings(model: Model | GgufModel, key: str, dice: random.Random) -> None:
    files = [model.config] if isinstance(model, GgufModel) else [*model.files.values()]
    tables = [table for table in (*files, model.metadata) if isinstance(table, dict)]
    table: dict[str, Any] = dice.choice([*tables, *(v for t in tables for v in t.values() if isinstance(v, dict))])
    if table:
        name = dice.choice(sorted(table))
        if dice.random() < 0.4:
            del table[name]
        else:
            table[name] = _other(table[name], dice)
    if isinstance(model, GgufModel):  # a list has values of one kind there
        model.metadata = {name: value for name, value in model.metadata.items() if value not in (None, [], {})}
    else:
        model.metadata = {name: value for name, value in model.metadata.items() if isinstance(value, str)}


def _other(value: Any, dice: random.Random) -> Any:
    """A value of the same kind, or of none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return dice.choice((0, 1, -1, value + 1, value * 2, 2**40))
    if isinstance(value, str) and any(letter.isdigit() for letter in value):
        at = dice.choice([i for i, letter in enumerate(value) if letter.isdigit()])
        return value[:at] + dice.choice("0123456789") + value[at + 1 :]
    return dice.choice((None, "", "x", [], {}, 1.5))


_CHANGES = (_drop, _cast, _cut, _fill, _rename, _add, _settings)


def _drop_row(model: GgufModel, name: str, dice: random.Random) -> None:
    del model.rows[name]


def _retype(model: GgufModel, name: str, dice: random.Random) -> None:
    model.rows[name] = replace(model.rows[name], type=dice.choice((*mutation_models.TYPES, "f32", "f16", "bf16", "i8")))


def _reshape(model: GgufModel, name: str, dice: random.Random) -> None:
    """Another shape of as many bytes, or of the bytes that it has then."""
    row = model.rows[name]
    first, *rest = row.shape
    if dice.random() < 0.5:
        shapes = [(first * math.prod(rest),), (1, *row.shape), (*row.shape, 1), row.shape[::-1]]
        model.rows[name] = replace(row, shape=dice.choice(shapes))
    else:
        less = dice.choice((1, first // 2, first - 1)) or 1
        model.rows[name] = replace(row, shape=(less, *rest), data=row.data[: len(row.data) // first * less])


def _refill(model: GgufModel, name: str, dice: random.Random) -> None:
    data = bytearray(model.rows[name].data)
    if dice.random() < 0.5:
        data[:] = bytes([dice.choice((0, 127, 128, 255))]) * len(data)
    else:
        at = dice.randrange(len(data))
        data[at : at + 2] = dice.choice((b"\x00\x7e", b"\x00\x7c", b"\x00\x00", b"\xff\xff"))[: len(data) - at]
    model.rows[name] = replace(model.rows[name], data=bytes(data))


def _swap(model: GgufModel, name: str, dice: random.Random) -> None:
    other = dice.choice(sorted(model.rows))
    model.rows[name], model.rows[other] = model.rows[other], model.rows[name]


def _add_row(model: GgufModel, name: str, dice: random.Random) -> None:
    last = dice.choice(("scale", "input_scale", "weight_scale", "bias", "weight"))
    model.rows.setdefault(f"{name.rpartition('.')[0]}.{last}", Row((1,), "f32", bytes(4)))


_GGUF_CHANGES = (_drop_row, _retype, _reshape, _refill, _swap, _add_row, _settings)


def disagreement(sound: Sound, file: Path) -> tuple[str, str | None]:
    """What came of a model ("loaded", or by whom it was refused), and how what was said of it differs; None if not.

    What `plan` and `verify` both take has to load, and what `plan` refuses must not.

    Args:
        file: where it was written, or is damaged.
    """
    verdicts = answers(sound.place(file), _ways(sound))
    came = "loaded" if verdicts["load_model"] is None else "refused"
    is_sound = verdicts["verify"] is None and verdicts["plan"] is None
    if verdicts["load_model"] is not None and is_sound and not _is_said_to_need_more(sound, file):
        return came, f"called sound, and refused: {verdicts['load_model']}"
    if verdicts["load_model"] is None and verdicts["plan"] is not None:
        return came, f"loads, and plan refuses it: {verdicts['plan']}"
    if verdicts["detect"] is not None and None in verdicts.values():
        return came, f"detect refuses it, and others do not: {verdicts}"
    return came if verdicts["verify"] is None or came == "refused" else "loaded, and verify refused its values", None


def _ways(sound: Sound) -> Mapping[str, Callable[..., Any]]:
    if sound.base is None:
        return WAYS
    base, others = sound.base, sound.others
    return {
        **WAYS,
        "plan": lambda path: sdquant.plan(base, parts=[*others, path]),
        "load_model": lambda path: sdquant.load_model(base, parts=[*others, path], progress=False),
    }


def _is_said_to_need_more(sound: Sound, file: Path) -> bool:
    """Whether `plan` says of a model without a class that it loads with base= alone."""
    warnings = _ways(sound)["plan"](sound.place(file)).warnings
    return any("load_model cannot load it on its own" in text for text in warnings)


def outcomes(
    models: Mapping[str, Sound], folder: Path, seed: str, count: int
) -> tuple[dict[str, Counter[str]], list[str]]:
    """Change `count` models, and compare what is said of each; how often which came of a format, and what differed."""
    dice, counts, differences = random.Random(seed), defaultdict[str, Counter[str]](Counter), list[str]()
    for number in range(count):
        name = dice.choice(sorted(models))
        sound = changed(models[name], dice) if number % 4 else models[name]
        try:
            file = sound.write(folder / "model")
        except (SdquantError, ValueError, TypeError, KeyError, struct.error):  # what no writer of GGUF takes
            sound, number = models[name], 0
            file = sound.write(folder / "model")
        if not number % 4:
            file.write_bytes(mutated(file.name, file.read_bytes(), dice))
        try:
            came, difference = disagreement(sound, file)
        except Exception as error:  # no SdquantError
            came, difference = "another error", f"{error!r}"
        counts[name][came if difference is None else "differed"] += 1
        if difference is not None:
            differences.append(f"{name}, {seed} {number}: {difference}")
    return counts, differences
