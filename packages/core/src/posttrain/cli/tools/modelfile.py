"""Writes an Ollama Modelfile beside a GGUF file: the file, the turns of its chat template, and what ends an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_MARKS = {"system": "posttrain5ystem", "user": "posttrainu5er", "assistant": "posttraina55istant"}


def write(gguf: Path, tokenizer: Any, stops: list[str]) -> Path:
    """Write ``NAME.Modelfile`` beside the file `gguf`.

    Args:
        stops: the texts that end an answer.
    """
    lines = [f"# ollama create {gguf.stem} -f {gguf.stem}.Modelfile", f"FROM ./{gguf.name}"]
    if tokenizer.chat_template is not None:
        template, system = template_of(tokenizer)
        if template is None:
            lines.append("# Its chat template is not made of one turn after another: Ollama reads the one in the file.")
        else:
            lines.append(f'TEMPLATE """{template}"""')
            lines += [f'SYSTEM """{system}"""'] if system else []
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if '"' not in stop]
    path = gguf.with_suffix(".Modelfile")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def template_of(tokenizer: Any) -> tuple[str | None, str]:
    """(the chat template in the language of Ollama, the system message that it has by itself).

    None where a conversation is not its turns one after another. The beginning of text is left out: Ollama adds it.
    """
    begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]

    def render(*roles: str, asks: bool = False) -> str:
        messages = [{"role": role, "content": _MARKS[role]} for role in roles]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        return text.removeprefix(tokenizer.bos_token) if begins else text

    try:
        whole = render("system", "user", "assistant", "user")
        parts = {"system": render("system", "user")[: -len(_turn(render, "user"))], "user": _turn(render, "user")}
        parts["assistant"] = render("system", "user", "assistant").removeprefix(parts["system"] + parts["user"])
    except Exception:  # a template of any author's, which may refuse an order of roles by any error
        return None, ""
    beginning = render("system", "user", asks=True).removeprefix(parts["system"] + parts["user"])
    if "".join(parts[role] for role in ("system", "user", "assistant", "user")) != whole:
        return None, ""
    if any(parts[role].count(mark) != 1 or '"""' in parts[role] for role, mark in _MARKS.items()):
        return None, ""
    before, after = parts["system"].split(_MARKS["system"])
    own = render("user").removesuffix(parts["user"])
    if own and not (own.startswith(before) and own.endswith(after)):
        return None, ""
    turns = {role: text.replace(_MARKS[role], "{{ .Content }}") for role, text in parts.items()}
    system, user, assistant = (turns[role] for role in _MARKS)
    template = (
        f'{{{{ range .Messages }}}}{{{{ if eq .Role "system" }}}}{system}{{{{ else if eq .Role "user" }}}}{user}'
        f'{{{{ else if eq .Role "assistant" }}}}{assistant}{{{{ end }}}}{{{{ end }}}}{beginning}'
    )
    return template, own[len(before) : len(own) - len(after)] if own else ""


def _turn(render: Any, role: str) -> str:
    """The text of one more turn of a user, as in a conversation that goes on."""
    shorter, longer = render("system", "user", "assistant"), render("system", "user", "assistant", role)
    if not longer.startswith(shorter):
        raise ValueError("a turn changes those before it")
    return longer[len(shorter) :]
