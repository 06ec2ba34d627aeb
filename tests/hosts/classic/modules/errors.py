"""A1111 82a973c0 and Forge dfdcbab6, modules/errors.py. `shown` is what stderr would have."""

import sys

shown = []


def report(message, *, exc_info=False):
    shown.append((message, sys.exc_info()[1]))


def display(e, task, *, full_traceback=False):
    shown.append((task, e))
