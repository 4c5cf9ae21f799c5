"""Errors that end a run early, each with the exit code of the command line."""

import re

LONGEST_WORD = 400


class TopdError(Exception):
    """An error with a message for the user: event, cause, remedy. Printed without a traceback.

    A word longer than LONGEST_WORD, such as a value of the input, is shortened to its beginning.
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(
            re.sub(rf"\S{{{LONGEST_WORD},}}", lambda word: f"{word[0][:80]}... ({len(word[0])} characters)", message)
        )


def first_line(error: BaseException) -> str:
    """Message of a library's exception in one line, with a list that follows a colon; its type if the message is empty."""
    first, *others = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(f"{first} {' '.join(others)}".split())[:400] if first.rstrip().endswith(":") else first


class ConfigError(TopdError, ValueError):
    """Unusable input. Raised before any computation."""

    exit_code = 2


class RunStopped(TopdError, RuntimeError):
    """A failure that ends a run. Everything saved stays valid, and the run can be resumed."""

    exit_code = 3
