"""The command ``posttrain serve``: a model behind the API of OpenAI, on this machine alone."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from posttrain.cli import parse
from posttrain.cli.tools import chat, load
from posttrain.core.errors import ConfigError

HELP = f"""posttrain serve MODEL [--port N] [--local] ...

Answer /v1/chat/completions and /v1/completions, as OpenAI's API does, on http://127.0.0.1:PORT. Where vLLM is
installed, it serves the model (an adapter must be merged first); else transformers does, one request at a time, which
is for trying a model out.

  --port N   [default 8000]
  --local    use transformers also where vLLM is installed
{load.FLAGS}"""
KINDS = load.KINDS | {"port": int, "local": bool}
HOST = "127.0.0.1"
#: The longest request that is read, in bytes.
LONGEST = 2**24


def run(words: list[str]) -> None:
    """The command. With vLLM it does not return: the server takes the place of this process.

    Raises:
        ConfigError: the words are not those of `HELP`, or vLLM cannot serve the model. CheckpointError: it cannot be
            loaded.
    """
    if {"-h", "--help"} & set(words):
        print(HELP)
        return
    names, given = parse.typed_flags("serve", words, KINDS, names=1, what="a model: its folder or its name")
    port, local = given.pop("port", 8000), given.pop("local", False)
    if find_spec("vllm") is not None and not local:
        command = vllm_command(names[0], port, given)
        os.execv(command[0], command)
    model, tokenizer = load.of_command("serve", names[0], given)
    try:
        server = make_server(model, tokenizer, names[0], port)
    except OSError as error:
        raise ConfigError("serve", [f"port {port} cannot be used ({error}); set another --port"]) from error
    print(f"{names[0]} answers at http://{HOST}:{server.server_port}/v1 until Ctrl-C.", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()


def vllm_command(model: str, port: int, given: dict[str, Any]) -> list[str]:
    """The command line of vLLM for a whole model.

    Raises:
        ConfigError: it is an adapter, or a flag has no meaning for vLLM.
    """
    if (Path(model) / "adapter_config.json").is_file():
        how = f"posttrain merge {model} {model}-merged"
        raise ConfigError("serve", [f"{model} is an adapter, and vLLM serves a whole model. Merge it first: {how}"])
    if others := [name for name in given if name not in ("dtype", "trust_remote_code")]:
        raise ConfigError("serve", [f"vLLM has no --{others[0]}; leave it out, or use --local"])
    options = ["--dtype", given["dtype"]] if "dtype" in given else []
    options += ["--trust-remote-code"] if given.get("trust_remote_code") else []
    own = [sys.executable, "-m", "vllm.entrypoints.cli.main"]  # a `vllm` on the PATH may be of another environment
    return [*own, "serve", model, "--host", HOST, "--port", str(port), *options]


def make_server(model: Any, tokenizer: Any, name: str, port: int = 0) -> ThreadingHTTPServer:
    """A server that answers with `model`, to be started by ``serve_forever``; port 0: a free one."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self._is_local() and self.path == "/v1/models":
                self._send(200, {"object": "list", "data": [{"id": name, "object": "model"}]})
            else:
                self._fail(404, f"{self.path} is not known; /v1/models is")

        def do_POST(self) -> None:
            chats = self.path == "/v1/chat/completions"
            if not self._is_local() or not (chats or self.path == "/v1/completions"):
                self._fail(404, f"{self.path} is not known; /v1/chat/completions and /v1/completions are")
                return
            try:
                asked = json.loads(self.rfile.read(min(int(self.headers.get("Content-Length", 0)), LONGEST)))
                with lock:
                    text = _answer(model, tokenizer, asked, chats)
            except (KeyError, TypeError, ValueError) as error:
                self._fail(400, f"the request cannot be answered: {type(error).__name__}: {error}")
                return
            self._send_answer(text, chats, bool(asked.get("stream")))

        def _is_local(self) -> bool:
            """Whether a program on this machine asks, and not a page of another site in its browser."""
            return self.headers.get("Host", "").rpartition(":")[0] in (HOST, "localhost")

        def _send_answer(self, text: str, chats: bool, stream: bool) -> None:
            part = {"role": "assistant", "content": text}
            said = {"delta" if stream else "message": part} if chats else {"text": text}
            kind = ("chat.completion" if chats else "text_completion") + ".chunk" * (stream and chats)
            body = {"id": "posttrain", "object": kind, "created": int(time.time()), "model": name}
            body |= {"choices": [{"index": 0, "finish_reason": "stop", **said}]}
            if not stream:
                self._send(200, body)
                return
            self._write(200, f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n", "text/event-stream")

        def _send(self, status: int, body: dict[str, Any]) -> None:
            self._write(status, json.dumps(body), "application/json")

        def _fail(self, status: int, why: str) -> None:
            self._send(status, {"error": {"message": why, "type": "invalid_request_error"}})

        def _write(self, status: int, text: str, kind: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return ThreadingHTTPServer((HOST, port), Handler)


def _answer(model: Any, tokenizer: Any, asked: dict[str, Any], chats: bool) -> str:
    prompt = asked["messages" if chats else "prompt"]
    if asked.get("seed") is not None:
        torch.manual_seed(int(asked["seed"]))
    most = asked.get("max_completion_tokens") or asked.get("max_tokens") or 256
    return chat.reply(
        model, tokenizer, prompt, max_new_tokens=int(most), temperature=float(asked.get("temperature", 1))
    )
