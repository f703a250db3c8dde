"""Errors that stem-edge raises on purpose, all derived from StemEdgeError.

Every message is one line that says what is wrong, where (file, layer, token), what was found,
what was expected, and what to do. The command prints it and exits with status 1.
"""


class StemEdgeError(Exception):
    """Base of every error that stem-edge raises on purpose."""


class CheckpointError(StemEdgeError):
    """A checkpoint or its tokenizer is missing, damaged or of a kind that cannot be exported."""


class ExportError(StemEdgeError):
    """An export cannot be written: its target exists, the disk is full, an option does not fit."""


class FarError(ExportError):
    """An export would diverge from its checkpoint more than allowed; nothing was exported."""


class BundleError(StemEdgeError):
    """A bundle is missing, damaged, incomplete or of a format this version cannot read."""


class HubError(StemEdgeError):
    """A model hub cannot be reached, refuses a request, or does not have a model or file."""


class EditError(StemEdgeError):
    """An edit file is missing, damaged, of another format or made for another bundle."""


class RowReadError(BundleError):
    """A record of the table store could not be read, or its checksum does not match."""


class BackendError(StemEdgeError):
    """The engine that runs the backbone is not installed, or it refused or failed a call."""


class MemoryPlanError(StemEdgeError):
    """The memory limit is below the least that the model needs."""


class InputError(StemEdgeError, ValueError):
    """The model or the function does not accept a prompt, token id or option."""


class UnknownOptionError(InputError, TypeError):
    """The function has no keyword argument of this name."""


class OutOfMemoryError(StemEdgeError, MemoryError):
    """An allocation of memory failed; models that are loaded stay usable."""


class DeviceLostError(BackendError):
    """The device that runs the backbone is gone; the model must be loaded again."""
