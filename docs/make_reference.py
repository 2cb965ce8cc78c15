"""The pages of the API reference: one for each package, with every public name. mkdocs runs this; see
``mkdocs.yml``.
"""

from __future__ import annotations

import importlib
import inspect

import mkdocs_gen_files

TITLES = {
    "core": "posttrain.core: the trainer and what it builds on",
    "sft": "posttrain.sft: supervised fine-tuning",
    "seq2seq": "posttrain.seq2seq: sequence to sequence",
    "rl": "posttrain.rl: preferences and online RL",
}

for package, title in TITLES.items():
    face = importlib.import_module(f"posttrain.{package}")
    lines = [f"# {title}\n"]
    for name in sorted(face.__all__):
        value = getattr(face, name)
        home = getattr(value, "__module__", "") or ""
        if not home.startswith("posttrain."):
            lines.append(f"## {name}\n\nFrom `{home}`.\n")
            continue
        # The fields of a config are tables of their own, with bounds and defaults.
        is_config = inspect.isclass(value) and name.endswith(("Config", "Arguments"))
        options = "    options:\n      members: false\n      merge_init_into_class: false\n" if is_config else ""
        lines.append(f"::: {home}.{name}\n{options}")
    with mkdocs_gen_files.open(f"reference/{package}.md", "w") as page:
        page.write("\n".join(lines))
