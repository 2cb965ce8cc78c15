"""Distillation from teachers behind ``vllm serve``, under trl's names: `posttrain.rl.algorithms.distillation` with the
defaults of trl's `ServerDistillationTrainer`, and those of its `AsyncDistillationTrainer`, which samples on vLLM
servers meanwhile.

The divergence is that of the `loss_top_k` tokens that a server tells, of the one that was written and, as one token, of
the rest. With several teachers, each row names its own in the column `teacher_id`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from posttrain.core.config import JSONObject, opt, other_default
from posttrain.core.training.preflight import passed_on
from posttrain.rl.algorithms.async_grpo import AsyncArguments, refuse_loop_of_trl
from posttrain.rl.algorithms.distillation import BEHIND_SERVERS, TOP_K, DistillationConfig, DistillationTrainer
from posttrain.rl.online.arguments import SERVER


@dataclass
class ServerDistillationConfig(DistillationConfig):
    """Arguments of `ServerDistillationTrainer`."""

    vllm_server_port: int = opt(8001, "Port of the student's server.", min=1, max=65535, needs=SERVER)
    loss_top_k: int = opt(1, TOP_K, min=0, needs=BEHIND_SERVERS)

    def _problems(self) -> Iterator[str]:
        if not self.teacher_urls:
            yield (
                "the teacher is behind a server, and none is named; set teacher_model_server_url, or several as "
                "teacher_server_urls"
            )


class ServerDistillationTrainer(DistillationTrainer):
    """Trains a student to predict what a teacher behind a server predicts. Arguments: see `DistillationTrainer`."""

    config_class: type[ServerDistillationConfig] = ServerDistillationConfig
    args: ServerDistillationConfig
    tag_names = ("posttrain", "server-distillation")

    def __init__(
        self,
        model: nn.Module | str | None = None,
        args: ServerDistillationConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        super().__init__(**passed_on(locals()))


@dataclass
class AsyncDistillationConfig(AsyncArguments, DistillationConfig):
    """Arguments of `AsyncDistillationTrainer`."""

    beta: float = other_default(DistillationConfig, "beta", 0.0)
    teacher_server_urls: JSONObject = opt(
        None, "{name: address} of the teachers; of several, the column teacher_id of a row names its own."
    )
    loss_temperature: float | None = other_default(
        DistillationConfig, "loss_temperature", 1.0, aliases=("teacher_temperature",)
    )
    loss_top_k: int = opt(8, TOP_K, min=0, needs=BEHIND_SERVERS, aliases=("teacher_top_k",))
    loss_add_tail: bool = opt(True, "Compare the rest of the vocabulary as one token.", aliases=("add_tail_bucket",))

    def _normalize(self) -> None:
        if not self.teacher_urls and self.teacher_model_name_or_path is None:
            self.teacher_server_urls = {"default": "http://localhost:8001"}


class AsyncDistillationTrainer(DistillationTrainer):
    """Trains a student on completions that it samples meanwhile, to predict what its teachers predict. Arguments: see
    `DistillationTrainer`.

    trl's `rollout_worker` and `weight_transfer` raise a ValueError: an engine of your own is passed as `generator`.
    """

    config_class: type[AsyncDistillationConfig] = AsyncDistillationConfig
    args: AsyncDistillationConfig
    tag_names = ("posttrain", "async-distillation")

    def __init__(
        self,
        model: nn.Module | str | None = None,
        args: AsyncDistillationConfig | None = None,
        train_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        rollout_worker: Any = None,
        weight_transfer: Any = None,
        quantization_config: Any = None,
        **others: Any,
    ) -> None:
        refuse_loop_of_trl(rollout_worker=rollout_worker, weight_transfer=weight_transfer)
        super().__init__(**passed_on(locals(), "rollout_worker", "weight_transfer"))
