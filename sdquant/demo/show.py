"""The demo: one shipped model, loaded with every backend, drawing the same prompts."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import digits, path


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the demo: what is asked of `load_model`. `share` is the budget as a part of the model's bytes."""

    label: str
    quant: str | None
    offload: str = "none"
    share: float | None = None


CASES: tuple[Case, ...] = (
    Case(label="bf16 (not quantized)", quant=None),
    Case(label="bnb nf4", quant="nf4"),
    Case(label="bnb nf4, balanced offload", quant="nf4", offload="balanced", share=0.6),
    Case(label="bnb fp8", quant="fp8"),
    Case(label="bnb int8", quant="bnb-int8"),
    Case(label="quanto qint8", quant="qint8"),
    Case(label="quanto qint4", quant="qint4"),
    Case(label="quanto qint3", quant="qint3"),
    Case(label="gguf q8_0", quant="q8_0"),
    Case(label="gguf q4_k", quant="q4_k"),
    Case(label="nncf int8", quant="int8"),
    Case(label="nncf int4", quant="int4"),
    Case(label="sdnq uint4", quant="sdnq-uint4"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one case gave. Bytes are of all components' weights; seconds are wall time on this machine."""

    label: str
    quant: str | None
    offload: str
    bytes: int
    bytes_bf16: int
    load_seconds: float
    image_seconds: float
    images: int
    right: int
    psnr: float | None
    pictures: tuple[Any, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, without the pictures."""
        values = asdict(self)
        values.pop("pictures")
        return values


@dataclass(frozen=True, kw_only=True)
class Result:
    """All cases on one model, and the judge's own accuracy on held-back real digits."""

    model: str
    steps: int
    judge: float
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "model": self.model,
            "steps": self.steps,
            "judge": self.judge,
            "rows": [row.to_dict() for row in self.rows],
        }


def run(model: str, *, steps: int, images: int, progress: bool, cases: Sequence[Case] = CASES) -> Result:
    """Load `model` in every case and draw `images` digits, 0 to 9 and again."""
    from tqdm import tqdm

    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="sdquant-demo-") as work:
        for case in tqdm(cases, desc=model, unit="scheme", disable=not progress, leave=False):
            rows.append(_case(model, case, steps, images, rows[0] if rows else None, Path(work)))
    return Result(model=model, steps=steps, judge=digits.judge().accuracy, rows=tuple(rows))


def _case(model: str, case: Case, steps: int, images: int, reference: Row | None, work: Path) -> Row:
    from ..drawing import draw

    pipe, bytes_, seconds = load(model, case, work)
    wanted = [i % 10 for i in range(images)]
    begin = time.perf_counter()
    pictures = draw(pipe, [digits.prompt(d) for d in wanted], seeds=range(images), steps=steps)
    drawing = (time.perf_counter() - begin) / images
    right = sum(seen == asked for seen, asked in zip(digits.judge().read(pictures), wanted, strict=True))
    made = pipe.sdquant
    made.offload.remove()
    return Row(
        label=case.label,
        quant=case.quant,
        offload=case.offload,
        bytes=bytes_,
        bytes_bf16=sum(part.bytes_bf16 for part in made.plan.components),
        load_seconds=seconds,
        image_seconds=drawing,
        images=images,
        right=right,
        psnr=psnr(pictures, reference.pictures) if reference else None,
        pictures=tuple(pictures),
    )


def load(model: str, case: Case, work: Path) -> tuple[Any, int, float]:
    """The pipeline of a case, the bytes of its weights, and the seconds the load took.

    A GGUF scheme is not for on-the-fly loading: its file is written first, and the load reads that.
    """
    from .. import backends
    from ..loader import load_model, plan
    from ..weights import weight_bytes

    source: Path = path(model)
    quant = case.quant
    if quant is not None and not backends.parse(quant).scheme.on_the_fly:
        from ..gguf_files import quantize_file

        source = quantize_file(path(model), quant, work / f"{model}-{quant}", progress=False)
        quant = None
    budget = None
    if case.share is not None:
        budget = int(case.share * plan(source, quant).bytes)
    begin = time.perf_counter()
    pipe = load_model(source, quant, case.offload, budget=budget, progress=False)
    seconds = time.perf_counter() - begin
    return pipe, weight_bytes(pipe), seconds


def psnr(one: Sequence[Any], other: Sequence[Any]) -> float:
    """Peak signal-to-noise ratio of two lists of PIL images, in dB, over all pixels of all images."""
    import numpy as np

    a = np.stack([np.asarray(image, dtype=np.float64) for image in one])
    b = np.stack([np.asarray(image, dtype=np.float64) for image in other])
    error = float(((a - b) ** 2).mean())
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))
