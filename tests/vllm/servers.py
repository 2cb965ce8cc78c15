"""Starts vLLM servers on tiny models, on the CPU.

By hand: ``.venv-vllm/bin/python -m tests.vllm.servers 8123 FOLDER``. Tests with POSTTRAIN_VLLM_SERVER=8123:FOLDER in
their environment use that one, and start none.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from tests import tiny, tiny_vision

SIZE = {"head_dim": 32, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}  # vLLM knows heads of 32
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip
FLAGS = [
    "--enforce-eager", "--dtype", "float32", "--max-model-len", "512", "--logprobs-mode", "processed_logprobs",
    "--weight-transfer-config", '{"backend": "gloo"}', "--enable-scale-out",
]  # fmt: skip
LORA = ["--enable-lora", "--max-lora-rank", "8"]
SEEING = ["--limit-mm-per-prompt", '{"image": 2}', "--model-impl", "transformers"]  # vLLM's own need torchvision
SECONDS = 600


def model(seed: int = 0, **options):
    """A language model that vLLM can serve on the CPU."""
    return tiny.causal_lm(seed=seed, **{"initializer_range": 0.15} | SIZE | options).eval()


def save(folder: Path, made=None) -> Path:
    """Write a model and its tokenizer as vLLM reads them."""
    (model() if made is None else made).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def seeing(seed: int = 0, **options):
    """(a vision-language model that vLLM can serve on the CPU, its processor)."""
    sight = {name: SIZE[name] for name in ("hidden_size", "num_attention_heads")}
    with patch.dict(tiny_vision.TEXT, SIZE | options), patch.dict(tiny_vision.SIGHT, sight):
        model, processor = tiny_vision.llava(seed)
    return model.eval(), processor


def save_seeing(folder: Path) -> Path:
    """Write a model that sees, with its processor."""
    for part in seeing():
        part.save_pretrained(folder)
    return folder


def start(folder: Path, port: int, log: Path, flags: list[str] = FLAGS) -> subprocess.Popen:
    """A server that is starting, whose engine and workers are in its process group: they survive its SIGKILL."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--host"]
    command += ["127.0.0.1", "--port", str(port), *flags]
    with log.open("w") as output:
        own = os.environ | ENVIRONMENT
        return subprocess.Popen(command, env=own, stdout=output, stderr=output, start_new_session=True)


def wait(process: subprocess.Popen, port: int, log: Path) -> None:
    """Until it answers."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(1)
    raise RuntimeError(f"The vLLM server did not start:\n{log.read_text()[-4000:]}")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def server(folder: Path, flags: list[str] = FLAGS) -> Iterator[str]:
    """The address of a server, which is stopped at the end."""
    port, log = free_port(), folder / "server.log"
    process = start(folder, port, log, flags)
    try:
        wait(process, port, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    where = Path(sys.argv[2])
    where.mkdir(parents=True, exist_ok=True)
    running = start(save(where), int(sys.argv[1]), where / "server.log", FLAGS + LORA + sys.argv[3:])
    print(running.pid, flush=True)
    try:
        running.wait()
    finally:
        running.terminate()
