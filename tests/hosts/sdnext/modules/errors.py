"""SD.Next 058a7f0cf, modules/errors.py. `shown` is what its log would have."""

shown = []


class ValidationError(ValueError):
    """Shown without a traceback."""


def display(e, task, suppress=None):
    shown.append((task, e))
