"""SD.Next 058a7f0cf, modules/paths.py. The tests set it."""

models_path = ""
