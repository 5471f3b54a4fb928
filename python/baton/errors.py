"""Exceptions. Their text says what happened, to what, and what to do about it."""


class BatonError(Exception):
    """Base class of Baton's errors."""


class NotPostedError(BatonError):
    """The transfer was not posted yet."""


class InvalidParamError(BatonError, ValueError):
    """The request is wrong."""


class BackendError(BatonError):
    """No room, no memory, or the machine refused: a port that is in use, for example."""


class NotFoundError(BatonError, LookupError):
    """An unknown agent, list, transfer or range of memory, or one that is already gone."""


class MismatchError(BatonError):
    """Metadata that is damaged, of another version or of another cluster."""


class NotAllowedError(BatonError):
    """Memory that may not be used so, or not now; a name, a job or a load that is open already; a cluster key that others
    can read, or that cannot be made."""


class RepostActiveError(BatonError):
    """The transfer is running."""


class UnknownError(BatonError):
    """An unexpected error."""


class NotSupportedError(BatonError):
    """Not supported here."""


class RemoteDisconnectError(BatonError, ConnectionError):
    """The other agent is gone."""


class CancelledError(BatonError):
    """The transfer was aborted."""


class BatonTimeoutError(BatonError, TimeoutError):
    """The wait timed out; what was waited for continues."""


_BY_RESULT = {-1: NotPostedError, -2: InvalidParamError, -3: BackendError, -4: NotFoundError, -5: MismatchError,
              -6: NotAllowedError, -7: RepostActiveError, -8: UnknownError, -9: NotSupportedError,
              -10: RemoteDisconnectError, -11: CancelledError, -64: BatonTimeoutError}


def error_of(result: int, text: str) -> BatonError:
    """The exception that a negative result of the library stands for."""
    return _BY_RESULT.get(result, UnknownError)(text)


def number_of(error: object) -> int:
    """The library's error number for an exception, or for a plain text."""
    return next((number for number, kind in _BY_RESULT.items() if type(error) is kind), -8)
