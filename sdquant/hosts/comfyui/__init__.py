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

from sdquant.hosts import comfy_paths, comfy_schema  # noqa: E402

comfy_paths.register_folders()

WEB_DIRECTORY = "./web"  # shows the texts of nodes, which ComfyUI does for its own only

if comfy_schema.has_v3():
    comfy_entrypoint = comfy_schema.entrypoint
else:
    NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS = comfy_schema.v1_classes(), comfy_schema.node_titles()
