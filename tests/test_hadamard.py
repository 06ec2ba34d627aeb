"""The matrices that weights are rotated by, against comfy-kitchen's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sdquant.core import hadamard


def test_the_matrices_are_regular_where_they_can_be() -> None:
    golden = load_file(Path(__file__).parent / "backends" / "golden" / "comfy_hadamard_regular.safetensors")
    sizes = {len(signs): signs for signs in golden.values()}
    assert sizes.keys() == {4, 16, 64}
    for size, signs in sizes.items():
        assert hadamard.is_regular(size)
        assert torch.equal(hadamard.matrix(size, torch.float32, torch.device("cpu")) * size**0.5, signs.float())
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        matrix = hadamard.matrix(size, torch.float32, torch.device("cpu"))
        assert torch.allclose(matrix @ matrix, torch.eye(size), atol=1e-6) and torch.equal(matrix, matrix.t())
        assert bool((matrix.sum(1) > 0).all()) == (hadamard.is_regular(size) or size == 1)
    with pytest.raises(ValueError, match="24"):
        hadamard.matrix(24, torch.float32, torch.device("cpu"))
    x = torch.randn(3, 5, 64)
    assert torch.allclose(hadamard.rotate_by_matrix(hadamard.rotate_by_matrix(x, 16), 16), x, atol=1e-6)


@pytest.mark.parametrize(
    ("channels", "most", "size"),
    [(3072, 256, 256), (640, 256, 128), (160, 256, 32), (100, 256, 4), (90, 256, 0), (3, 256, 0), (96, 64, 64 // 2)],
)
def test_the_size_of_a_rotation(channels: int, most: int, size: int) -> None:
    assert hadamard.group_size(channels, most) == size
