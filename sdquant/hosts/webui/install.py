"""Looks whether sdquant can be used by this web UI. It installs nothing: that is the user's choice."""

import sys
from pathlib import Path

bundle = Path(__file__).resolve().parent / "bundle"  # of `install-extension --bundle`
if bundle.is_dir():
    sys.path[:] = [str(bundle / "code"), *(path for path in sys.path if not path.startswith(str(bundle)))]
    sys.path.append(str(bundle / "packages"))

try:
    from sdquant.errors import SdquantError
    from sdquant.hosts import extension, preflight
    from sdquant.utils import install
except ImportError as error:
    python = f'"{sys.executable}"'  # web UIs are often in folders with a space
    print(f"sdquant: the extension cannot run: {error}. Run: {python} -m pip install --no-deps PATH/TO/SDQUANT")
else:
    assert extension
    install.set_inside(True)
    try:
        preflight.require_packages()
    except SdquantError as error:
        print(f"sdquant: {error}")
