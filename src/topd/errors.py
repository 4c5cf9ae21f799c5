"""The two ways a run may end early, each with the exit code of the command line."""

import re

LONGEST_WORD = 400


class TopdError(Exception):
    """An error with a message for a person: what happened, why, what to do. Shown without a traceback.

    Of a word longer than LONGEST_WORD, a value as it was found, the message shows the beginning.
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(
            re.sub(rf"\S{{{LONGEST_WORD},}}", lambda word: f"{word[0][:80]}... ({len(word[0])} characters)", message)
        )


def first_line(error: BaseException) -> str:
    """What a library's exception says, in one line; its type if it says nothing. A list after a colon belongs to that line."""
    first, *others = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(f"{first} {' '.join(others)}".split())[:400] if first.rstrip().endswith(":") else first


class ConfigError(TopdError, ValueError):
    """The user's input cannot be used. Raised before anything is spent."""

    exit_code = 2


class RunStopped(TopdError, RuntimeError):
    """A run met a failure it could not ride out. What was saved stays valid, and the run can be resumed."""

    exit_code = 3
