"""optimum-quanto without its compiler.

The first time quanto unpacks 4- or 2-bit codes it compiles a C++ extension into site-packages. That needs ninja, a
compiler and a writable folder; a process that was killed meanwhile leaves a `lock` file there, and the next one waits
for it forever. The extension is a few torch operations and computes nothing that torch does not.

So, before quanto's own modules run, the extension object gets a library that is a plain function of ours. quanto looks
at `Extension._lib` before it builds, so nothing is built, no lock is waited for, and the build folder is not touched.
An extension that this process has already loaded stays. One that was built earlier but is not loaded does not count:
torch asks ninja and the lock before it loads even that, and it would be no faster.

On CUDA the same happens to `quanto_cuda`. Its other kernels (AWQ, Marlin) cannot be replaced, so it is also taken off
quanto's list of extensions; quanto then keeps its generic layout, or uses torch's own int4 kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

UNPACK_ONLY = ("quanto_cpp", "quanto_hip", "quanto_mps")


def shift_right(codes: Tensor, bits: int) -> Tensor:
    """Return `codes >> bits` for uint8, which MPS does not support."""
    return codes // 2**bits if codes.device.type == "mps" else codes >> bits


class Unpacker:
    """Stand-in for the compiled module, with the one function of it that every device needs."""

    @staticmethod
    def unpack(packed: Tensor, bits: int) -> Tensor:
        """Unpack uint8 [rows, ...], 8 / bits codes a byte, to uint8 [rows * 8 / bits, ...], low bits' rows first."""
        planes = 8 // bits
        out = packed.new_empty(packed.shape[0] * planes, *packed.shape[1:])
        for plane, rows in enumerate(out.chunk(planes) if len(packed) else ()):
            rows.copy_(shift_right(packed, bits * plane) & (2**bits - 1))
        return out


def without_compiler() -> None:
    """Give every extension that is not loaded yet our unpack. Cheap; called before each use of quanto's modules."""
    from optimum.quanto.library.extensions import extension

    registered: dict[str, Any] = extension._extensions
    for name, ext in list(registered.items()):
        if ext._lib is None:
            ext._lib = Unpacker
            if name not in UNPACK_ONLY:
                del registered[name]


__all__ = ["Unpacker", "shift_right", "without_compiler"]
