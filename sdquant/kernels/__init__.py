"""Products with packed weights, each by the fastest kernel that gives correct results on this machine.

`core/packed_layout.py` describes how packed weights lie in memory, the files here read them, and `dispatch.py` chooses.
Importing this package imports no torch.
"""
