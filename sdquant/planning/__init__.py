"""Requests and plans, made before weights are loaded: arguments, settings, component files, "auto" and presets."""
