"""Generate the same prompt and seed with several schemes, one model in memory at a time.

    made = compare("some-model", ["nf4", "int8"], prompt="a handwritten seven", offload="balanced")
    sheet(made).save("seven.png")

The first row is the reference for the others. Importing this module imports no torch.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import compat
from ..compat import hardware
from ..core import registry
from ..errors import BackendUnavailableError, IncompatibleError, SdquantError, SettingsError
from ..planning import AUTO, NOT_QUANTIZED, Quant, Request, make_request, prepare
from ..utils.images import difference, largest_difference, psnr
from ..utils.signals import is_interrupt
from .compare_figure import sheet
from .comparison import Comparison, ComparisonRow

if TYPE_CHECKING:
    from ..planning import MixCurve, Plan
    from ..utils.progress import OnProgress

__all__ = ["AMPLIFY", "DEFAULT", "Comparison", "ComparisonRow", "allowed", "compare", "sheet"]

log = logging.getLogger(__name__)

# Schemes compared by default: one of each backend that quantizes while it loads, and fp8.
DEFAULT = ("nf4", "int8", "qint8", "fp8")
AMPLIFY = 4  # factor by which difference images are brightened
AS_FOUND = "as found"
_OF_MIXES = ("size", "quality")
_OF_A_ROW = ("path", "quant", "progress", *_OF_MIXES)  # what of a Request is no setting of the whole comparison


def compare(
    path: str | Path,
    quants: Iterable[Quant],
    *,
    prompt: str,
    seed: int = 0,
    steps: int = 20,
    guidance: float | None = None,
    width: int | None = None,
    height: int | None = None,
    reference: Quant = None,
    amplify: int = AMPLIFY,
    curve: bool = False,
    on_progress: OnProgress | None = None,
    **values: Any,
) -> Comparison:
    """Load the model at `path` in each scheme, generate the same image, and free the model before the next.

    A scheme that is refused or fails is a row with the reason; the others still run. Duplicate schemes run once.

    Args:
        quants: schemes, each as `load_model` takes it.
        prompt, seed, steps, guidance, width, height: as `draw` takes them.
        reference: the scheme that the others are compared with; None is the model as found.
        amplify: factor by which the difference images are brightened.
        curve: whether to predict quality against bytes, which reads the weights once, without a mix among the schemes.
        on_progress: called with the work done, the total and a line of text, before each load and after each step.
            Its exceptions are passed on; it can raise `generate.Stopped` to stop.
        values: other arguments of `load_model` (offload, mode, base, ...), the same for all, but for size and quality,
            which are those of "auto".

    Raises:
        SdquantError: an invalid argument, a scheme that does not exist, or a reference that cannot be generated.
    """
    if isinstance(amplify, bool) or not isinstance(amplify, int) or not 1 <= amplify <= 255:
        raise SettingsError(
            f"Cannot use amplify={amplify!r}", "it must be a whole number from 1 to 255", f"Use {AMPLIFY}"
        )
    values.setdefault("progress", False)
    columns: dict[str, Request] = {}
    for quant in (reference, *quants):
        column = make_request(path, **_of_column(values, quant), quant=quant)
        columns.setdefault(_label(column), column)
    is_apart = curve and not any(column.mixed for column in columns.values())
    predicted = predict_curve(path, **values) if is_apart else None  # first: what it refuses takes no images with it
    drawing = {
        "prompts": [prompt], "seeds": [seed], "steps": steps, "guidance": guidance, "width": width, "height": height,
    }  # fmt: skip
    tell = _Progress(len(columns), steps, on_progress)
    rows: list[ComparisonRow] = []
    for label, column in columns.items():
        rows.append(_row(column, label, drawing, rows[0] if rows else None, amplify, tell))
    here = hardware.probe()
    first = next(iter(columns.values()))
    return Comparison(
        model=first.path,
        prompt=prompt,
        seed=seed,
        steps=steps,
        guidance=guidance,
        size=rows[0].image.size,
        settings=settings_of(first),
        device=first.device or hardware.default_device(here),
        amplify=amplify,
        rows=tuple(rows),
        curve=next((row.curve for row in rows if row.curve is not None), predicted),
        versions=here.versions,
        machine={
            "platform": here.platform,
            "python": here.python,
            "devices": [{"torch_name": device.torch_name, "name": device.name} for device in here.devices],
        },
    )


def predict_curve(
    path: str | Path, *, on_weights: Callable[[int, int], object] | None = None, **values: Any
) -> MixCurve:
    """Return predicted quality against bytes for a model, with the mix of size= or quality=, if one is given.

    Args:
        on_weights: see `prepare`.
        values: arguments of `load_model`, but for schemes.
    """
    is_mixed = any(values.get(name) is not None for name in _OF_MIXES)
    arguments = {**values, "offload": "none", "budget": None} | ({} if is_mixed else {"quality": 30.0})
    predicted = prepare(
        make_request(path, **{"progress": False, **arguments, "quant": AUTO}), on_weights=on_weights
    ).curve
    assert predicted is not None
    return predicted if is_mixed else replace(predicted, pick=None)


def _of_column(values: Mapping[str, Any], quant: Quant) -> dict[str, Any]:
    is_auto = isinstance(quant, str) and quant.strip().lower() == AUTO
    return {name: value for name, value in values.items() if name not in _OF_MIXES or is_auto}


def allowed(
    offload: str = "none",
    *,
    mode: str = "auto",
    runtime: str | None = None,
    device: str | None = None,
    allow_incompatible: bool = False,
    schemes: Iterable[str] = DEFAULT,
) -> tuple[str, ...]:
    """Return the schemes that the matrix does not refuse with these settings on this machine.

    Raises:
        SdquantError: a setting that does not exist.
    """
    here = hardware.probe()
    return tuple(
        name
        for name in schemes
        if (runtime is None or runtime in registry.scheme(name).runtimes)
        and _passes(name, offload, mode=mode, runtime=runtime, device=device, machine=here, allow=allow_incompatible)
    )


def allowed_for(request: Request, schemes: Iterable[str] = DEFAULT) -> tuple[str, ...]:
    """Return the schemes that the matrix does not refuse with the settings of a request."""
    return allowed(
        request.offload, mode=request.mode, runtime=request.runtime, device=request.device,
        allow_incompatible=request.allow_incompatible, schemes=schemes,
    )  # fmt: skip


def _passes(scheme: str, offload: str, *, allow: bool, **axes: Any) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", compat.SdquantWarning)  # said when it is loaded
        try:
            compat.check(scheme, offload, allow_incompatible=allow, **axes)
        except (IncompatibleError, BackendUnavailableError):
            return False
    return True


def _row(
    request: Request,
    label: str,
    drawing: Mapping[str, Any],
    held_to: ComparisonRow | None,
    amplify: int,
    tell: _Progress,
) -> ComparisonRow:
    """Run one scheme and return its row. `held_to`: the reference; None for the reference itself."""
    from ..utils.buffers import give_back

    plan: Plan | None = None
    try:
        tell.loading(label)
        plan = prepare(request)
        row = _drawn(request, plan, label, drawing, tell)
    except Exception as error:
        if held_to is None or error is tell.raised or is_interrupt(error):
            raise
        log.info("%s gave no image", label, exc_info=True)
        ours = isinstance(error, SdquantError)
        why = str(error) if ours else f"{type(error).__name__}: {error}"
        row = ComparisonRow(quant=request.quant, label=label, error=why, kind=type(error).__name__, **_sizes(plan))
    tell.column_done()
    give_back()
    if held_to is None or row.image is None:
        return row
    return replace(
        row,
        psnr=psnr([row.image], [held_to.image]),
        largest=largest_difference(row.image, held_to.image),
        difference=difference(row.image, held_to.image, amplify),
    )


def _drawn(request: Request, plan: Plan, label: str, drawing: Mapping[str, Any], tell: _Progress) -> ComparisonRow:
    from ..loading import import_classes, load_planned
    from ..models import draw

    import_classes(plan)
    begin = time.perf_counter()
    pipe = load_planned(request, plan)
    loading = time.perf_counter() - begin
    try:
        begin = time.perf_counter()
        (image,) = draw(pipe, on_step=lambda done, of: tell.drawing(label, done, of), **drawing)
        seconds = time.perf_counter() - begin
    finally:
        pipe.sdquant.offload.remove()
    return ComparisonRow(
        quant=request.quant, label=_found(label, plan), image=image, load_seconds=loading, draw_seconds=seconds,
        **_sizes(plan),
    )  # fmt: skip


def _sizes(plan: Plan | None) -> dict[str, Any]:
    if plan is None:
        return {}
    return {
        "bytes": plan.bytes, "bytes_bf16": sum(part.bytes_bf16 for part in plan.components), "curve": plan.curve
    }  # fmt: skip


def _label(request: Request) -> str:
    """Return the requested scheme as the command line takes it."""
    if request.mixed:
        name, value = ("size", request.size) if request.size is not None else ("quality", request.quality)
        return f"{AUTO},{name}={value:g}" if isinstance(value, float) else f"{AUTO},{name}={value}"
    if request.quant == AUTO:
        return AUTO
    each = {name: NOT_QUANTIZED if spec is None else str(spec) for name, spec in request.specs.items()}
    others = [each.pop("*")] if "*" in each else []
    return "+".join([*others, *(f"{name}={scheme}" for name, scheme in each.items())]) or AS_FOUND


def _found(label: str, plan: Plan) -> str:
    """Return the label; for a model as found, with the schemes of its files."""
    schemes = dict.fromkeys(part.scheme for part in plan.components if part.scheme is not None)
    return f"{label} ({', '.join(schemes)})" if label == AS_FOUND and schemes else label


def settings_of(request: Request) -> dict[str, Any]:
    """Return the request's other settings that differ from their defaults, as JSON values."""
    rows = [row for row in fields(request) if row.name not in _OF_A_ROW]
    changed = {row.name: getattr(request, row.name) for row in rows if getattr(request, row.name) != row.default}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()}


class _Progress:
    """Turns loads and steps into one count: a load is worth one step.

    Attributes:
        raised: the exception of the caller's function.
    """

    def __init__(self, columns: int, steps: int, on_progress: OnProgress | None) -> None:
        self._each, self._on_progress = steps + 1, on_progress
        self._total, self._begin = columns * self._each, 0
        self.raised: BaseException | None = None

    def loading(self, label: str) -> None:
        """Report that a scheme's model is being loaded."""
        self._tell(0, f"{label}: loading")

    def drawing(self, label: str, done: int, of: int) -> None:
        """Report `done` of `of` steps of a scheme's image."""
        self._tell(1 + done * (self._each - 1) // of, f"{label}: step {done} of {of}")

    def column_done(self) -> None:
        """Report that a scheme is done, with an image or without."""
        self._begin += self._each
        if self._begin == self._total:
            self._tell(0, "done")

    def _tell(self, done: int, text: str) -> None:
        if self._on_progress is None:
            return
        try:
            self._on_progress(self._begin + done, self._total, text)
        except BaseException as error:
            self.raised = error
            raise
