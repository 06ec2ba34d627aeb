"""Forge dfdcbab6: the package by which it is told from A1111."""
