"""A1111 1.10 and Forge dfdcbab6, modules/paths.py. The tests set it."""

models_path = ""
