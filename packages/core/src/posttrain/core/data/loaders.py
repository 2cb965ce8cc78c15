"""The data loaders of a trainer: made of its datasets, or taken from a subclass that makes its own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from posttrain.core.data import pipeline, workers
from posttrain.core.data.batch_samplers import EpochBatchSampler
from posttrain.core.errors import DataError

if TYPE_CHECKING:
    from posttrain.core.trainer import Trainer

logger = logging.getLogger(__name__)

#: A loss that reads one of these needs as many rows on each process, or may divide rows by the size, as rerankers do.
GATHERING = {"all_gather", "all_gather_into_tensor", "all_gather_tensor"}
BATCH_SIZE = {"train_batch_size", "per_device_train_batch_size"}


class Loaders:
    """Makes the loaders of the trainer that owns it, and keeps those whose workers persist: ``kept[key]`` is (dataset,
    loader).
    """

    def __init__(self, owner: Trainer) -> None:
        self.owner = owner
        self.kept: dict[str, tuple[Any, pipeline.Loader]] = {}

    def make(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any, is_training: bool, key: str | None
    ) -> torch.utils.data.DataLoader[Any]:
        """The loader of `dataset`; see `Trainer.make_dataloader`.

        All deal rows to the processes alike, so batch i of rank 0, of rank 1, ... is the order of the rows. Each pass
        over an evaluation set is the same, random rows included where workers read them. Raises a `DataError` where the
        dataset cannot be used, or is a stream and the arguments limit its batches.
        """
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
        pipeline.check_dataset(dataset, "train_dataset" if is_training else "eval_dataset")
        limits, device_type = owner.id_limits(), dist.device.type
        if device_type == "cpu":  # an unknown id raises there; elsewhere it ends the process
            limits = {name: n for name, n in limits.items() if name == "labels_per_token"}
        makes_batches = isinstance(sampler, EpochBatchSampler)
        order: dict[str, Any] = {"batch_sampler" if makes_batches else "sampler": sampler}
        loader = pipeline.Loader(
            dataset,
            batch_size=batch_size,
            collate_fn=collator,
            **order,
            seed=owner.data_seed,
            rank=dist.rank,
            world_size=dist.world_size,
            drop_last=args.dataloader_drop_last,
            advance=is_training,
            limits=limits,
            most=self._most(dataset, batch_size * dist.world_size, is_training),
            whole=self._are_whole(dataset, makes_batches),
            repeats=is_training and args.overfit_batches is not None,
            pin_memory=args.dataloader_pin_memory and device_type not in ("cpu", "mps"),  # which would not gain by it
            num_workers=args.dataloader_num_workers,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            in_order=args.dataloader_in_order,
        )
        if key is not None and args.dataloader_persistent_workers:  # its workers are worth keeping
            self.kept[key] = (read, loader)
        return loader

    def _are_whole(self, dataset: Any, makes_batches: bool) -> bool:
        """Whether the last batch is filled up on each process. Raises a `DataError` where it cannot be, and the loss
        gathers rows through torch.
        """
        owner, args = self.owner, self.owner.args
        read = owner.scaling.read_by_loss()
        if read.isdisjoint(GATHERING):
            return not makes_batches and not read.isdisjoint(BATCH_SIZE)
        if makes_batches or (pipeline.is_stream(dataset) and not args.dataloader_drop_last):
            why, remedy = "the last batch of a stream is short", "dataloader_drop_last=True"
            if makes_batches:
                why, remedy = "batches are made by the lengths of rows", "per_device_train_batch_size instead"
            raise DataError(
                f"{owner.__class__.__name__} gathers rows through torch (all_gather), which waits or ends where "
                f"processes have other numbers of them, and {why}. Set {remedy}, or gather with "
                "self.accelerator.gather."
            )
        return True

    def _most(self, dataset: Any, total: int, is_training: bool) -> int | None:
        """Batches of `total` rows of an epoch, at most; a warning where an evaluation reads none."""
        args = self.owner.args
        most = (args.overfit_batches or args.limit_train_batches) if is_training else None
        if most and pipeline.is_stream(dataset):
            raise DataError(
                "limit_train_batches and overfit_batches are for rows by index, and the training data is a stream. Set "
                "max_steps, or take the first rows of the stream: train_dataset.take(n)."
            )
        if not is_training and args.dataloader_drop_last and pipeline.has_length(dataset) and len(dataset) < total:
            logger.warning(
                f"eval_dataset has {len(dataset)} rows, less than one batch of {total}, and dataloader_drop_last=True "
                "drops it: nothing is evaluated. Set per_device_eval_batch_size to "
                f"{max(len(dataset) // self.owner.dist.world_size, 1)} or less, or dataloader_drop_last=False."
            )
        return most

    def adopt(self, loader: Any, is_training: bool = True) -> Any:
        """`loader` with a position and a part for each process; see `posttrain.core.data.pipeline.adopt`. Where the
        processes would not read the same first, or not as much, each keeps what it reads, and they stay in step.
        """
        dist, scaling = self.owner.dist, self.owner.scaling
        given: dict[str, Any] = {"seed": self.owner.data_seed, "is_training": is_training}
        given["whole"] = not scaling.is_own_loss  # it may gather rows, of which each process has as many
        if dist.world_size > 1 and not isinstance(loader, pipeline.Loader):
            length = len(loader) if pipeline.has_length(loader) else None
            read = pipeline.first_read(loader, self.owner.data_seed), length
            first = dist.gather_patiently(read, "that all have a loader")
            given |= {"rank": dist.rank, "world_size": dist.world_size, "own_rows": len({*first}) > 1}
            given["fills"] = not scaling.read_by_loss().isdisjoint(GATHERING | BATCH_SIZE)
            if given["own_rows"]:
                logger.info("The given %s has other rows for each process: none are dealt.", type(loader).__name__)
        adopted = pipeline.adopt(loader, **given)
        if dist.world_size > 1:
            adopted.keep_in_step(dist.gather_object, dist.highest)
        return adopted

    def end_workers(self, loader: Any) -> None:
        """No process reads any more for `loader`, nor for those that are kept."""
        for reads in [loader, *(kept for _, kept in self.kept.values())]:
            reads.end_workers()

    @contextlib.contextmanager
    def ending_workers(self, loader: pipeline.Loader, may_return: bool) -> Iterator[None]:
        """After this context no process reads for `loader`, unless it is kept and the next evaluation of this training
        will use it (`may_return`).
        """
        try:
            with workers.explained():
                yield
        finally:
            if not may_return or all(loader is not kept for _, kept in self.kept.values()):
                loader.end_workers()


def keep_columns(owner: Any, dataset: Any, collator: Any, description: str | None) -> tuple[Any, Any]:
    """(`dataset`, `collator`) with the columns that the model of `owner` reads, unless it keeps all."""
    if not owner.args.remove_unused_columns:
        return dataset, collator
    owner._set_signature_columns_if_needed()
    if (columns := owner._signature_columns) is None:  # an override may leave it open
        return dataset, collator
    return pipeline.keep_columns(dataset, collator, columns, description or "dataset")
