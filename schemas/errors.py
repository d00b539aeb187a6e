"""One base error: the docstring of a class is its default message."""

import inspect


class SwitchyardError(Exception):
    """Something in Switchyard went wrong."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or inspect.cleandoc(type(self).__doc__ or ""))


class InvalidRecord(SwitchyardError):
    """The bytes are not a record of this topic."""


class InvalidName(SwitchyardError):
    """The text is not a valid name of its kind."""


class BadSignature(SwitchyardError):
    """The signature does not match, or its key is unknown or revoked."""
