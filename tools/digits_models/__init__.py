"""How the shipped models, digits-sd and digits-flux, were trained: `python -m tools.digits_models.train`."""
