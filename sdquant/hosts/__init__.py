"""sdquant inside the web UIs that people already use.

    host.py         the web UIs: how to recognize each of them, and what works there
    webui/          the extension's folder, which `sdquant install-extension` copies: a check and one script
    extension.py    registers everything with the host when the script runs, and removes it again
    options.py      the "Quantization" section of the host's settings, and the Settings in it
    tab.py          the status and inspect tab;  status.py: the data that it and the REST route show
    folders.py      the folders in which the host keeps its models
    load_hooks.py   steps that the load paths share
    monkeypatch.py  replaces functions of the host, and restores them;  display.py: the host's progress and errors
    sdnext.py, forge.py, a1111.py    each host's load path;  forge_layers.py: layers that Forge can swap to RAM
    comfyui/        ComfyUI's folder of nodes, copied likewise;  comfy_*.py: the implementation of the nodes

Importing a module here imports no gradio or diffusers, and none of a host's modules, since web UIs pin old versions.
Only the modules with layers (forge_layers.py, comfy_*.py) import torch.
"""
