"""The formats of tool calls in chat templates, and their parsers."""
