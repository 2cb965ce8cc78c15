"""``python -m posttrain.cli``, for launchers: ``torchrun -m posttrain.cli sft run.yaml``."""

from posttrain.cli import main

raise SystemExit(main())
