"""A packed weight as ComfyUI sees it: a tensor of the float weight's shape and dtype.

ComfyUI finds out which model a state dict is of by the shapes in it, counts its numbers, renames it, and for some
models rewrites weights. So a packed weight travels as a tensor. The layers of `comfy_ops` take the packed parts out of
it; any other use of its values decodes it first, and so is right, if not small. What would write into it is refused.
"""

from __future__ import annotations

from typing import ClassVar

from ..nn import packed_tensor


class PackedTensor(packed_tensor.PackedTensor):
    """A weight of a state dict; its error names ComfyUI's way out."""

    way_out: ClassVar[str] = (
        "Remove the node that changes weights (such as a LoRA by hooks), or load the model without sdquant"
    )
    way_out_of_fusing: ClassVar[str] = way_out


class Counted(PackedTensor):
    """What a layer's state dict shows of its packed weight: the same, with the bytes that it takes in memory, which
    ComfyUI plans its offload by. (It reads `nbytes`; before 2026, `nelement() * element_size()`.)"""

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Of the packed parts."""
        return self.packed.nbytes

    def nelement(self) -> int:
        """So many that they take the bytes of the packed parts."""
        return -(-self.packed.nbytes // self.element_size())
