"""The C kernels, `sdquant.kernels.cpu`; everything else about the package is in pyproject.toml.

They are optional: without a compiler the package installs and works, slower. To build them in a checkout:
`python setup.py -q build_ext --inplace`.
"""

import hashlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("sdquant/kernels/cpu")
OBJECTS = Path("build/objects")  # compiled before, by what they were compiled from


@cache
def headers() -> bytes:
    """Return the contents of all headers, any of which a source may include."""
    return b"\0".join(path.read_bytes() for path in sorted(FOLDER.glob("*.h")))


class BuildTogether(build_ext):
    """Compiles as many files at once as there are cores, and none again that is as it was: compiling is most of the
    time of an installation."""

    def build_extension(self, ext: Extension) -> None:
        """All files of one extension, then its linking."""
        compiler: Any = self.compiler
        one_by_one = compiler.compile

        def compiled(file: str, *args: Any, **values: Any) -> str:
            program = getattr(compiler, "compiler_so", [compiler.compiler_type])
            place = os.path.realpath(shutil.which(program[0]) or "")  # its version is in there
            flags = repr((file, program, place, values.get("macros"), values.get("extra_postargs"))).encode()
            key = hashlib.sha256(b"\0".join((flags, Path(file).read_bytes(), headers()))).hexdigest()[:16]
            kept = OBJECTS / f"{Path(file).stem}-{key}.o"
            if not kept.exists():
                (made,) = one_by_one([file], *args, **values)
                kept.parent.mkdir(parents=True, exist_ok=True)
                unfinished = kept.with_suffix(f".{os.getpid()}")
                shutil.copyfile(made, unfinished)
                unfinished.replace(kept)  # whole, whoever else builds here
            kept.touch()  # older than the extension, it would not be linked again when a file is as it was before
            return str(kept)

        def together(sources: list[str], *args: Any, **values: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                largest_first = sorted(sources, key=os.path.getsize, reverse=True)
                return list(pool.map(lambda file: compiled(file, *args, **values), largest_first))

        compiler.compile = together
        try:
            super().build_extension(ext)
        finally:
            compiler.compile = one_by_one


setup(
    cmdclass={"build_ext": BuildTogether},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},  # as the extension: one wheel for every Python from 3.10 on
    ext_modules=[
        Extension(
            "sdquant.kernels.cpu._kernels",
            sources=sorted(map(str, FOLDER.glob("*.c"))),
            depends=sorted(map(str, FOLDER.glob("*.h"))),
            # A product and a sum round one by one, except where the code says so.
            extra_compile_args=["-O3", "-ffp-contract=off", "-g0"],
            py_limited_api=True,
            optional=True,
        )
    ],
)
