"""Generates on a separate vLLM server.

Start it with ``VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}'`` or ``trl
vllm-serve`` of trl 1.16. The server of earlier versions of trl works too (`trl_server`).

Completions come over HTTP as token ids. The first process sends weights to the server over NCCL, with vLLM's transfer
engine. Tests use a local HTTP server with the same interface; not yet verified on a GPU.
"""

from __future__ import annotations

import functools
import socket
import urllib.parse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import nn

from posttrain.core.distributed.environment import rank
from posttrain.core.errors import require
from posttrain.rl.generation.protocol import Completions, Sampling
from posttrain.rl.generation.sampling import filters
from posttrain.rl.generation.server import RETRIES, Refused, Server
from posttrain.rl.generation.trl_server import TrlServer
from posttrain.rl.generation.weights import PROBE, Weights, Written, check, completions

CONCURRENCY = 64
"""Concurrent requests."""

PROMPT = "The quick brown fox jumps over the lazy dog."
"""The prompt that checks whether the server has the weights: a text, since some servers accept nothing else."""


class Dialect(Protocol):
    """The HTTP interface of a kind of server.

    Attributes:
        scaled: whether its log-probabilities include the temperature and the filters; None: unknown.
    """

    scaled: bool | None

    def write(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[Written]:
        """`n` completions of each prompt."""
        ...

    def update(self, weights: Weights) -> None:
        """Load `weights` into the server."""
        ...


class VLLMServerGenerator:
    """Generates on a server.

    Args:
        url: such as ``http://host:8000``. timeout: seconds to wait for the server to come up, at the first sync.
        group_port: the port for weights. options: further fields of a request.
        tokenizer: for servers of earlier versions of trl, some of which accept texts only.
        send: ``(weights, server)``, sends weights; by default over NCCL.
    """

    has_own_weights = True

    def __init__(
        self,
        url: str,
        timeout: float = 240.0,
        group_port: int = 51216,
        options: dict[str, Any] | None = None,
        tokenizer: Any = None,
        send: Callable[[Weights, Server], None] | None = None,
    ) -> None:
        self.server, self.timeout, self.group_port = Server(url), timeout, group_port
        self.options, self.tokenizer, self._send = dict(options or {}), tokenizer, send
        self._scaled: bool | None = None

    def sync_weights(self, model: nn.Module) -> None:
        """Send the weights, then compare log-probabilities of a few tokens. Every process must call it.

        Raises:
            ValueError: the server's log-probabilities are not those of `model`.
        """
        dialect, weights = self._dialect, Weights(model)
        if rank() == 0:
            dialect.update(weights)
        elif weights.are_in_pieces:
            for _ in weights:  # all processes help to gather them for the first
                pass
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        who = f"the vLLM server at {self.server.url}"
        prompt = None if self.tokenizer is None else list(self.tokenizer(PROMPT)["input_ids"])
        self._scaled = check(model, self._probe, dialect.scaled, who, prompt)

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> Completions:
        """See `Generator.generate`. Log-probabilities are returned if only the temperature changes them."""
        if seeds is None:
            seeds = torch.randint(2**31, (len(prompts) * n,)).tolist()
        done = self._dialect.write(prompts, n, sampling, seeds)
        plain = not filters(sampling) if self._scaled else sampling.temperature == 1
        return completions(done, with_logps=plain)

    def _probe(self, prompt: list[int]) -> Written:
        return self._dialect.write([prompt], 1, PROBE, [0])[0]

    @functools.cached_property
    def _dialect(self) -> Dialect:
        self.server.wait(self.timeout)
        if self.server.has("/v1/models"):
            return VLLMServer(self.server, self.group_port, self.options, self._send)
        return TrlServer(self.server, self.group_port, self.options, self.tokenizer, self._send)


class VLLMServer:
    """vLLM's OpenAI interface: one request with its own seed for each completion; the prefix cache shares prompts."""

    def __init__(
        self, server: Server, group_port: int, options: dict[str, Any], send: Callable[[Weights, Server], None] | None
    ) -> None:
        self.server, self.options, self._send = server, options, send or _Transfer(group_port)
        try:
            info = server.call("/server_info?config_format=json")["vllm_config"]
        except Refused as error:
            raise ConnectionError(f"{error}. Start it with VLLM_SERVER_DEV_MODE=1 in its environment.") from error
        self.scaled = info["model_config"].get("logprobs_mode", "raw_logprobs") == "processed_logprobs"
        self.name = server.call("/v1/models")["data"][0]["id"]

    def update(self, weights: Weights) -> None:
        """See `Dialect.update`.

        The sender may have a ``connect(server)``, called before the first sync is announced.
        """
        if hasattr(self._send, "connect"):
            self._send.connect(self.server)
        self.server.call("/start_weight_update", {})
        self._send(weights, self.server)
        self.server.call("/finish_weight_update", {})
        self.server.call("/reset_prefix_cache", {}, empty=True)

    def write(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[Written]:
        """See `Dialect.write`."""
        rows = [prompt for prompt in prompts for _ in range(n)]
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return list(pool.map(lambda row, seed: self._complete(row, sampling, seed), rows, seeds))

    def _complete(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Written:
        choice = self.server.call("/v1/completions", self.options | {
            "model": self.name, "prompt": list(prompt), "n": 1, "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "min_p": sampling.min_p or 0.0, "repetition_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop), "stop_token_ids": list(sampling.eos_token_ids),
            "include_stop_str_in_output": True, "seed": seed % 2**63, "logprobs": 0, "return_token_ids": True,
        }, retries=RETRIES)["choices"][0]  # fmt: skip
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"] == "stop"


class _Transfer:
    """Sends weights over NCCL with vLLM's engine: its class's functions before vLLM 0.28, its modules' since."""

    def __init__(self, group_port: int) -> None:
        self.group_port = group_port
        self.group: Any = None

    def connect(self, server: Server) -> None:
        """Create the process group of this process and the server's, once."""
        if self.group is not None:
            return
        require("vllm", "vllm", "use_vllm=True")
        try:
            from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

            trainer_init, packed = NCCLWeightTransferEngine.trainer_init, {}
        except (ImportError, AttributeError):  # since 0.28 it is a function
            from vllm.distributed.weight_transfer import nccl_common

            trainer_init, packed = nccl_common.trainer_init, {"packed": True}
        size = server.call("/get_world_size")["world_size"] + 1
        address = {"master_address": address_towards(server.url), "master_port": self.group_port}
        where = address | {"rank_offset": 1, "world_size": size} | packed
        with ThreadPoolExecutor(1) as pool:  # the server answers when this process has joined
            answer = pool.submit(server.call, "/init_weight_transfer_engine", {"init_info": where})
            self.group = trainer_init(where)
            answer.result()

    def __call__(self, weights: Weights, server: Server) -> None:
        try:
            from vllm.distributed.weight_transfer.nccl_engine import (
                NCCLTrainerSendWeightsArgs,
                NCCLWeightTransferEngine,
            )
        except ImportError:
            from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

            def send() -> None:
                packed_nccl_broadcast_producer(
                    iterator=iter(weights), group=self.group, src=0, post_iter_func=lambda item: item[1]
                )

            packed = {}
        else:

            def send() -> None:
                how = NCCLTrainerSendWeightsArgs(group=self.group, packed=True)
                NCCLWeightTransferEngine.trainer_send_weights(iterator=iter(weights), trainer_args=how)

            packed = {"packed": True}
        told = {
            "names": [name for name, _, _ in weights.facts],
            "dtype_names": [str(dtype).removeprefix("torch.") for _, dtype, _ in weights.facts],
            "shapes": [list(shape) for *_, shape in weights.facts],
        }
        with ThreadPoolExecutor(1) as pool:  # the server answers when it has received the weights sent meanwhile
            answer = pool.submit(server.call, "/update_weights", {"update_info": told | packed})
            send()
            answer.result()


def address_towards(url: str) -> str:
    """This machine's address as the server at `url` sees it. Sends nothing."""
    parts = urllib.parse.urlparse(url)
    kind, _, _, _, there = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as way:
        way.connect(there)
        return way.getsockname()[0]
