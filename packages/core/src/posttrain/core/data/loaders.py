"""The data loaders of a trainer: made of its datasets, or taken from a subclass that makes its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from posttrain.core.data import pipeline, workers

if TYPE_CHECKING:
    from posttrain.core.trainer import Trainer


class Loaders:
    """Makes the loaders of the trainer that owns it, and keeps those whose workers persist.

    Attributes:
        kept: ``{key: (dataset, loader)}``.
    """

    def __init__(self, owner: Trainer) -> None:
        self.owner = owner
        self.kept: dict[str, tuple[Any, pipeline.Loader]] = {}

    def make(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any, is_training: bool, key: str | None
    ) -> torch.utils.data.DataLoader[Any]:
        """The loader of `dataset`; see `Trainer.make_dataloader`."""
        owner, args, dist = self.owner, self.owner.args, self.owner.dist
        read, kept = dataset, self.kept.get(key or "")
        if kept is not None and kept[0] is dataset:
            return kept[1]
        if description == "Evaluation" and args.limit_eval_batches is not None:
            dataset = pipeline.first_rows(dataset, args.limit_eval_batches * batch_size * dist.world_size)
        sampler = sampler_fn(dataset) if sampler_fn is not None and pipeline.has_length(dataset) else None
        if is_training and args.max_batch_tokens is not None:
            sampler = pipeline.token_batches(
                dataset, owner.row_lengths, args.max_batch_tokens, owner.data_seed, dist.world_size
            )
        dataset, collator = owner.without_unused_columns(dataset, owner.data_collator, description)
        limits, device_type = owner.id_limits(), dist.device.type
        if device_type == "cpu":  # an unknown id raises there; elsewhere it ends the process
            limits = {name: n for name, n in limits.items() if name == "labels_per_token"}
        loader = pipeline.build_loader(
            dataset,
            is_training=is_training,
            batch_size=batch_size,
            collate_fn=collator,
            sampler=sampler,
            args=args,
            seed=owner.data_seed,
            rank=dist.rank,
            world_size=dist.world_size,
            device_type=device_type,
            limits=limits,
        )
        if key is not None and args.dataloader_persistent_workers:  # its workers are worth keeping
            self.kept[key] = (read, loader)
        return loader

    def adopt(self, loader: Any, is_training: bool = True) -> Any:
        """`loader` with a position and a part for each process; see `posttrain.core.data.pipeline.adopt`."""
        dist, seed = self.owner.dist, self.owner.data_seed
        return pipeline.adopt(loader, rank=dist.rank, world_size=dist.world_size, seed=seed, is_training=is_training)

    def end_workers(self, loader: Any) -> None:
        """No process reads any more for `loader`, nor for those that are kept."""
        for reads in [loader, *(kept for _, kept in self.kept.values())]:
            reads.end_workers()

    @contextlib.contextmanager
    def ending_workers(self, loader: pipeline.Loader, may_return: bool) -> Iterator[None]:
        """After this context no process reads for `loader`, unless it is kept and the next evaluation of this training
        will use it (`may_return`)."""
        try:
            with workers.explained():
                yield
        finally:
            if not may_return or all(loader is not kept for _, kept in self.kept.values()):
                loader.end_workers()
