"""Device and number of compute threads: `run.device` and `run.threads`."""

import os

import torch

from topd.errors import ConfigError, first_line


def pick_device(name: str, *, key: str = "run.device") -> torch.device:
    """Device by name; `auto` is cuda, else mps, else cpu. Raises ConfigError, naming the key, for an absent device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps"):
            raise RuntimeError("it must be auto, cpu, cuda, cuda:N or mps")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first = first_line(error)
        raise ConfigError(f'{key} = "{name}" cannot be used: {first}. Set {key} = "auto".') from error
    return device


def set_threads(number: int | None, *, key: str = "run.threads") -> None:
    """Set torch's threads; None leaves them. Raises ConfigError, naming the key, for more threads than processors."""
    if number is None:
        return
    if number > (os.cpu_count() or 1):
        raise ConfigError(f"{key} must be at most the {os.cpu_count()} processors of this machine, found {number}. Lower it.")
    torch.set_num_threads(number)
