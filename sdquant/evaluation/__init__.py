"""Schemes held against each other: the same prompt through several (`compare`), and time and memory (`benchmark`).

In: requests. Out: rows, sheets of pictures, charts. May import `loading` and what is below.
"""
