"""The C kernels, `sdquant.kernels.native`; everything else about the package is in pyproject.toml.

They are optional: without a compiler the package installs and works, slower. To build them in a checkout:
`python setup.py -q build_ext --inplace`.
"""

from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("sdquant/kernels/native")

setup(
    ext_modules=[
        Extension(
            "sdquant.kernels.native._kernels",
            sources=sorted(map(str, FOLDER.glob("*.c"))),
            depends=sorted(map(str, FOLDER.glob("*.h"))),
            # A product and a sum round one by one, except where the code says so.
            extra_compile_args=["-O3", "-ffp-contract=off", "-g0"],
            py_limited_api=True,
            optional=True,
        )
    ]
)
