"""Products with packed weights, each by the fastest way that is right on this machine.

`forms.py` says how packed weights lie in memory, the files below say who can read them, `choice.py` chooses.
Importing this package imports no torch.
"""
