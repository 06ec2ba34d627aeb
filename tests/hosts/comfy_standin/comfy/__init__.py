"""Stand-in for ComfyUI; see the README beside it."""
