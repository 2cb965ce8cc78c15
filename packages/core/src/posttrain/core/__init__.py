"""The base trainer and its extension points."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.core import registry

if TYPE_CHECKING:
    from transformers import (
        DataCollatorForTokenClassification,
        DataCollatorWithFlattening,
        HfArgumentParser,
        IntervalStrategy,
        SchedulerType,
    )

    from posttrain.cli.mixture import DatasetConfig, DatasetMixtureConfig, get_dataset
    from posttrain.cli.scripts import (
        ScriptArguments,
        ScriptParser,
        TrlParser,
        get_kbit_device_map,
        get_peft_config,
        get_quantization_config,
    )
    from posttrain.compat.bema import BEMACallback
    from posttrain.compat.completion_only import DataCollatorForCompletionOnlyLM
    from posttrain.compat.rich_progress import RichProgressCallback
    from posttrain.compat.row_formats import (
        apply_chat_template,
        is_conversational_from_value,
        maybe_apply_chat_template,
        maybe_convert_to_chatml,
        prepare_multimodal_messages,
    )
    from posttrain.core.arguments import TrainingArguments
    from posttrain.core.callbacks import (
        CallbackHandler,
        DefaultFlowCallback,
        EarlyStoppingCallback,
        PrinterCallback,
        ProgressCallback,
        TrainerCallback,
    )
    from posttrain.core.checkpoint import get_last_checkpoint
    from posttrain.core.config import opt
    from posttrain.core.data.collators import (
        DataCollatorForLanguageModeling,
        DataCollatorForSeq2Seq,
        DataCollatorWithPadding,
        default_data_collator,
    )
    from posttrain.core.data.pipeline import enable_full_determinism, set_seed
    from posttrain.core.evaluation.eval_loop import StreamingMetric
    from posttrain.core.logging.monitors import (
        ActivationMonitorCallback,
        MemorySnapshotCallback,
        ParameterMonitorCallback,
        ProfilerCallback,
        UtilizationCallback,
    )
    from posttrain.core.state import (
        EvalLoopOutput,
        EvalPrediction,
        ExportableState,
        PredictionOutput,
        TrainerControl,
        TrainerState,
        TrainOutput,
    )
    from posttrain.core.trainer import Trainer
    from posttrain.lm.generate.completion_callbacks import LogCompletionsCallback, WeaveCallback
    from posttrain.lm.generate.win_rate import WinRateCallback
    from posttrain.lm.loading.arguments import ModelConfig
    from posttrain.lm.loading.clone_template import clone_chat_template, setup_chat_format
    from posttrain.lm.text.chat_template import is_conversational
    from posttrain.lm.text.training_template import get_training_chat_template

registry.TRAINER_NAMES = "posttrain.compat.trainer_names:TrainerNames"
registry.FOLLOW_OLD_NAMES = "posttrain.compat.trainer_names:follow_old_names"
registry.ARGUMENT_SETTERS = "posttrain.compat.argument_setters:ArgumentSetters"
registry.CALLBACKS += [
    "posttrain.cli.report.run_record:RunRecordCallback",
    "posttrain.cli.report.report:RunReportCallback",
]

__all__, __getattr__, __dir__ = registry.face(__name__)
