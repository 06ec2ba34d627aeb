"""sdquant's nodes for ComfyUI. A copy of this folder lies in `custom_nodes`; all that it does is in the package."""

import sys
from pathlib import Path

bundle = Path(__file__).resolve().parent / "bundle"  # of `install-extension --bundle`
if bundle.is_dir():
    sys.path[:] = [str(bundle / "code"), *(path for path in sys.path if not path.startswith(str(bundle)))]
    sys.path.append(str(bundle / "packages"))

try:
    from sdquant.hosts import preflight
    from sdquant.utils import install
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "sdquant":
        raise
    raise ImportError(
        "sdquant is not installed in the Python that runs ComfyUI: python -m pip install --no-deps PATH/TO/SDQUANT"
    ) from None

install.set_inside(True)
preflight.require_packages()

from sdquant.hosts.comfy_nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, register_folder  # noqa: E402

register_folder()

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
