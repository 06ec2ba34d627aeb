"""sdquant inside the web UIs that people already use.

    host.py         the web UIs: how each is told from the others, and what it can and cannot do here
    webui/          the extension's folder, which `sdquant install-extension` copies: a check and one script
    extension.py    what the script calls: everything is registered, and taken back
    options.py      the "Quantization" section of the host's settings, and the Settings in it
    tab.py          the status and inspect tab;  status.py: what it and the REST answer show
    folders.py      where the host keeps its models
    patches.py      functions of the host that are replaced, and put back;  display.py: the host's progress and errors
    sdnext.py, forge.py, a1111.py    each host's load path;  swapped.py: layers that Forge's mover can swap
    comfyui/        ComfyUI's folder of nodes, copied likewise; comfy_*.py: what the nodes do

Importing a module here imports no gradio or diffusers, and none of a host's modules: web UIs pin old versions. No torch
either, but for layers (swapped.py, comfy_*.py).
"""
