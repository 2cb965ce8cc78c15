"""Generates on separate vLLM servers.

Start each with ``VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}'``, or with the
backend ``gloo`` where there is no GPU. ``trl vllm-serve`` of trl 1.16 starts such a server too.

Completions come over HTTP as token ids. The first process sends weights (`transfer`). Tested against vLLM 0.32 on the
CPU; not yet verified on a GPU.
"""

from __future__ import annotations

import base64
import functools
import io
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from posttrain.core.distributed.environment import rank
from posttrain.lm.attention.router_replay import layers_of
from posttrain.rl.generation.protocol import NO_IMAGES, Completions, Pictured, Prompt, Sampling
from posttrain.rl.generation.sampling import prefers_probable, vllm_options
from posttrain.rl.generation.server import RETRIES, Refused, Server, is_passing
from posttrain.rl.generation.transfer import NAME, AdapterFolder, Folder, Gloo, Nccl, Transport, everywhere, version_of
from posttrain.rl.generation.weights import PROBE, AdapterWeights, Weights, Written, any_prompt, check, completions

logger = logging.getLogger(__name__)

FRESH = "default"
"""What a vLLM server calls the weights that it was started with."""
FORBIDDEN, UNKNOWN = 403, 404
NO_VERSIONS = (
    "The vLLM server at %s does not say which weights wrote a token: all tokens of a completion count as written by "
    "those with which it began. Start it with --enable-scale-out to know."
)
NO_ROUTES = (
    "router_replay=True needs the experts chosen in sampling, which the vLLM server at {} does not return. Start it "
    "with --enable-scale-out and --enable-return-routed-experts, and VLLM_USE_V2_MODEL_RUNNER=1 in its environment."
)
ATTEMPTS = 3
"""Times that weights are sent, if a server is lost meanwhile and comes back."""
CONCURRENCY = 256
"""Requests under way at each server; vLLM itself decides how many of them it works on."""


class VLLMServerGenerator:
    """Generates on servers.

    Args:
        url: such as ``http://host:8000``; several with commas between them share the prompts.
        timeout: seconds to wait for a server to come up, at the first sync.
        group_port: the port for weights. options: further fields of a request.
        transport: sends weights; by default as the servers were started to receive them.
        folder: where the servers read weights instead, see `transfer.Folder`.
        request_timeout: seconds within which a server must answer a request.
        in_flight: weights are sent while completions are written, which go on under them.
        with_routes: ask for the experts that a mixture chose.

    Attributes:
        version: a number for the weights of the next sync.
    """

    has_own_weights = reads_images = is_concurrent = True
    version = 0

    def __init__(
        self,
        url: str,
        timeout: float = 240.0,
        group_port: int = 51216,
        options: dict[str, Any] | None = None,
        transport: Transport | None = None,
        folder: str | None = None,
        request_timeout: float = 1800.0,
        in_flight: bool = False,
        with_routes: bool = False,
    ) -> None:
        self.updates_in_flight, self.with_routes = in_flight, with_routes
        self._versions: dict[int, int] = {}
        self.servers = [Server(one.strip(), request_timeout) for one in url.split(",")]
        self.timeout, self.group_port, self.folder = timeout, group_port, folder
        self.options, self._transport = dict(options or {}), transport
        self._syncs = self._found_right = 0

    def sync_weights(self, model: nn.Module) -> None:
        """Send the weights, then compare log-probabilities of a few tokens. Every process must call it.

        Raises:
            ValueError: a server's log-probabilities are not those of `model`.
            ConnectionError: a server does not come up within the time set.
        """
        for left in reversed(range(ATTEMPTS)):
            for server in self.servers:
                server.wait(self.timeout)
            if (error := self._try_sync(model)) is None:
                return
            if not left:
                raise error
            logger.warning("A vLLM server was lost while it got weights, and is waited for: %s", error)

    def _try_sync(self, model: nn.Module) -> Exception | None:
        """The error of a server that was lost meanwhile, if one was."""
        written: dict[Server, Written] = {}
        error = self._lost_in(lambda: self._send_weights(model), model)
        # Servers that were found right twice would answer after all that they write at present.
        skips = error is None and self.updates_in_flight and self._found_right > 1 and self._api.is_writing
        if error is None and _greatest(0 if skips else 1, model):
            error = self._lost_in(lambda: written.update(self._probe(model)), model)
            error = error or self._lost_in(lambda: self._check(model, written), model)
            self._found_right += 1
        self._found_right = self._found_right if error is None else 0
        return error

    def _send_weights(self, model: nn.Module) -> None:
        """The first process sends them, and the others help to gather them."""
        weights = self._weights_of(model)
        self._syncs += 1
        self._versions[self._syncs] = self.version
        try:
            if rank() == 0:
                self._update(weights)
        finally:
            if weights.are_in_pieces:
                weights.gather_rest()

    def _weights_of(self, model: nn.Module) -> Weights | AdapterWeights:
        """What is sent of `model`: an adapter as such, if the servers take adapters and the folder is there."""
        if self._transport is None:
            self._transport = self._make_transport(model)
        is_adapter = isinstance(self._transport, AdapterFolder)
        self._api.has_whole_weights = not is_adapter
        self._api.layers = layers_of(model) if self.with_routes else None
        if is_adapter:
            self._api.names = dict.fromkeys(self._api.names, NAME)
        return AdapterWeights(model) if is_adapter else Weights(model)

    def _update(self, weights: Any) -> None:
        """Load `weights` into the servers. They write nothing meanwhile.

        In flight, they keep what they have begun, and read it again with the new weights before they go on.
        """
        transport, kind = self._transport, "adapter" if isinstance(weights, AdapterWeights) else "weights"
        assert transport is not None  # `_weights_of`
        on_cpu = self._api.started["--device"] == "cpu"
        if on_cpu and isinstance(transport, Folder) and weights.base.config.tie_word_embeddings:
            raise ValueError(
                "vLLM on the CPU keeps an output head that is tied to the embedding as it was when it reads weights "
                'from a folder. Start the server with --weight-transfer-config \'{"backend": "gloo"}\', and leave '
                "vllm_weight_folder out."
            )
        everywhere(self.servers, f"/pause?mode={'keep' if self.updates_in_flight else 'wait'}", {})
        try:
            transport.send(weights, self.servers, f"posttrain-{kind}-{self._syncs}")
            running = "?reset_running_requests=true" if self.updates_in_flight else ""
            everywhere(self.servers, f"/reset_prefix_cache{running}", {})
        finally:
            everywhere(self.servers, "/resume", {})

    def _make_transport(self, model: nn.Module) -> Transport:
        if self.folder is not None:
            takes_it = AdapterWeights.are_taken(model, self._api.started["--max-lora-rank"])
            return AdapterFolder(self.folder) if takes_it else Folder(self.folder)
        backend = self._api.started["--weight-transfer-config"]
        if backend == "nccl":
            return Nccl(self.group_port)
        if backend == "gloo":
            return Gloo(self.group_port, self.timeout)
        raise ValueError(
            f"The vLLM server at {self.servers[0].url} was started with weight transfer {backend or 'off'}. "
            'Start it with --weight-transfer-config \'{"backend": "nccl"}\', without a GPU "gloo"; or set '
            "vllm_weight_folder."
        )

    def _lost_in(self, call: Callable[[], None], model: nn.Module) -> Exception | None:
        """The error of a server that was lost during `call`, in this process or another one. Others are raised."""
        error: Exception | None = None
        try:
            call()
        except Exception as found:
            error = found
        own = 0
        if error is not None:  # that of a server that is gone, or that was started anew meanwhile
            is_lost = is_passing(error) or (self._syncs > 1 and any(map(is_fresh, self.servers)))
            own = 1 if is_lost else 2
        worst = _greatest(own, model)
        if worst == 2:
            others = RuntimeError("Another process could not send its weights to the vLLM servers; it says why.")
            raise error if own == 2 and error is not None else others
        return (error or ConnectionError("Another process has lost a vLLM server.")) if worst else None

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> Completions:
        """See `Generator.generate`. Log-probabilities are returned if nothing but the temperature changes them. The
        completions of a prompt are one request, and their seeds count up from that of the first. Raise ValueError if a
        prompt shows images, and the server does not take them or reads them otherwise.
        """
        if seeds is None:
            seeds = torch.randint(2**31, (len(prompts) * n,)).tolist()
        done = self._api.write(prompts, n, sampling, seeds)
        plain = not (prefers_probable(sampling) or self.options) if self._api.is_scaled else sampling.temperature == 1
        found = completions(done, with_logps=plain)
        versions = found.versions and [[self._versions[sync] for sync in row] for row in found.versions]
        return replace(found, versions=versions)

    def _prompt(self, model: nn.Module) -> list[int]:
        prompt, longest = any_prompt(model), self._api.started["--max-model-len"]
        return prompt if longest is None else prompt[: longest - PROBE.max_new_tokens]

    def _probe(self, model: nn.Module) -> dict[Server, Written]:
        """What each server writes with its weights."""
        prompt = self._prompt(model)
        return {server: self._api.write_on(server, prompt, PROBE, 0) for server in self.servers}

    def _check(self, model: nn.Module, written: Mapping[Server, Written]) -> None:
        """Asks no server: of sharded weights, this is done by all processes together."""
        prompt, started = self._prompt(model), self._api.started
        for server, done in written.items():
            in_float32, who = started["--dtype"] == "torch.float32", f"the vLLM server at {server.url}"
            check(model, prompt, done, self._api.is_scaled, who, in_float32)

    @functools.cached_property
    def _api(self) -> VLLMServers:
        for server in self.servers:
            if not server.has("/v1/models"):
                raise ValueError(
                    f"The server at {server.url} has no /v1/models, which vLLM's has. Start it with vllm serve or "
                    "trl vllm-serve of trl 1.16 or newer."
                )
        return VLLMServers(self.servers, self.options, self.updates_in_flight)


class VLLMServers:
    """vLLM's OpenAI interface: one request for the completions of a prompt, at the server with the least to do.

    Args:
        options: further fields of a request.
        says_versions: ask which weights wrote each token.

    Attributes:
        started: see `started_with`.
        names: of the model that is asked for, by the server's address.
        has_whole_weights: the servers were sent weights, and no adapter.
        layers: whose experts are asked for; None: of no layer.
    """

    layers: Sequence[int] | None = None

    def __init__(self, servers: Sequence[Server], options: dict[str, Any], says_versions: bool) -> None:
        self.servers, self.options, self._says_versions = servers, options, says_versions
        infos = [started_with(server) for server in servers]
        if any(info != infos[0] for info in infos):
            raise ValueError(f"The vLLM servers were started with different options, {infos}. Start them alike.")
        self.started, self.has_whole_weights = infos[0], False
        self.names = {server.url: server.call("/v1/models")["data"][0]["id"] for server in servers}
        first = rank() % len(servers)  # processes begin at different ones
        self._writing = dict.fromkeys([*servers[first:], *servers[:first]], 0)  # how many completions for this process
        self._lock = threading.Lock()

    @property
    def is_scaled(self) -> bool:
        """Whether their log-probabilities are those of logits that the temperature divides."""
        return bool(self.started["--logprobs-mode"] == "processed_logprobs")

    @property
    def is_writing(self) -> bool:
        """Whether completions are under way, and no server has been lost."""
        return len(self._writing) == len(self.servers) and any([*self._writing.values()])

    def write(self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seeds: Sequence[int]) -> list[Written]:
        """`n` completions of each prompt."""
        done: list[list[Written] | None] = [None] * len(prompts)
        while left := [place for place, group in enumerate(done) if group is None]:
            given = [(prompts[place], n, sampling, seeds[place * n]) for place in left]
            if len(left) == 1:  # a turn of an agent
                asked = [self._complete(*given[0])]
            else:
                with ThreadPoolExecutor(min(len(left), CONCURRENCY * len(self.servers))) as pool:
                    asked = list(pool.map(self._complete, *zip(*given, strict=True)))
            lost = [(server, group) for server, group in asked if isinstance(group, ConnectionError)]
            unsure = {server for server, group in asked if not _say_versions(group)}
            lost += [(server, Restarted(server)) for server in unsure if server in self._writing and is_fresh(server)]
            for server, why in lost:
                self._leave_out(server, why)
            for place, (server, group) in zip(left, asked, strict=True):
                if server in self._writing and not isinstance(group, ConnectionError):
                    done[place] = group
        return [one for group in done for one in group or ()]

    def _leave_out(self, server: Server, why: ConnectionError) -> None:
        """Ask it no more until the next sync. Raise ConnectionError if no other is left."""
        self._writing.pop(server, None)
        if not self._writing:
            raise ConnectionError(
                f"{why}. No vLLM server is left that has the trainer's weights. Start it again, and resume the run "
                "from its last checkpoint."
            ) from why
        logger.warning("%s: the other servers do its part until the next sync.", why)

    def write_on(self, server: Server, prompt: Prompt, sampling: Sampling, seed: int) -> Written:
        """A completion by `server`, which is in use again if it was lost."""
        done = self._ask(server, prompt, 1, sampling, seed)[0]
        self._writing.setdefault(server, 0)
        return done

    def _complete(
        self, prompt: Prompt, n: int, sampling: Sampling, seed: int
    ) -> tuple[Server, list[Written] | ConnectionError]:
        """(the server that was asked, what it wrote or why it could not)."""
        with self._lock:
            if not self._writing:
                raise ConnectionError("No vLLM server is left that has the trainer's weights.")
            server = min(self._writing, key=self._writing.__getitem__)
            self._writing[server] += n
        try:
            return server, self._ask(server, prompt, n, sampling, seed)
        except ConnectionError as error:
            if not is_passing(error) and not is_fresh(server):
                raise
            return server, error
        finally:
            with self._lock:
                if server in self._writing:
                    self._writing[server] -= n

    def _ask(self, server: Server, prompt: Prompt, n: int, sampling: Sampling, seed: int) -> list[Written]:
        if self._says_versions or self.layers is not None or isinstance(prompt, Pictured):
            try:
                return self._ask_with_versions(server, prompt, n, sampling, seed)
            except Refused as error:
                if error.code not in (FORBIDDEN, UNKNOWN):
                    raise
                if isinstance(prompt, Pictured) or self.layers is not None:
                    why = NO_IMAGES if isinstance(prompt, Pictured) else NO_ROUTES
                    raise ValueError(why.format(server.url)) from error
                self._says_versions = False
                logger.warning(NO_VERSIONS, server.url)
        assert not isinstance(prompt, Pictured)  # whose server answers, or refuses it
        body = self._drawing(server, n, sampling, seed) | {"prompt": list(prompt), "return_token_ids": True}
        return [
            Written(one["token_ids"], one["logprobs"]["token_logprobs"], one["finish_reason"] == "stop")
            for one in _choices(server.call("/v1/completions", body, retries=RETRIES))
        ]

    def _ask_with_versions(
        self, server: Server, prompt: Prompt, n: int, sampling: Sampling, seed: int
    ) -> list[Written]:
        """As `_ask`, by the interface that says which weights wrote each token, and which experts read it."""
        drawing = self._drawing(server, n, sampling, seed)
        body = _shown(prompt) | {"model": drawing.pop("model"), "sampling_params": drawing}
        answer = server.call("/inference/v1/generate", body, retries=RETRIES)
        if isinstance(prompt, Pictured):
            prompt.check(answer.get("prompt_token_ids"), f"The vLLM server at {server.url}")
        choices = _choices(answer)
        if self.has_whole_weights and any(span["version"] == FRESH for choice in choices for span in _spans(choice)):
            raise Restarted(server)  # and it may have got the weights since, so that it is not `is_fresh`
        if self.layers is not None and any(choice.get("routed_experts") is None for choice in choices):
            raise ValueError(NO_ROUTES.format(server.url))
        return [_written(choice, self.layers) for choice in choices]

    def _drawing(self, server: Server, n: int, sampling: Sampling, seed: int) -> dict[str, Any]:
        """The fields of a request that say by which model, and how, tokens are drawn."""
        own = {"model": self.names[server.url], "n": n, "seed": seed % 2**62}
        return ({} if sampling is PROBE else self.options) | own | vllm_options(sampling)


def _shown(prompt: Prompt) -> dict[str, Any]:
    """The fields of a request that say what the prompt is; with images, the server answers with what it has read."""
    if not isinstance(prompt, Pictured):
        return {"token_ids": list(prompt)}
    parts = [{"type": "image_url", "url": url} for url in prompt.urls]
    return {"token_ids": prompt.ids, "content_parts": parts, "return_token_ids": True}


def _say_versions(group: list[Written] | ConnectionError) -> bool:
    """Whether completions say which weights wrote them, so that no others can have."""
    return not isinstance(group, ConnectionError) and all(one.syncs is not None for one in group)


def _choices(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(answer["choices"], key=lambda choice: choice["index"])


def _spans(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Which weights wrote which tokens of a completion, where the server says so."""
    return choice.get("weight_versions") or []


def _written(choice: dict[str, Any], layers: Sequence[int] | None) -> Written:
    logps = [token["logprob"] for token in choice["logprobs"]["content"]]
    numbers = [(span["version"].rpartition("-")[2], span["end"] - span["start"]) for span in _spans(choice)]
    syncs = None
    if numbers and all(number.isdecimal() for number, _ in numbers):  # else of adapters, which are not counted
        syncs = [int(number) for number, length in numbers for _ in range(length)]
    routes = None
    if layers is not None:
        whole = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
        routes = torch.as_tensor(whole).to(torch.int16)[:, list(layers)]
    return Written(choice["token_ids"], logps, choice["finish_reason"] == "stop", syncs, routes)


def started_with(server: Server) -> dict[str, Any]:
    """Those of a server's options that its client must know."""
    try:
        info = server.call("/server_info?config_format=json")["vllm_config"]
    except Refused as error:
        raise ConnectionError(f"{error}. Start it with VLLM_SERVER_DEV_MODE=1 in its environment.") from error
    return {
        "--logprobs-mode": info["model_config"].get("logprobs_mode", "raw_logprobs"),
        "--device": (info.get("device_config") or {}).get("device_type"),
        "--dtype": info["model_config"].get("dtype"),
        "--max-model-len": info["model_config"].get("max_model_len"),
        "--weight-transfer-config": (info.get("weight_transfer_config") or {}).get("backend"),
        "--max-lora-rank": (info.get("lora_config") or {}).get("max_lora_rank"),
    }


def _greatest(value: int, model: nn.Module) -> int:
    """The greatest `value` of all processes."""
    if not torch.distributed.is_initialized():
        return value
    everyone = torch.tensor(value, device=next(model.parameters()).device)
    torch.distributed.all_reduce(everyone, torch.distributed.ReduceOp.MAX)
    return int(everyone)


class Restarted(ConnectionError):
    """A server has other weights than it was sent."""

    def __init__(self, server: Server) -> None:
        super().__init__(f"The vLLM server at {server.url} was started anew, and has lost the weights it was sent")


def is_fresh(server: Server) -> bool:
    """Whether `server` has the weights that it was started with."""
    try:
        return version_of(server) == FRESH
    except ConnectionError:  # it has gone since it answered
        return True
