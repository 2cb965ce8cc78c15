"""Commands beside training: migration of scripts, the memory plan, the preview of data."""
