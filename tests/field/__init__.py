"""Trouble that public reports showed, each piece of it tried again: see `table`."""
