"""The C kernels, `sdquant.kernels.cpu`; everything else about the package is in pyproject.toml.

They are optional: without a compiler the package installs and works, slower. To build them in a checkout:
`python setup.py -q build_ext --inplace`.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("sdquant/kernels/cpu")


class BuildTogether(build_ext):
    """Compiles as many files at once as there are cores: it is most of the time of an installation."""

    def build_extension(self, ext: Extension) -> None:
        """All files of one extension, then its linking."""
        compiler: Any = self.compiler
        one_by_one = compiler.compile

        def together(sources: list[str], *args: Any, **values: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                made = pool.map(lambda file: one_by_one([file], *args, **values), sources)
                return [name for names in made for name in names]

        compiler.compile = together
        try:
            super().build_extension(ext)
        finally:
            compiler.compile = one_by_one


setup(
    cmdclass={"build_ext": BuildTogether},
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
