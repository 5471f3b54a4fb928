"""What goes wrong, as exceptions. Their text says what happened, to what, and what to do about it."""


class BatonError(Exception):
    """Any of them."""


class NotPostedError(BatonError):
    """The transfer was not posted yet."""


class InvalidParamError(BatonError, ValueError):
    """The request is wrong."""


class BackendError(BatonError):
    """No room, no memory, or the machine said no: a port that is in use, say."""


class NotFoundError(BatonError, LookupError):
    """An agent, a list, a transfer or memory that is not known, or not any more."""


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
    """What Baton does not do here."""


class RemoteDisconnectError(BatonError, ConnectionError):
    """The other agent is gone."""


class CancelledError(BatonError):
    """The transfer was aborted."""


class BatonTimeoutError(BatonError, TimeoutError):
    """The wait is over; what was waited for goes on."""


_BY_RESULT = {-1: NotPostedError, -2: InvalidParamError, -3: BackendError, -4: NotFoundError, -5: MismatchError,
              -6: NotAllowedError, -7: RepostActiveError, -8: UnknownError, -9: NotSupportedError,
              -10: RemoteDisconnectError, -11: CancelledError, -64: BatonTimeoutError}


def error_of(result: int, text: str) -> BatonError:
    """The exception that a negative result of the library stands for."""
    return _BY_RESULT.get(result, UnknownError)(text)


def number_of(error: object) -> int:
    """The library's number for an exception, or for a text that is none."""
    return next((number for number, kind in _BY_RESULT.items() if type(error) is kind), -8)
