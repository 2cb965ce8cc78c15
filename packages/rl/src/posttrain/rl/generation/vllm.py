"""Generation on a vLLM server of its own: ``VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}'``.

Completions come over vLLM's OpenAI interface as token ids. Weights go from the first process to the server over NCCL, by vLLM's
own transfer engine. The HTTP interface is tested against a local server that speaks it; not yet verified on a GPU.
"""

from __future__ import annotations

import json
import logging
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from posttrain.core.distributed.environment import rank
from posttrain.core.errors import require
from posttrain.core.models import base_model, is_peft_model, unwrap
from posttrain.rl.generation.protocol import Completions, Sampling
from posttrain.rl.generation.sampling import filters
from posttrain.rl.generation.transformers import evaluating

logger = logging.getLogger(__name__)

CONCURRENCY = 64
"""Requests under way at a time."""
LARGEST_GAP = 0.1
"""Mean difference of log-probabilities after a sync from which the server is taken to have other weights."""

Named = list[tuple[str, torch.Tensor]]


class VLLMServerGenerator:
    """Asks a server for each completion, with a seed of its own; the server's prefix cache reads a prompt once.

    Args:
        url: such as ``http://host:8000``. timeout: seconds to wait for the server to come up, at the first sync.
        group_port: on which weights are sent. options: further fields of a request.
        send: ``(names and weights, client)``, sends weights; by default over NCCL.
    """

    def __init__(
        self,
        url: str,
        timeout: float = 240.0,
        group_port: int = 51216,
        options: dict[str, Any] | None = None,
        send: Callable[[Named, VLLMServerGenerator], None] | None = None,
    ) -> None:
        self.url, self.timeout, self.group_port, self.options = (
            url.rstrip("/"),
            timeout,
            group_port,
            dict(options or {}),
        )
        self._send = send or _Transfer()
        self._info: dict[str, Any] | None = None
        self._name: str | None = None

    def sync_weights(self, model: nn.Module) -> None:
        """Send the weights, then compare log-probabilities of a few tokens. Every process must call it.

        Raises:
            ValueError: the server's log-probabilities are not those of `model`.
        """
        if self._info is None:
            self._wait()
            self._info = self.call("/server_info?config_format=json")["vllm_config"]
            self._name = self.call("/v1/models")["data"][0]["id"]
        weights = list(named_weights(model))
        if rank() == 0:
            self.call("/start_weight_update", {})
            self._send(weights, self)
            self.call("/finish_weight_update", {})
            self.call("/reset_prefix_cache", {}, empty=True)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        self.check(model)

    @torch.no_grad()
    def check(self, model: nn.Module) -> float:
        """The mean difference between the log-probabilities of the server and of `model`, of 8 tokens behind a prompt."""
        size = base_model(model).config.vocab_size
        prompt = [(37 * place + 5) % size for place in range(8)]
        ids, logps, _ = self._complete(prompt, Sampling(8, top_k=1), 0)
        device = next(model.parameters()).device
        with evaluating(model):
            logits = model(input_ids=torch.tensor([prompt + ids], device=device)).logits[0, len(prompt) - 1 : -1]
        mine = logits.float().log_softmax(-1).gather(1, torch.tensor(ids, device=device)[:, None]).squeeze(1)
        gap = float((mine.cpu() - torch.tensor(logps)).abs().mean())
        if self._mode == "raw_logprobs" and not gap < LARGEST_GAP:
            raise ValueError(
                f"After the weights were sent, log-probabilities of the vLLM server at {self.url} differ from the trainer's by "
                f"{gap:.2g} on average: it has other weights, or another model. Serve the model that is trained."
            )
        return gap

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> Completions:
        """See `Generator.generate`. Log-probabilities are told where vLLM gives them under the temperature alone."""
        if seeds is None:
            seeds = torch.randint(2**31, (len(prompts) * n,)).tolist()
        rows = [prompt for prompt in prompts for _ in range(n)]
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            done = list(pool.map(lambda row, seed: self._complete(row, sampling, seed), rows, seeds))
        plain = sampling.temperature == 1 if self._mode == "raw_logprobs" else not filters(sampling)
        logps = [logps for _, logps, _ in done] if plain else None
        return Completions([ids for ids, _, _ in done], logps, [ended for *_, ended in done])

    @property
    def _mode(self) -> str:
        return self._info["model_config"].get("logprobs_mode", "raw_logprobs")

    def _complete(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> tuple[list[int], list[float], bool]:
        choice = self.call("/v1/completions", self.options | {
            "model": self._name, "prompt": list(prompt), "n": 1, "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "min_p": sampling.min_p or 0.0, "repetition_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop), "stop_token_ids": list(sampling.eos_token_ids),
            "include_stop_str_in_output": True, "seed": seed % 2**63, "logprobs": 0, "return_token_ids": True,
        })["choices"][0]  # fmt: skip
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"] == "stop"

    def call(self, path: str, body: dict[str, Any] | None = None, empty: bool = False) -> Any:
        """GET `path`, or POST `body` to it; the answer, read as JSON unless it is `empty`.

        Raises:
            ConnectionError: the server cannot be reached, or refuses.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as answer:
                return None if empty else json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            said = error.read()[:500].decode(errors="replace")
            hint = "; start it with VLLM_SERVER_DEV_MODE=1 in its environment" if error.code == 404 else ""
            raise ConnectionError(f"The vLLM server answered {path} with {error.code}: {said}{hint}") from error
        except urllib.error.URLError as error:
            raise ConnectionError(f"The vLLM server at {self.url} cannot be reached: {error.reason}") from error

    def _wait(self) -> None:
        until = time.monotonic() + self.timeout
        while True:
            try:
                return self.call("/health", empty=True)
            except ConnectionError:
                if time.monotonic() > until:
                    raise
                time.sleep(min(2.0, self.timeout / 10))


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names, as the model below all adapters has them, and whole weights, with adapters merged into them."""
    merges = is_peft_model(model)
    if merges:
        unwrap(model).merge_adapter()
    try:
        for name, weight in base_model(model).named_parameters():
            if "lora_" in name:
                continue
            weight = weight.detach()
            weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            yield name.replace(".base_layer", ""), weight.clone() if merges else weight
    finally:
        if merges:
            unwrap(model).unmerge_adapter()


class _Transfer:
    """Weights over NCCL, by vLLM's engine. Not yet verified on a GPU."""

    def __init__(self) -> None:
        self.group: Any = None

    def __call__(self, weights: Named, client: VLLMServerGenerator) -> None:
        require("vllm", "vllm", "use_vllm=True")
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

        with ThreadPoolExecutor(1) as pool:  # the server answers when it has received what is sent meanwhile
            if self.group is None:
                host = socket.gethostbyname(socket.gethostname())
                size = client.call("/get_world_size")["world_size"] + 1
                where = {"master_address": host, "master_port": client.group_port, "rank_offset": 1, "world_size": size}
                answer = pool.submit(client.call, "/init_weight_transfer_engine", {"init_info": where})
                self.group = NCCLWeightTransferEngine.trainer_init(where)
                answer.result()
            told = {
                "names": [name for name, _ in weights],
                "dtype_names": [str(weight.dtype).removeprefix("torch.") for _, weight in weights],
                "shapes": [list(weight.shape) for _, weight in weights],
                "packed": True,
            }
            answer = pool.submit(client.call, "/update_weights", {"update_info": told})
            how = NCCLTrainerSendWeightsArgs(group=self.group, packed=True)
            NCCLWeightTransferEngine.trainer_send_weights(iterator=iter(weights), trainer_args=how)
            answer.result()
