"""Pure functions: advantages, and losses of a policy on its completions."""
