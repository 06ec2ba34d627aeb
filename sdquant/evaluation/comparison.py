"""The result of comparing schemes: a row for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..planning import MixCurve, Quant


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """Result of one scheme.

    Attributes:
        quant: as requested. label: the same in one line: "nf4", "unet=nf4+text_encoder=int8", "as found".
        bytes, bytes_bf16: of all components in memory, and of the same with every weight in bf16; None if there
            is no plan.
        load_seconds, draw_seconds: wall time of loading, without imports common to all schemes, and of generation.
        psnr: against the reference, in dB; infinite where no pixel differs. largest: the largest difference of a
            channel of a pixel, of 255. Both None for the reference itself.
        curve: of a mix, what was predicted; see `Plan`.
        image: PIL image. difference: against the reference, `Comparison.amplify` times as bright.
        error: the reason why there is no image, as sentences; None if there is one. kind: the error's class.
    """

    quant: Quant
    label: str
    bytes: int | None = None
    bytes_bf16: int | None = None
    load_seconds: float | None = None
    draw_seconds: float | None = None
    psnr: float | None = None
    largest: int | None = None
    curve: MixCurve | None = None
    image: Any = None
    difference: Any = None
    error: str | None = None
    kind: str | None = None

    @property
    def identical(self) -> bool:
        """Return whether the image is equal to the reference's."""
        return self.psnr == float("inf")

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, without the images. JSON has no infinity: psnr is null then, and `identical` is true."""
        values = {name: value for name, value in vars(self).items() if name not in ("image", "difference", "curve")}
        return values | {
            "quant": dict(self.quant) if isinstance(self.quant, Mapping) else self.quant,
            "psnr": None if self.identical else self.psnr,
            "identical": self.identical,
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All rows, and what they have in common.

    Attributes:
        rows: the reference first, then the schemes in the order asked.
        settings: the other arguments of `load_model` that were not left out, as JSON values.
        size: width and height of the images.
        amplify: factor by which the difference images are brightened.
        device: torch's name of the compute device.
        versions: of the installed packages. machine: names of the system and its devices.
        curve: predicted quality against bytes, if it was asked for or a mix is among the schemes.
    """

    model: str
    prompt: str
    seed: int
    steps: int
    guidance: float | None
    size: tuple[int, int]
    settings: Mapping[str, Any]
    device: str
    amplify: int
    rows: tuple[ComparisonRow, ...]
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    curve: MixCurve | None = None

    @property
    def reference(self) -> ComparisonRow:
        """Return the row that the others are compared with."""
        return self.rows[0]

    @property
    def drawn(self) -> tuple[ComparisonRow, ...]:
        """Return the rows that have an image, without the reference."""
        return tuple(row for row in self.rows[1:] if row.error is None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, without the images."""
        return vars(self) | {
            "size": list(self.size),
            "settings": dict(self.settings),
            "rows": [row.to_dict() for row in self.rows],
            "versions": dict(self.versions),
            "machine": dict(self.machine),
            "curve": None if self.curve is None else self.curve.to_dict(),
        }
