"""Containers: one file each, strict readers and writers."""
