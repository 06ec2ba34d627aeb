"""GGUF files: header, tensors, conventions of ComfyUI-GGUF and llama.cpp, and the writer."""
