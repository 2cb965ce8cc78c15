"""The command ``posttrain serve``: a model behind the API of OpenAI, on this machine alone."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import Any

import torch

from posttrain.cli.tools import load
from posttrain.core.errors import ConfigError
from posttrain.lm.loading import loading

HELP = f"""posttrain serve MODEL [--port N] [--local] ...

Answer /v1/chat/completions and /v1/completions, as OpenAI's API does, on http://127.0.0.1:PORT. Where vLLM is
installed, it serves the model (an adapter must be merged first); else transformers does, one request at a time, which
is for trying a model out.

  --port N   [default 8000]
  --local    use transformers also where vLLM is installed
{load.FLAGS}"""
HOST = "127.0.0.1"
#: The longest request that is read, in bytes.
LONGEST = 2**24
#: Parts of a request that change the answer and that are not done here, with the values that change nothing.
NOT_DONE: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([],),
    "tools": ([],),
    "logprobs": (False, 0),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "echo": (False,),
}


def run(words: list[str]) -> None:
    """Serve a model. With vLLM it does not return: the server takes the place of this process."""
    name, given = load.read_words("serve", words, {"port": int, "local": bool})
    port, local = given.pop("port", 8000), given.pop("local", False)
    if find_spec("vllm") is not None and not local:
        command = vllm_command(name, port, given)
        os.execv(command[0], command)
    model, tokenizer = load.of_command("serve", name, given)
    try:
        server = make_server(model, tokenizer, name, port)
    except OSError as error:
        raise ConfigError("serve", [f"port {port} cannot be used ({error}); set another --port"]) from error
    print(f"{name} answers at http://{HOST}:{server.server_port}/v1 until Ctrl-C.", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()


def vllm_command(model: str, port: int, given: dict[str, Any]) -> list[str]:
    """The command line of vLLM; `ConfigError` for an adapter, or a flag that has no meaning for vLLM."""
    if loading.is_adapter(model):
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
                answer = Answer(json.loads(self.rfile.read(min(int(self.headers.get("Content-Length", 0)), LONGEST))))
                with lock:
                    body = answer.write(model, tokenizer, name, chats, self._stream if answer.streams else None)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:  # it is JSON of any kind
                self._fail(400, f"the request cannot be answered: {type(error).__name__}: {error}")
                return
            except ConnectionError:  # the program has what it wanted, or has ended
                self.close_connection = True
                return
            if not answer.streams:
                self._send(200, body)
                return
            self.wfile.write(b"data: [DONE]\n\n")

        def _is_local(self) -> bool:
            """Whether a program on this machine asks, and not a page of another site in its browser."""
            return self.headers.get("Host", "").rpartition(":")[0] in (HOST, "localhost")

        def _stream(self, part: dict[str, Any], is_first: bool) -> None:
            """Send a part of an answer; the end of the connection is the end of the answer."""
            if is_first:
                self._begin(200, "text/event-stream")
                self.end_headers()
            self.wfile.write(f"data: {json.dumps(part)}\n\n".encode())
            self.wfile.flush()

        def _begin(self, status: int, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)

        def _send(self, status: int, body: dict[str, Any]) -> None:
            text = json.dumps(body).encode()
            self._begin(status, "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def _fail(self, status: int, why: str) -> None:
            self._send(status, {"error": {"message": why, "type": "invalid_request_error"}})

    return ThreadingHTTPServer((HOST, port), Handler)


class Answer:
    """An answer to `asked`, a request of OpenAI's API; `TypeError` if it is no object, `ValueError` if not done."""

    def __init__(self, asked: dict[str, Any]) -> None:
        if not isinstance(asked, dict):
            raise TypeError("it must be an object")
        if others := [key for key, neutral in NOT_DONE.items() if asked.get(key) not in (None, *neutral)]:
            raise ValueError(f"{', '.join(others)} is not supported; leave it out, or serve the model through vLLM")
        self.asked, self.streams = asked, bool(asked.get("stream"))

    def write(
        self, model: Any, tokenizer: Any, name: str, chats: bool, send: Callable[[dict[str, Any], bool], None] | None
    ) -> dict[str, Any]:
        """The whole answer; `send` gets its parts while it is written, and whether each is the first."""
        from transformers import TextStreamer

        asked = self.asked
        if not (prompt := load.encode(tokenizer, asked["messages" if chats else "prompt"])):
            raise ValueError("the prompt is empty")
        if asked.get("seed") is not None:
            torch.manual_seed(int(asked["seed"]))
        most = int(asked.get("max_completion_tokens") or asked.get("max_tokens") or 256)
        kind = ("chat.completion" if chats else "text_completion") + ".chunk" * (chats and self.streams)
        head = {"id": f"posttrain-{time.time_ns()}", "object": kind, "created": int(time.time()), "model": name}
        temperature, top_p = (1.0 if asked.get(key) is None else float(asked[key]) for key in ("temperature", "top_p"))
        sampling = load.sampling(temperature, top_p)

        def part(text: str, ended: str | None = None, kind: str = "delta") -> dict[str, Any]:
            said = {kind: {"role": "assistant", "content": text}} if chats else {"text": text}
            return head | {"choices": [{"index": 0, "finish_reason": ended, **said}]}

        class Parts(TextStreamer):
            is_first = True

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                if text and send is not None:
                    send(part(text), self.is_first)
                    self.is_first = False

        parts: Any = None if send is None else Parts(tokenizer, skip_prompt=True, skip_special_tokens=True)
        [ids] = load.write(model, tokenizer, [prompt], max_new_tokens=most, streamer=parts, **sampling).tolist()
        ended = "stop" if ids and ids[-1] in load.ends(model, tokenizer) else "length"
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        if send is None:
            text = tokenizer.decode(ids, skip_special_tokens=True)
            return part(text, ended, "message") | {"usage": usage}
        send(part("", ended), parts.is_first)
        if (asked.get("stream_options") or {}).get("include_usage"):
            send(head | {"choices": [], "usage": usage}, False)
        return {}
