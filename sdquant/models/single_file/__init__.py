"""Checkpoints in their authors' own layouts: names in diffusers' layout, and how each tensor is made of the file's."""
