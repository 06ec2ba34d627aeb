"""The LoRAs on the Generate tab: a file and a strength each, and a free row as long as there are any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from ...errors import SdquantError, SettingsError
from ...models import Lora
from .. import html_components, infotext
from ..events import QUIET, ask
from ..lora_files import take_lora
from ..page_memory import LORA_FOLDER
from ..validation import number

if TYPE_CHECKING:
    from ..app_state import Desk
    from ..header import Head

MOST = 6  # LoRAs at once
MAX_STRENGTH = 10
NONE = "None"
ALL = "*"  # as a folder


@dataclass(frozen=True, kw_only=True)
class LoraPicker:
    """The widgets: in each row the name of a file, and its strength; where they are looked for; a box for new ones.

    `message`: what came of a file that was dropped there.
    """

    rows: list[gr.Row]
    names: list[gr.Dropdown]
    strengths: list[gr.Number]
    folder: gr.Dropdown
    file: gr.File
    message: gr.HTML

    @property
    def values(self) -> list[Any]:
        """Return the widgets whose values `chosen_loras` takes."""
        return [*self.names, *self.strengths]


def add_loras(desk: Desk, model: str | None) -> LoraPicker:
    """Create the widgets at the current position in the page."""
    rows, names, strengths = [], [], []
    remembered = desk.memory.get(LORA_FOLDER) or ALL
    known = lora_choices(desk, model, remembered)
    with gr.Accordion("LoRA", open=False, elem_id="loras", elem_classes="sq-later"):
        for n in range(MOST):
            with gr.Row(visible=n == 0) as row:
                names.append(_name(n, known))
                strengths.append(_strength(n))
            rows.append(row)
        folder = gr.Dropdown(
            folder_choices(desk, remembered), value=remembered, label="LoRA folder", info="Kept for the next start",
            elem_id="lora-folder",
        )  # fmt: skip
        file = gr.File(label="Add a LoRA file", type="filepath", height=160, elem_id="lora-file")
        message = gr.HTML("", elem_id="lora-said", padding=False)
    return LoraPicker(rows=rows, names=names, strengths=strengths, folder=folder, file=file, message=message)


def _name(n: int, known: list[tuple[str, str]]) -> gr.Dropdown:
    return gr.Dropdown(
        known, value=NONE, label=f"LoRA {n + 1}", info="Files below the model folders", scale=3, elem_id=f"lora-{n}",
        min_width=180,
    )  # fmt: skip


def _strength(n: int) -> gr.Number:
    return gr.Number(
        1, label=f"Strength {n + 1}", info="0: off", step=0.05, elem_id=f"lora-strength-{n}", min_width=100
    )


def wire_loras(desk: Desk, head: Head, picker: LoraPicker, page: gr.Blocks) -> None:
    """Connect the events."""
    ask([one.change for one in picker.names], visible_rows, picker.names, picker.rows)
    ask(
        [head.model.change, head.again.click, picker.folder.input],
        lambda model, folder, *names: _again(desk, model, folder, names),
        [head.model, picker.folder, *picker.names],
        [picker.folder, *picker.names],
    )
    # Not the folder: somebody may have chosen meanwhile, and one that is not there now stays chosen.
    page.load(
        lambda model, folder, *names: _again(desk, model, folder, names)[1:],
        [head.model, picker.folder, *picker.names],
        picker.names,
        **QUIET,
    )
    picker.file.upload(
        lambda path, model, folder, *names: _added(desk, path, model, folder, names),
        [picker.file, head.model, picker.folder, *picker.names],
        [picker.file, picker.message, picker.folder, *picker.names],
        **QUIET,
    )


def folder_choices(desk: Desk, current: str) -> list[tuple[str, str]]:
    """Return labels and names of the folders with LoRA files, and of one that is no longer there but chosen."""
    folders = desk.roots.lora_folders()
    gone = [(f"{current} (not there now)", current)] if current not in (ALL, *folders) else []
    return [("All model folders", ALL), *((name, name) for name in folders), *gone]


def lora_choices(desk: Desk, model: object, folder: str = ALL) -> list[tuple[str, str]]:
    """Return labels and names of the LoRA files in a folder, or in all; those that are nearest to the model first."""
    try:
        beside = desk.roots.resolve(model).parts
    except SdquantError:
        beside = ()
    files = [one for one in desk.roots.loras() if folder == ALL or one.name.startswith(f"{folder}/")]
    files.sort(key=lambda one: -_shared(beside, one.path.parts))
    return [(NONE, NONE), *((one.name.removesuffix(".safetensors"), one.name) for one in files)]


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Return the number of folders that two paths share."""
    return next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


def visible_rows(*names: object) -> list[Any]:
    """Return the updates of the rows: all in use, and one more."""
    last = max((n for n, name in enumerate(names) if name not in (None, NONE)), default=-1)
    return [gr.update(visible=n <= last + 1) for n in range(MOST)]


def _again(desk: Desk, model: object, folder: object, names: Sequence[object]) -> list[Any]:
    """Return the updates of folder and names; LoRAs of other folders stay chosen."""
    current = folder if isinstance(folder, str) and folder in (ALL, *desk.roots.lora_folders()) else ALL
    if current == folder:
        desk.memory.keep(LORA_FOLDER, current)
    every = {name: label for label, name in lora_choices(desk, model)}
    known = lora_choices(desk, model, current)
    shown = {name for _, name in known}
    known += [(every[name], str(name)) for name in dict.fromkeys(names) if name in every and name not in shown]
    values = [gr.update(choices=known, **({} if name in every else {"value": NONE})) for name in names]
    return [gr.update(choices=folder_choices(desk, current), value=current), *values]


def _added(desk: Desk, path: str | None, model: object, folder: object, names: Sequence[object]) -> list[Any]:
    """Put a dropped file into the folder, and choose it in the first free row; say where it is, or why it is not."""
    if path is None:
        return [gr.skip()] * (len(names) + 3)
    try:
        new = take_lora(desk.roots, "" if folder in (None, ALL) else str(folder), Path(path))
    except SdquantError as error:
        return [None, html_components.refusal(error, desk.roots), *(gr.skip() for _ in range(len(names) + 1))]
    finally:
        Path(path).unlink(missing_ok=True)  # else it would lie there twice until the server ends
    free = next((n for n, name in enumerate(names) if name in (None, NONE, new)), None)
    picks = [new if n == free else name for n, name in enumerate(names)]
    updates = _again(desk, model, folder, picks)
    if free is not None:
        updates[free + 1] = {**updates[free + 1], "value": new}
    return [None, html_components.note(f"Added: {new}"), *updates]


def chosen_loras(desk: Desk, values: Sequence[Any], prompt: str) -> tuple[str, tuple[Lora, ...]]:
    """Return the prompt without `<lora:...>`, and the LoRAs of the widgets and of the prompt.

    Raises:
        SettingsError: there is no such LoRA, there are too many, or a strength is no number.
    """
    loras = []
    for n, (name, strength) in enumerate(zip(values[:MOST], values[MOST:], strict=True)):
        if name in (None, NONE):
            continue
        path = desk.roots.resolve(name)
        if path not in {one.path for one in desk.roots.loras()}:
            raise SettingsError(f"Cannot use {path.name}", "it is not a LoRA file", "Choose one from the list")
        loras.append(Lora(path=path, strength=number(f"Strength {n + 1}", strength, -MAX_STRENGTH, MAX_STRENGTH)))
    text, written = infotext.split_loras(prompt)
    for name, strength in written:
        entry = lora_named(desk, name)
        if entry is None:
            what, why = f"Cannot use the LoRA {name[:80]!r} of the prompt", "there is none of that name"
            raise SettingsError(what, why, "Put its file below the model folders, or remove it from the prompt")
        value = number(f"The strength of {name[:80]}", strength, -MAX_STRENGTH, MAX_STRENGTH)
        loras.append(Lora(path=Path(desk.roots.resolve(entry)), strength=value))
    if len(loras) > MOST:
        raise SettingsError("Cannot use so many LoRAs", f"there are {len(loras)}", f"Use at most {MOST} at once")
    return text, tuple(loras)


def lora_named(desk: Desk, name: str) -> str | None:
    """Return the name in the list of the first LoRA file that is called so without folder and suffix."""
    return next((one.name for one in desk.roots.loras() if one.path.stem == name), None)


def taken_loras(desk: Desk, loras: Sequence[tuple[str, float]]) -> tuple[list[Any], list[Any], list[str]]:
    """Return the updates of the rows, the values of the widgets, and the names that there are no files for."""
    usable = [(name, strength) for name, strength in loras if lora_named(desk, name) and abs(strength) <= MAX_STRENGTH]
    usable = usable[:MOST]
    missing = [name for name, strength in loras if (name, strength) not in usable]
    names: list[Any] = [lora_named(desk, name) for name, _ in usable]
    names += [NONE] * (MOST - len(names))
    strengths = [strength for _, strength in usable] + [1] * (MOST - len(usable))
    known = lora_choices(desk, None)
    return visible_rows(*names), [*(gr.update(choices=known, value=name) for name in names), *strengths], missing
