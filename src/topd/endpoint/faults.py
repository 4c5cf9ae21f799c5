"""Failures between a request and a usable answer. No message ever holds a header, a key or a request body."""


class Fault(Exception):
    """A failed request. Its message may quote a server, so unprintable characters are escaped."""

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message))


class Unavailable(Fault):
    """No answer: connection refused or reset, timeout, or a server error. Worth a retry, here or elsewhere."""


class Busy(Unavailable):
    """The server asks to wait (429, or 503 with Retry-After). Does not count as a failure of the replica."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class BadAnswer(Fault):
    """An invalid answer: truncated, too short, NaN, other tokens. Worth a retry."""


class OtherModel(BadAnswer):
    """The replica returns the numbers of another model than the one the run began with."""


class Refused(Fault):
    """The server will never accept this request (400, 404, 413, ...)."""


class Forbidden(Refused):
    """The key is missing or wrong (401, 403)."""
