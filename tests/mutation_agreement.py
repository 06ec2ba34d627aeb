"""Models in one format each, with one thing changed: do `plan` and `verify` say of them what `load_model` does?

The models are those of `malformed`, and the same one in the hub's formats. A change is of bytes, as in
`test_mutations`, or of something that a sound file may have: a tensor's shape, dtype, name or values, a setting.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import sdquant

from . import hub_formats, malformed
from .entry_points import answers
from .malformed import NAME, OTHER, Model
from .test_mutations import mutated

SIZES = {NAME: (256, 64), OTHER: (64, 320)}
_DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32, torch.int64
)  # fmt: skip
_VALUES = (float("nan"), float("inf"), 0.0, -1.0, 1e30)


def originals(folder: Path) -> dict[str, Model]:
    """A sound model in each format, by its name. folder: to write in."""
    source = malformed.tiny(folder / "float")
    models = {name: form.make(source, folder / name.replace(" ", "-")) for name, form in malformed.FORMATS.items()}
    models |= {f"hub {name}": model for name in hub_formats.KINDS if (model := _of_hub(source, name)) is not None}
    sound = {name: disagreement(model.write(folder / "model").parent) for name, model in models.items()}
    assert all(sound[name] == ("loaded", None) for name in malformed.FORMATS), sound
    return {name: model for name, model in models.items() if sound[name] == ("loaded", None)}


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


def changed(model: Model, dice: random.Random) -> Model:
    """A copy with one thing of a quantized layer, or of what is said about it, changed."""
    model = model.copy()
    stems = tuple(key.removesuffix("weight") for key in SIZES)
    keys = sorted(key for key in model.tensors if key.startswith(stems))
    try:
        dice.choice(_CHANGES)(model, dice.choice(keys), dice)
    except (RuntimeError, NotImplementedError):  # what torch does not do with this dtype
        _drop(model, dice.choice(keys), dice)
    return model


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


def _settings(model: Model, key: str, dice: random.Random) -> None:
    tables = [table for table in (*model.files.values(), model.metadata) if isinstance(table, dict)]
    table: dict[str, Any] = dice.choice([*tables, *(v for t in tables for v in t.values() if isinstance(v, dict))])
    if table:
        name = dice.choice(sorted(table))
        if dice.random() < 0.4:
            del table[name]
        else:
            table[name] = _other(table[name], dice)
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


def disagreement(folder: Path) -> tuple[str, str | None]:
    """What came of a model ("loaded", or by whom it was refused), and how what was said of it differs; None if not.

    What `plan` and `verify` both take has to load, and what `plan` refuses must not.
    """
    verdicts = answers(folder)
    came = "loaded" if verdicts["load_model"] is None else "refused"
    sound = verdicts["verify"] is None and verdicts["plan"] is None
    if verdicts["load_model"] is not None and sound and not _is_said_to_need_more(folder):
        return came, f"called sound, and refused: {verdicts['load_model']}"
    if verdicts["load_model"] is None and verdicts["plan"] is not None:
        return came, f"loads, and plan refuses it: {verdicts['plan']}"
    if verdicts["detect"] is not None and None in verdicts.values():
        return came, f"detect refuses it, and others do not: {verdicts}"
    return came if verdicts["verify"] is None or came == "refused" else "loaded, and verify refused its values", None


def _is_said_to_need_more(folder: Path) -> bool:
    """Whether `plan` says of a model without a class that it loads with base= alone."""
    return any("load_model cannot load it on its own" in text for text in sdquant.plan(folder).warnings)


def outcomes(
    models: Mapping[str, Model], folder: Path, seed: str, count: int
) -> tuple[dict[str, Counter[str]], list[str]]:
    """Change `count` models, and compare what is said of each; how often which came of a format, and what differed."""
    dice, counts, differences = random.Random(seed), defaultdict[str, Counter[str]](Counter), list[str]()
    for number in range(count):
        name = dice.choice(sorted(models))
        if number % 4:
            file = changed(models[name], dice).write(folder / "model")
        else:
            file = models[name].write(folder / "model")
            file.write_bytes(mutated(file.name, file.read_bytes(), dice))
        try:
            came, difference = disagreement(file.parent)
        except Exception as error:  # no SdquantError
            came, difference = "another error", f"{error!r}"
        counts[name][came if difference is None else "differed"] += 1
        if difference is not None:
            differences.append(f"{name}, {seed} {number}: {difference}")
    return counts, differences
