"""The page, and what is behind it."""
