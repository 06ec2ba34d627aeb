"""The demo: one shipped model, loaded with every backend, drawing the same prompts."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..core import registry
from ..errors import BackendUnavailableError
from ..models import bundled_path
from ..training import digits
from ..utils.images import psnr
from ..utils.install import install_extra
from ..utils.progress import count_bar
from ..utils.temp_dirs import temporary_folder

# Images a scheme, unless the user says otherwise: the whole demo is to take minutes on two cores.
IMAGES = {"digits-sd": 20, "digits-flux": 10}
BATCH = 10  # images drawn at once
# What the extra "demo" installs: module and package.
EXTRA = {"sklearn": "scikit-learn", "PIL": "pillow", "matplotlib": "matplotlib"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the demo: the arguments for `load_model`.

    Attributes:
        quant: scheme; None for the model as it is.
        share: the budget of balanced offload, as a fraction of the loaded weights' bytes.
    """

    quant: str | None
    offload: str = "none"
    share: float | None = None

    @property
    def label(self) -> str:
        """ "nf4, balanced"."""
        name = self.quant or "bf16"
        return name if self.offload == "none" else f"{name}, {self.offload}"

    @property
    def backend(self) -> str:
        """The backend as people call it: "bitsandbytes"."""
        return "not quantized" if self.quant is None else registry.parse(self.quant).scheme.codec.title


CASES: tuple[Case, ...] = (
    Case(quant=None),
    Case(quant="nf4"),
    Case(quant="nf4", offload="balanced", share=0.6),
    Case(quant="fp8"),
    Case(quant="bnb-int8"),
    Case(quant="qint8"),
    Case(quant="qint4"),
    Case(quant="qint3"),
    Case(quant="q8_0"),
    Case(quant="q4_k"),
    Case(quant="int8"),
    Case(quant="int4"),
    Case(quant="int8_convrot"),
    Case(quant="sdnq-uint4"),
    Case(quant="rules,act_qtype=int8"),
)


@dataclass(frozen=True, kw_only=True)
class DemoRow:
    """Result of one case.

    Attributes:
        bytes, bytes_bf16: of the whole pipeline's weights, as loaded and with every weight in bf16.
        packed, packed_bf16: the same for the weights that are quantized; 0 where none is.
        load_seconds: wall time of the load, after one load and one step that were not timed.
        image_seconds: wall time of an image, drawn `BATCH` at a time.
        wanted, seen: the digit in the prompt and the digit that the judge reads, for each image.
        psnr: against the first case's images, in dB; None for the first case, infinite where no pixel differs.
        pictures: PIL images.
    """

    label: str
    backend: str
    quant: str | None
    offload: str
    bytes: int
    bytes_bf16: int
    packed: int
    packed_bf16: int
    load_seconds: float
    image_seconds: float
    wanted: tuple[int, ...]
    seen: tuple[int, ...]
    psnr: float | None
    pictures: tuple[Any, ...]

    @property
    def images(self) -> int:
        """Return the number of generated images."""
        return len(self.wanted)

    @property
    def right(self) -> int:
        """Return the number of images that the judge reads as the digit in the prompt."""
        return sum(expected == actual for expected, actual in zip(self.wanted, self.seen, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, without the pictures. JSON has no infinity: psnr is null then, and `identical` is true."""
        values = asdict(self)
        values.pop("pictures")
        identical = self.psnr == float("inf")
        return values | {
            "psnr": None if identical else self.psnr,
            "identical": identical,
            "images": self.images,
            "right": self.right,
        }


@dataclass(frozen=True, kw_only=True)
class SkippedCase:
    """A case that cannot run here: its package is missing, too old or not for this device."""

    label: str
    backend: str
    quant: str
    why: str
    fix: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"skipped": True}


@dataclass(frozen=True, kw_only=True)
class Result:
    """All cases on one model, and the judge's own accuracy on held-back real digits."""

    model: str
    steps: int
    judge: float
    cases: tuple[DemoRow | SkippedCase, ...]

    @property
    def rows(self) -> tuple[DemoRow, ...]:
        """The cases that ran."""
        return tuple(case for case in self.cases if isinstance(case, DemoRow))

    @property
    def skipped(self) -> tuple[SkippedCase, ...]:
        """The cases that did not."""
        return tuple(case for case in self.cases if isinstance(case, SkippedCase))

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "model": self.model,
            "steps": self.steps,
            "judge": self.judge,
            "rows": [case.to_dict() for case in self.cases],
        }


def run(model: str, *, steps: int, images: int | None, progress: bool, cases: Sequence[Case] = CASES) -> Result:
    """Load `model` in every case and generate `images` digits, 0 to 9 repeatedly. The first case is the reference.

    Raises:
        BackendUnavailableError: scikit-learn, Pillow or matplotlib is missing.
    """
    need_extra()
    results: list[DemoRow | SkippedCase] = []
    reference: DemoRow | None = None
    with (
        temporary_folder("sdquant-demo-") as work,
        count_bar(model, len(cases), "scheme", progress) as bar,
    ):
        for case in cases:
            bar.set_postfix_str(case.label)
            try:
                row = _case(model, case, steps, images or IMAGES[model], reference, work)
            except BackendUnavailableError as error:
                if case.quant is None:
                    raise
                results.append(
                    SkippedCase(label=case.label, backend=case.backend, quant=case.quant, why=error.why, fix=error.fix)
                )
            else:
                reference = reference or row
                results.append(row)
            bar.update()
    return Result(model=model, steps=steps, judge=digits.judge().accuracy, cases=tuple(results))


def need_extra() -> None:
    """Raise BackendUnavailableError if what the extra "demo" installs is not there."""
    missing = [package for module, package in EXTRA.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise BackendUnavailableError(
            "Cannot run the demo",
            f"drawing and judging the digits needs {' and '.join(missing)}, which is not installed",
            f"Run: {install_extra('demo')}",
        )


def _case(model: str, case: Case, steps: int, images: int, reference: DemoRow | None, work: Path) -> DemoRow:
    from ..models import draw, weight_bytes

    pipe, seconds = load(model, case, work)
    labels = tuple(i % 10 for i in range(images))
    begin = time.perf_counter()
    pictures = draw(pipe, [digits.prompt(d) for d in labels], seeds=range(images), steps=steps, batch=BATCH)
    drawing = (time.perf_counter() - begin) / images
    handle = pipe.sdquant
    handle.offload.remove()
    parts = handle.plan.components
    return DemoRow(
        label=case.label,
        backend=case.backend,
        quant=case.quant,
        offload=case.offload,
        bytes=weight_bytes(pipe),
        bytes_bf16=sum(part.bytes_bf16 for part in parts),
        packed=sum(weight.bytes for part in parts for weight in part.weights),
        packed_bf16=sum(weight.bytes_bf16 for part in parts for weight in part.weights),
        load_seconds=seconds,
        image_seconds=drawing,
        wanted=labels,
        seen=tuple(digits.judge().read(pictures)),
        psnr=psnr(pictures, reference.pictures) if reference else None,
        pictures=tuple(pictures),
    )


def load(model: str, case: Case, work: Path) -> tuple[Any, float]:
    """Load the pipeline of a case; return it with the seconds that loading took.

    It is loaded twice with one step in between, so that the backend library's import and first compilation are not
    counted as load time. GGUF schemes cannot quantize while loading: their file is written first.
    """
    from ..loading import load_model
    from ..models import draw
    from ..planning import preparation

    source: Path = bundled_path(model)
    quant = case.quant
    if quant is not None and registry.parse(quant).scheme.backend == "gguf":
        from ..saving import quantize_file

        source = quantize_file(bundled_path(model), quant, work / f"{model}-{quant}", progress=False)
        quant = None
    budget = None if case.share is None else int(case.share * preparation.plan(source, quant).bytes)
    pipe: Any = None
    seconds = 0.0
    for warm in (False, True):
        begin = time.perf_counter()
        pipe = load_model(source, quant, case.offload, budget=budget, progress=False)
        seconds = time.perf_counter() - begin
        if not warm:
            draw(pipe, [digits.prompt(0)], seeds=[0], steps=1)
            pipe.sdquant.offload.remove()
    return pipe, seconds
