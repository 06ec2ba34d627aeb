"""Every error sdquant raises on purpose.

    SdquantError
    ├── UnknownQuantError          a scheme name nobody has registered
    ├── UnknownOffloadError        an offload mode that does not exist
    ├── IncompatibleError          a combination the compatibility matrix refuses
    │   └── RefusedFileError       a file the matrix refuses as such (also an UnsupportedFileError)
    ├── BackendUnavailableError    a library that is missing, too old, or not for this device
    ├── BadFileError               a file that is damaged or contradicts itself
    ├── UnsupportedFileError       a sound file of a kind sdquant does not load
    ├── ConflictError              the file holds one thing, the caller asked for another
    ├── MissingComponentError      a part of the pipeline is nowhere to be found
    ├── BudgetError                the model cannot run within the memory budget
    ├── DiskSpaceError             there is no room for what is to be written
    ├── DistributedError           another of the processes that work together has ended
    ├── SettingsError              a setting or argument with a value it cannot have
    └── TrainingError              a training that cannot go on

Each says what was asked, why it cannot be done, and how to get on: `.what`, `.why`, `.fix`. Its text is those three.
"""

from __future__ import annotations


class SdquantError(Exception):
    """Base of all errors of this package.

    Args:
        what: what was asked for or found, with the file, scheme or setting by name.
        why: the reason it cannot be done.
        fix: what to do instead.
    """

    def __init__(self, what: str, why: str, fix: str) -> None:
        self.what, self.why, self.fix = what, why, fix
        super().__init__(what, why, fix)

    @property
    def inner(self) -> str:
        """`what` as a part of another error's: "Cannot load x.gguf: cannot read weight 'y'"."""
        return self.what[:1].lower() + self.what[1:] if self.what.startswith("Cannot ") else self.what

    def __str__(self) -> str:
        """In one line: "what: why. fix." """
        return " ".join((_ended(self.what, ":"), _ended(self.why, "."), _ended(self.fix, ".")))


def _ended(text: str, end: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?", end)) else text + end


class UnknownQuantError(SdquantError):
    """A quantization scheme that no backend has."""


class UnknownOffloadError(SdquantError):
    """An offload mode that does not exist."""


class IncompatibleError(SdquantError):
    """A combination that the compatibility matrix refuses."""


class BackendUnavailableError(SdquantError):
    """The library behind a scheme is missing, too old, or does not support this device."""


class BadFileError(SdquantError):
    """A file that is damaged, incomplete, or contradicts itself."""


class UnsupportedFileError(SdquantError):
    """A sound file, but of a kind that sdquant does not load."""


class RefusedFileError(IncompatibleError, UnsupportedFileError):
    """A kind of file that has a `breaks` row in the matrix, such as an all-in-one GGUF."""


class ConflictError(SdquantError):
    """The file contradicts the request."""


class MissingComponentError(SdquantError):
    """A component or configuration that the model needs was not found."""


class BudgetError(SdquantError):
    """The model cannot run within the given memory budget."""


class DiskSpaceError(SdquantError):
    """There is no room where a file was to be written."""


class DistributedError(SdquantError):
    """Another of the processes that work together has ended, or does not answer."""


class SettingsError(SdquantError):
    """A setting or argument has a value it cannot have."""


class TrainingError(SdquantError):
    """A training that cannot go on: its loss is not finite any more."""


class SdquantWarning(UserWarning):
    """Base of the warnings of this package."""


class UntestedWarning(SdquantWarning):
    """A combination that nobody has tried."""


class IncompatibleWarning(SdquantWarning):
    """A combination that the matrix refuses and the caller insists on."""
