"""A1111 82a973c0 and Forge dfdcbab6, modules/paths.py. The tests set it."""

models_path = ""
