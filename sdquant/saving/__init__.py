"""From a loaded model to files: a folder, safetensors, GGUF, ComfyUI's single file, an adapter that PEFT reads.

In: pipelines, components, and plans for `sdquant quantize`. Out: files, each whole or not there.
May import `planning` and what is below.
"""
