"""Commands other than training: launch, preview, plan, consolidate, merge, migrate, verify-resume, rerun and env."""
