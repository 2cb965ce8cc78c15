"""Client of the server that ``trl vllm-serve`` started before trl 1.16.

Its endpoints are ``/generate/``, ``/init_communicator/`` and ``/update_named_param/``. A call of `TrlServer.write` is
one request with one seed for all completions. The server does not report why a completion ended or how it scales
log-probabilities: the tokens show the first, the check after each weight sync the second. Not yet verified on a GPU.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from posttrain.core.data.samplers import mix
from posttrain.core.errors import require
from posttrain.rl.generation.protocol import NO_IMAGES, Pictured, Prompt, Sampling
from posttrain.rl.generation.server import RETRIES, Refused, Server
from posttrain.rl.generation.transformers import ends_with_stop
from posttrain.rl.generation.weights import PROBE, Weights, Written

UNPROCESSABLE = 422


class TrlServer:
    """See `posttrain.rl.generation.vllm.Dialect`.

    Args:
        options: further fields of vLLM's SamplingParams; ``structured_outputs`` with a ``regex`` among them.
        tokenizer: decodes prompts for servers that accept texts only.
        send: ``(weights, server)``, sends weights; by default over NCCL.
    """

    scaled: bool | None = None
    longest: int | None = None
    in_float32 = is_writing = False

    def __init__(
        self,
        server: Server,
        group_port: int,
        options: dict[str, Any],
        tokenizer: Any,
        send: Callable[[Weights, Server], None] | None = None,
    ) -> None:
        self.server, self.tokenizer, self._send = server, tokenizer, send or _Broadcast(group_port)
        self.options = dict(options)
        self.regex = (self.options.pop("structured_outputs", None) or {}).get("regex")
        self._reads_ids = True

    def write_on(self, server: Server, prompt: Prompt, sampling: Sampling, seed: int) -> Written:
        """See `Dialect.write_on`."""
        return self.write([prompt], 1, sampling, [seed])[0]

    def weights_of(self, model: torch.nn.Module) -> Weights:
        """See `Dialect.weights_of`."""
        return Weights(model)

    def update(self, weights: Weights, number: int) -> None:
        """See `Dialect.update`."""
        self._send(weights, self.server)
        self.server.call("/reset_prefix_cache/", {}, empty=True)

    def write(self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seeds: Sequence[int]) -> list[Written]:
        """See `Dialect.write`.

        Raises:
            ValueError: the server accepts texts only and would tokenize a prompt differently, or a prompt shows images.
        """
        plain = [list(prompt) for prompt in prompts if not isinstance(prompt, Pictured)]
        if len(plain) < len(prompts):
            raise ValueError(NO_IMAGES.format(self.server.url))
        regex, options = (None, {}) if sampling is PROBE else (self.regex, self.options)
        request = {
            "n": n,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p or 0.0,
            "logprobs": 0,
            "repetition_penalty": sampling.repetition_penalty,
            # the new and the old name
            "structured_outputs_regex": regex,
            "guided_decoding_regex": regex,
            "generation_kwargs": options
            | {
                "seed": mix(*seeds) % 2**31,
                "stop": list(sampling.stop),
                "stop_token_ids": list(sampling.eos_token_ids),
                "include_stop_str_in_output": True,
            },
        }
        answer = self._generate(plain, request)
        ids = [list(row) for row in answer["completion_ids"]]
        logps: list[Any] = [[_plain(value) for value in row] for row in answer.get("logprobs") or ()]
        ended = [self._has_ended(row, sampling) for row in ids]
        return list(zip(ids, logps or [None] * len(ids), ended, strict=True))

    def _generate(self, prompts: list[list[int]], request: dict[str, Any]) -> dict[str, Any]:
        if self._reads_ids:
            try:
                return self.server.call("/generate/", {"prompts": prompts} | request, retries=RETRIES)
            except Refused as error:
                if error.code != UNPROCESSABLE or self.tokenizer is None:
                    raise
                self._reads_ids = False
        texts = [self._text(prompt) for prompt in prompts]
        return self.server.call("/generate/", {"prompts": texts} | request, retries=RETRIES)

    def _text(self, prompt: list[int]) -> str:
        """The text that the server, which adds special tokens, tokenizes as `prompt`."""
        has_first = prompt[0] == self.tokenizer.bos_token_id
        for tokens in (prompt, prompt[1:]) if has_first else (prompt,):
            text = self.tokenizer.decode(tokens)
            if list(self.tokenizer(text)["input_ids"]) == prompt:
                return text
        raise ValueError(
            f"The server at {self.server.url} accepts texts only, and no text gives the tokens of {text!r}. Use the "
            "server of a newer trl, or vLLM's own: vllm serve."
        )

    def _has_ended(self, ids: list[int], sampling: Sampling) -> bool:
        by_itself = len(ids) < sampling.max_new_tokens or (ids and ids[-1] in sampling.eos_token_ids)
        if by_itself or not (sampling.stop and self.tokenizer is not None):
            return bool(by_itself)
        return ends_with_stop(self.tokenizer, ids, sampling.stop)


def _plain(value: Any) -> float:
    """A log-probability; the first of a list of the best tokens' ones."""
    value = value[0] if isinstance(value, list) else value
    return float("nan") if value is None else float(value)


class _Broadcast:
    """Sends weights over NCCL, one by one, from the rank after the server's."""

    def __init__(self, group_port: int) -> None:
        self.group_port = group_port
        self.communicator: Any = None
        self.rank = 0

    def __call__(self, weights: Weights, server: Server) -> None:
        if self.communicator is None:
            self._join(server, weights.device)
        for name, weight in weights:
            server.call(
                "/update_named_param/",
                {"name": name, "dtype": str(weight.dtype), "shape": list(weight.shape)},
                empty=True,
            )
            self.communicator.broadcast(weight.contiguous(), src=self.rank)
            self.communicator.group.barrier()

    def _join(self, server: Server, device: torch.device) -> None:
        require("vllm", "vllm", "use_vllm=True")
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        if server.has("/get_world_size/"):
            self.rank = server.call("/get_world_size/")["world_size"]
        else:
            self.rank = server.call("/get_tensor_parallel_size/")["tensor_parallel_size"]
        request = {"host": "0.0.0.0", "port": self.group_port, "world_size": self.rank + 1}
        request["client_device_uuid"] = str(torch.cuda.get_device_properties(device).uuid)
        server.call("/init_communicator/", request, empty=True)
        host = urllib.parse.urlparse(server.url).hostname
        group = StatelessProcessGroup.create(host=host, port=self.group_port, rank=self.rank, world_size=self.rank + 1)
        self.communicator = PyNcclCommunicator(group, device=device)
