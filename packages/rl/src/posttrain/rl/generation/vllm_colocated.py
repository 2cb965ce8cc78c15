"""Generates with vLLM in the trainer's process, on the same GPU.

Weights are loaded into vLLM's copy of the model after optimizer steps. With sleep, vLLM frees its memory between
rollouts and loses its weights; they are loaded again before it generates. Tested against a stand-in with the interface
of vLLM's ``LLM``, and against vLLM 0.32 itself on the CPU; not yet verified on a GPU.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from posttrain.core.distributed.environment import local_rank, rank, world_size
from posttrain.core.errors import require
from posttrain.core.models.wrapping import base_model
from posttrain.lm.attention.router_replay import layers_of
from posttrain.rl.generation.protocol import Completions, Pictured, Prompt, Sampling
from posttrain.rl.generation.sampling import prefers_probable, vllm_options
from posttrain.rl.generation.vllm_plugin import refresh_tied_head
from posttrain.rl.generation.weights import PROBE, Weights, Written, any_prompt, check, completions

SHARED_CODE = (
    "vLLM serves this model by transformers' own code, and has replaced how {} is called, which is the trainer's "
    "model's too: its hooks would not run. Use vllm_mode='server', or a model and vllm_model_impl for which vLLM has "
    "code of its own (for models that see it needs torchvision)."
)


class _Request(NamedTuple):
    """The request of one completion, with its own sampling options: processes may be at different turns."""

    prompt: Prompt
    sampling: Sampling
    seed: int


class VLLMColocatedGenerator:
    """Generates with ``vllm.LLM``.

    Args:
        engine: arguments of ``vllm.LLM``; the model's name and the distributed options are added here.
        options: further fields of ``vllm.SamplingParams``.
        sleeps: free memory while nothing is generated.
        group_size: processes, each with a GPU, over which the model is split; they generate jointly.

    Raises:
        ValueError: `group_size` does not divide the processes.
    """

    has_own_weights = reads_images = True
    _model: nn.Module  # that of `sync_weights`

    def __init__(
        self,
        engine: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        sleeps: bool = False,
        group_size: int = 1,
    ) -> None:
        self.engine, self.options = dict(engine or {}), dict(options or {})
        self.sleeps, self.group_size = sleeps, group_size
        if world_size() % group_size:
            raise ValueError(
                f"vllm_tensor_parallel_size={group_size} does not divide the {world_size()} processes, over which "
                "vLLM splits the model. Set a divisor, or vllm_mode='server'."
            )
        self._llm: Any = None
        self._group: Any = None
        self._has_weights = self._in_session = False

    def sync_weights(self, model: nn.Module) -> None:
        """Load the weights into vLLM, then compare log-probabilities of a few tokens. Every process must call it. Raise
        ValueError if vLLM's log-probabilities are not those of `model`.
        """
        if self._llm is None:
            self._llm = self._start(model)
        self._model = model
        self._load()

        prompt = any_prompt(model)
        in_float32 = self.engine.get("dtype", "float32") == "float32"  # by default that of the model
        written = self._write([_Request(prompt, PROBE, 0)]) or []
        check(model, prompt, written[0], True, "the vLLM in this process", in_float32)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """See `Generator`. Weights freed by sleep are loaded again at its beginning."""
        if not self._has_weights:
            self._load()
        self._in_session = True
        try:
            yield
            while self._write(None) is not None:  # the requests of the group's other processes
                pass
        finally:
            self._in_session = False
            if self.sleeps:
                self._llm.sleep(level=2)
                self._has_weights = False

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> Completions:
        """See `Generator.generate`. Log-probabilities are returned if nothing but the temperature changes them."""
        if not self._in_session:
            with self.session():
                return self.generate(prompts, n, sampling, seeds)
        if seeds is None:
            seeds = torch.randint(2**31, (len(prompts) * n,)).tolist()
        rows = [prompt for prompt in prompts for _ in range(n)]
        done = self._write([_Request(row, sampling, seed) for row, seed in zip(rows, seeds, strict=True)]) or []
        return completions(done, with_logps=not (prefers_probable(sampling) or self.options))

    def _start(self, model: nn.Module) -> Any:
        vllm = require("vllm", "vllm", "use_vllm=True")
        self._set_environment()
        if self.group_size > 1:
            starts = range(0, world_size(), self.group_size)
            groups = [list(range(start, start + self.group_size)) for start in starts]
            self._group, _ = torch.distributed.new_subgroups_by_enumeration(groups)
        base = base_model(model)
        settings = {
            "model": base.config._name_or_path,
            "tensor_parallel_size": self.group_size,
            "distributed_executor_backend": "external_launcher",
            "enable_sleep_mode": self.sleeps,
            "seed": rank() // self.group_size,  # the same for all processes of a group
            "logprobs_mode": "processed_logprobs",
            "dtype": str(next(base.parameters()).dtype).removeprefix("torch."),
        }
        calls = {type(module): type(module).__call__ for module in model.modules()}
        llm = vllm.LLM(**settings | self.engine)
        if changed := sorted(kind.__name__ for kind, call in calls.items() if kind.__call__ is not call):
            raise ValueError(SHARED_CODE.format(", ".join(changed)))
        return llm

    def _set_environment(self) -> None:
        """The launcher's variables that vLLM reads, for a single process without a launcher."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its engine is in this process, where the weights are
        if self.engine.get("enable_return_routed_experts"):
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")  # the other one does not return them
        found = {"RANK": rank(), "LOCAL_RANK": local_rank(), "WORLD_SIZE": world_size(), "MASTER_ADDR": "127.0.0.1"}
        if "MASTER_PORT" not in os.environ:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                found["MASTER_PORT"] = free.getsockname()[1]
        for name, value in found.items():
            os.environ.setdefault(name, str(value))

    def _load(self) -> None:
        """Load the policy's weights into vLLM and clear its cache."""
        if self.sleeps:
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()  # memory freed by training is for vLLM
            self._llm.wake_up(tags=["weights"])
        weights = Weights(self._model)  # layer by layer, into the layout of its kernels
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        if weights.device.type == "cpu":
            self._llm.apply_model(refresh_tied_head)
        if self.sleeps:
            self._llm.wake_up(tags=["kv_cache"])
        self._llm.reset_prefix_cache()
        self._has_weights = True

    def _write(self, mine: list[_Request] | None) -> list[Written] | None:
        """The completions that this process requests, or None where it requests no more and no other does.

        Processes that split the model generate for all of them and keep their own.
        """
        parts: list[Any] = [mine] * self.group_size
        place = 0 if self._group is None else torch.distributed.get_rank(self._group)
        if self._group is not None:
            torch.distributed.all_gather_object(parts, mine, group=self._group)
        if all(part is None for part in parts):
            return None
        requests = [request for part in parts for request in part or ()]
        outputs = requests and self._llm.generate(
            [_prompt_of(request) for request in requests],
            sampling_params=[self._params(request) for request in requests],
            use_tqdm=False,
        )
        for request, output in zip(requests, outputs, strict=True):
            if isinstance(request.prompt, Pictured):
                request.prompt.check(output.prompt_token_ids, "The vLLM in this process")
        layers, start = layers_of(self._model), sum(len(part or ()) for part in parts[:place])
        return [_written(output.outputs[0], layers) for output in outputs[start : start + len(mine or ())]]

    def _params(self, request: _Request) -> Any:
        """vLLM's SamplingParams."""
        from vllm import SamplingParams

        own = {"n": 1, "seed": request.seed % 2**63}
        usual = own | vllm_options(request.sampling) | ({} if request.sampling is PROBE else self.options)
        if isinstance(wanted := usual.get("structured_outputs"), dict):
            from vllm.sampling_params import StructuredOutputsParams

            usual["structured_outputs"] = StructuredOutputsParams(**wanted)
        return SamplingParams(**usual)


def _prompt_of(request: _Request) -> dict[str, Any]:
    """vLLM's prompt."""
    if isinstance(request.prompt, Pictured):
        pictures = {"multi_modal_data": {"image": list(request.prompt.images)}} if request.prompt.images else {}
        return {"prompt_token_ids": request.prompt.ids} | pictures
    return {"prompt_token_ids": list(request.prompt)}


def _written(output: Any, layers: Sequence[int] = ()) -> Written:
    """What vLLM wrote; of the experts that it chose, those of `layers`."""
    ids = list(output.token_ids)
    logps = [float(found[token].logprob) for token, found in zip(ids, output.logprobs, strict=True)]
    routes = getattr(output, "routed_experts", None)
    if routes is not None:
        routes = torch.as_tensor(routes).to(torch.int16)[:, list(layers)]
    return Written(ids, logps, output.finish_reason == "stop", routes=routes)
