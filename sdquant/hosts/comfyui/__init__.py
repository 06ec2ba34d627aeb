"""sdquant's nodes for ComfyUI. A copy of this folder lies in `custom_nodes`; all that it does is in the package."""

try:
    from sdquant.hosts import comfy_paths, comfy_schema
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "sdquant":
        raise
    raise ImportError(
        "sdquant is not installed in the Python that runs ComfyUI: python -m pip install --no-deps PATH/TO/SDQUANT"
    ) from None

comfy_paths.register_folders()

WEB_DIRECTORY = "./web"  # shows the texts of nodes, which ComfyUI does for its own only

if comfy_schema.has_v3():
    comfy_entrypoint = comfy_schema.entrypoint
else:
    NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS = comfy_schema.v1_classes(), comfy_schema.node_titles()
