"""Commands that install sdquant, for every text that names one."""

CHECKOUT = "PATH/TO/SDQUANT"  # the folder of a checkout, as the documentation and the folders for web UIs write it
SOURCE = CHECKOUT  # what pip installs: no package index has sdquant yet. "sdquant" once one has.


def install_extra(extra: str) -> str:
    """Return the command that installs sdquant with an extra, such as "gguf"."""
    return f'pip install "{SOURCE}[{extra}]"'


def install_alone(python: str) -> str:
    """Return the command that installs sdquant for a Python whose other packages stay as they are."""
    return f"{python} -m pip install --no-deps {SOURCE}"
