"""sdquant's nodes for ComfyUI. A copy of this folder lies in `custom_nodes`; all that it does is in the package."""

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
preflight.require()

from sdquant.hosts.comfy_nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, register_folder  # noqa: E402

register_folder()

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
