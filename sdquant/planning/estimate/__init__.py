"""Estimates of a plan: how much memory it will take at the most, how long a step will take, how precise a scheme is."""
