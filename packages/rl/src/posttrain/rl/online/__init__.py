"""Online training: a rollout from its prompts to the loss, at once or in the background."""
