"""The data, the prompts and the judge: scikit-learn's handwritten digits.

1797 images of 8x8 pixels, split in two halves that never meet: half A trains the judge, half B trains the models.
So the judge marks images whose training data it has not seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

SIZE = 32  # pixels a side of a generated image; the originals are 8x8
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = (
    "a handwritten {name}",
    "a handwritten digit {name}",
    "the digit {digit}",
    "the number {name}",
    "a photo of the number {digit}",
    "{name}",
)
SPLIT_SEED = 0


def prompt(digit: int, template: int = 0) -> str:
    """The text that asks for `digit` (0 to 9)."""
    return TEMPLATES[template].format(name=NAMES[digit], digit=digit)


@dataclass(frozen=True, kw_only=True)
class Half:
    """One half of the data: `pixels` float64 [n, 64] in 0..16, `labels` int64 [n]."""

    pixels: npt.NDArray[np.float64]
    labels: npt.NDArray[np.int64]


@lru_cache(maxsize=1)
def halves() -> tuple[Half, Half]:
    """Half A (for the judge) and half B (for the models), stratified, the same at every call."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    xa, xb, ya, yb = train_test_split(pixels, labels, test_size=0.5, stratify=labels, random_state=SPLIT_SEED)
    return Half(pixels=xa, labels=ya), Half(pixels=xb, labels=yb)


class Judge:
    """A support-vector classifier trained on half A: which digit does an image show?"""

    def __init__(self) -> None:
        from sklearn.svm import SVC

        train, held_back = halves()
        self._classifier = SVC(gamma=0.001, C=10).fit(train.pixels, train.labels)
        self.accuracy = float(self._classifier.score(held_back.pixels, held_back.labels))

    def read(self, images: Sequence[Any]) -> list[int]:
        """The digit seen in each PIL image (any size that is a multiple of 8 pixels)."""
        import numpy as np

        if not images:
            return []
        rows = []
        for image in images:
            grey = np.asarray(image.convert("L"), dtype=np.float64) / 255 * 16
            cell = grey.shape[0] // 8
            rows.append(grey.reshape(8, cell, 8, cell).mean(axis=(1, 3)).reshape(64))
        return [int(label) for label in self._classifier.predict(np.stack(rows))]


@lru_cache(maxsize=1)
def judge() -> Judge:
    """The judge, trained once a process (it takes some 50 ms)."""
    return Judge()
