"""Make a folder of wheels for a machine with a card and no package index: what sdquant's GPU tests and benches import.

    python tools/gpu_wheels.py .whl --python 3.12 --cuda 130

The versions are those that are installed here. Of bitsandbytes' wheel only the library for one version of CUDA and the
one for CPUs are kept: 4 MB of 43. There: `pip install --no-index --no-deps --target DIR .whl/*.whl`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "diffusers", "bitsandbytes", "optimum-quanto", "nncf", "gguf", "libgguf", "sdnq", "peft", "importlib-metadata",
    "openvino-telemetry", "pydot",
)  # fmt: skip
PLATFORMS = ("2_28", "2_27", "2_24", "2_17")  # of manylinux
MOST = 40 << 20  # bytes that may be carried


def download(folder: Path, python: str) -> None:
    """Fetch the wheel of each package into `folder`."""
    platforms = [f"--platform=manylinux_{version}_x86_64" for version in PLATFORMS]
    for name in PACKAGES:
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *platforms,
            "--platform=manylinux2014_x86_64", "--platform=any", f"--python-version={python}", "--implementation=cp",
            f"--dest={folder}", f"{name}=={metadata.version(name)}",
        ]  # fmt: skip
        subprocess.run(command, check=True)


def strip(wheel: Path, cuda: str) -> None:
    """Keep of bitsandbytes' libraries those for one version of CUDA and for CPUs."""
    beside = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            library = entry.filename.endswith(".so")
            if not library or entry.filename.endswith((f"_cuda{cuda}.so", "_cpu.so")):
                target.writestr(entry, source.read(entry))
    beside.replace(wheel)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="that of the machine with the card (default 3.12)")
    parser.add_argument("--cuda", default="130", help="its version of CUDA without the dot (default 130)")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for old in args.folder.glob("*.whl"):  # two versions of one package stop pip
        old.unlink()
    download(args.folder, args.python)
    strip(next(args.folder.glob("bitsandbytes-*.whl")), args.cuda)
    size = sum(wheel.stat().st_size for wheel in args.folder.glob("*.whl"))
    print(f"{len(PACKAGES)} wheels, {size / 2**20:.1f} MB in {args.folder}")
    return 0 if size <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
