"""Where models live: `run.device` -> torch.device."""

import torch

from topd.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """`auto` is cuda, else mps, else cpu. Raises ConfigError for a device this machine does not have."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f'run.device = "{name}" cannot be used: {first}. Set run.device = "auto".') from error
    return device
