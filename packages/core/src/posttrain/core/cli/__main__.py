"""``python -m posttrain.core.cli``, for launchers: ``torchrun -m posttrain.core.cli sft run.yaml``."""

from posttrain.core.cli import main

raise SystemExit(main())
