"""The pages of the API reference: one for each package, with every public name. mkdocs runs this; see
``mkdocs.yml``.
"""

from __future__ import annotations

import importlib
import inspect
import types

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

LOSSES = {
    "lm.loss.language_modeling": "Language modeling",
    "rl.algorithms.dpo": "DPO and its variants",
    "rl.algorithms.cpo": "CPO, SimPO and AlphaPO",
    "rl.algorithms.kto": "KTO",
    "rl.algorithms.orpo": "ORPO",
    "rl.algorithms.reward_model": "Reward models",
    "rl.losses.policy_losses": "Online RL: losses of the policy",
    "rl.losses.advantages": "Online RL: advantages",
}


def public_functions(module: types.ModuleType) -> list[str]:
    """The documented functions that `module` itself defines."""
    own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    return [n for n, value in own.items() if inspect.isfunction(value) and not n.startswith("_") and value.__doc__]


page = ["# Losses", "What each loss computes; each function can be called by itself."]
for name, title in LOSSES.items():
    members = public_functions(importlib.import_module(f"posttrain.{name}"))
    options = {"show_root_heading": "false", "heading_level": 3, "members": members or "false"}
    listed = "".join(f"      {option}: {value}\n" for option, value in options.items())
    page += [f"## {title}", f"::: posttrain.{name}\n    options:\n{listed}"]
with mkdocs_gen_files.open("reference/losses.md", "w") as file:
    file.write("\n\n".join(page))
