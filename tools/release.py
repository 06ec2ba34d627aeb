"""Make what is released: the source archive, and a wheel for each platform.

    python -m tools.release DIST           a wheel for this machine
    python -m tools.release DIST --all     cibuildwheel's, by the rules in pyproject.toml; on Linux it takes Docker

The C kernels use Python's limited interface, so that a platform's wheel serves every Python from 3.10 on. Nothing is
uploaded.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
KERNELS = "sdquant/kernels/cpu/_kernels"


def version() -> str:
    """Return the version, which two files have."""
    said = {
        name: re.search(r'^(?:__version__|version) = "(.+)"', (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        for name in ("pyproject.toml", "sdquant/utils/version.py")
    }
    found = {match[1] for match in said.values() if match is not None}
    if len(found) != 1:
        raise SystemExit(f"these files have no version, or differ: {', '.join(said)}")
    return found.pop()


def wheel_problem(wheel: Path) -> str | None:
    """Return what is wrong with a wheel; None if nothing is."""
    names = zipfile.ZipFile(wheel).namelist()
    if not any(name.startswith(KERNELS) for name in names):
        return "it has no C kernels: a compiler is missing, or failed"
    if "-cp310-abi3-" not in wheel.name:
        return "its name does not say cp310-abi3"
    if not any(name.startswith("sdquant/hosts/webui/") for name in names):
        return "it lacks the folders for web UIs"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="an empty or new folder")
    parser.add_argument("--all", action="store_true", help="wheels for all that cibuildwheel can build here")
    args = parser.parse_args()
    folder = args.folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty")
    changes = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    if changes.stdout:
        raise SystemExit(f"commit first; a release is made of a commit:\n{changes.stdout}")
    commands = [[sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(folder)]]
    if args.all:
        commands.append([sys.executable, "-m", "cibuildwheel", "--output-dir", str(folder)])
    else:
        commands.append([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(folder), "."])
    for command in commands:
        subprocess.run(command, cwd=ROOT, check=True)
    wheels = sorted(folder.glob("*.whl"))
    wrong = {wheel.name: why for wheel in wheels if (why := wheel_problem(wheel)) is not None}
    for name, why in wrong.items():
        print(f"{name}: {why}")
    print(f"sdquant {version()}: {', '.join(path.name for path in sorted(folder.iterdir()))}")
    return 1 if wrong or not wheels else 0


if __name__ == "__main__":
    sys.exit(main())
