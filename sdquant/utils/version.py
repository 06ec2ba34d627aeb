"""The version of sdquant. pyproject.toml has it too; a test holds them together."""

__version__ = "0.1.0"
