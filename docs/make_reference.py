"""The pages of the API reference: one for each public class, and one for the functions of each package.

mkdocs uses this file twice, see mkdocs.yml: as a script of gen-files, which writes the pages, and as a hook, which puts
them into the navigation.
"""

from __future__ import annotations

import importlib
import inspect
import re
import types
from typing import Any

import mkdocs_gen_files

PACKAGES = ("core", "sft", "seq2seq", "rl")
#: What a reader looks for first, by the end of a name.
ORDER = ("Trainer", "Arguments", "Config", "Callback", "Collator", "")


#: How much the words of a page count in the search, by the beginning of its address; 1 elsewhere. Guides come before
#: the reference, which names everything.
SEARCH = {
    "reference/": 0.01,
    "maps/": 0.02,
    "arguments/": 0.005,
    "tutorial/": 0.3,
    "architecture": 0.5,
    "releases": 0.2,
}
SEARCH |= {
    "faults": 0.3,
    "results": 0.3,
    "speed": 0.3,
    "glossary": 0.3,
    "loop": 0.6,
    "images": 0.6,
    "seq2seq": 0.6,
    "recipes": 0.6,
    "failures": 1.5,
}


#: What people type who look for a page, and what its title does not say.
KEYWORDS = {
    "get-started/": ("quickstart", "install", "first run", "train on cpu"),
    "tutorial/data/": ("tutorial", "beginner", "first steps"),
    "sft/": ("dataset format", "custom dataset", "own data", "system prompt", "tokenizer", "chat template"),
    "images/": ("vision", "vlm", "multimodal"),
    "sweeps/": ("hyperparameter search", "hyperparameter tuning", "optuna", "grid search"),
    "distributed/": ("multi gpu", "several gpus", "torchrun", "accelerate launch"),
    "scale-out/": ("multi node", "cluster", "slurm"),
    "long-context/": ("sequence length", "context length", "long context"),
    "failures/": ("out of memory", "oom", "vram", "gpu memory", "nan"),
    "checkpoints/": ("stop and resume",),
    "evaluation/": ("metrics", "compute metrics"),
    "after-training/": ("chat", "inference", "serve", "ollama", "gguf"),
    "write-an-algorithm/": ("custom loss", "custom trainer"),
    "arguments/TrainingArguments/": (
        *("learning rate", "lr scheduler", "batch size", "gradient accumulation", "mixed precision", "bf16", "epochs"),
        *("wandb", "tensorboard", "mlflow", "seed", "weight decay", "warmup"),
    ),
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A hook of mkdocs: the page's weight in the search, and the words that find it."""
    boost = next((weight for start, weight in SEARCH.items() if page.url.startswith(start)), 1)
    page.meta.setdefault("search", {"boost": boost})
    if page.url in KEYWORDS:
        page.meta["tags"] = list(KEYWORDS[page.url])
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs: marks the code in sentences that fits into a line of a phone, for the stylesheet."""
    return re.sub(r"<code>(?=[^<]{1,36}</code>)", '<code class="whole">', html)


def names(package: str) -> tuple[list[str], list[str]]:
    """The public (classes, functions and constants) that a package itself defines, in the order of their pages."""
    face = importlib.import_module(f"posttrain.{package}")
    own = [
        name
        for name in face.__all__
        if package == "core" or name not in importlib.import_module("posttrain.core").__all__
    ]
    classes = [name for name in own if inspect.isclass(getattr(face, name))]

    def place(name: str) -> tuple[int, str]:
        return next(number for number, end in enumerate(ORDER) if name.endswith(end) or name.startswith(end)), name

    return sorted(classes, key=place), sorted({*own} - {*classes})


def entry(package: str, name: str, level: int) -> str:
    """What mkdocstrings makes the description of one public name from."""
    value = getattr(importlib.import_module(f"posttrain.{package}"), name)
    home = getattr(value, "__module__", "") or ""
    if not home.startswith("posttrain."):
        return f"{'#' * level} {name}\n\nFrom `{home}`.\n"
    options = f"    options:\n      heading_level: {level}\n"
    if inspect.isclass(value) and name.endswith(("Config", "Arguments")):
        # The fields of a config are tables of their own, with bounds and defaults.
        options += "      members: false\n      merge_init_into_class: false\n"
    return f"::: {home}.{name}\n{options}"


def on_config(config: Any) -> Any:
    """A hook of mkdocs: the pages in the tab of the reference."""
    listed: list[Any] = []
    for package in PACKAGES:
        classes, functions = names(package)
        pages: list[Any] = [{name: f"reference/{package}/{name}.md"} for name in classes]
        pages += [{"Functions": f"reference/{package}/functions.md"}] if functions else []
        listed.append({f"posttrain.{package}": pages})
    reference = next(tab["Reference"] for tab in config["nav"] if "Reference" in tab)
    reference[:0] = listed
    return config


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


def write() -> None:
    for package in PACKAGES:
        classes, functions = names(package)
        for name in classes:
            with mkdocs_gen_files.open(f"reference/{package}/{name}.md", "w") as page:
                page.write(entry(package, name, level=1))
        if functions:
            with mkdocs_gen_files.open(f"reference/{package}/functions.md", "w") as page:
                page.write(
                    "\n".join([f"# Functions of posttrain.{package}\n", *(entry(package, n, 2) for n in functions)])
                )
    write_losses()


def write_losses() -> None:
    page = ["# Losses", "What each loss computes; each function can be called by itself."]
    for name, title in LOSSES.items():
        members = public_functions(importlib.import_module(f"posttrain.{name}"))
        options = {"show_root_heading": "false", "heading_level": 3, "members": members or "false"}
        listed = "".join(f"      {option}: {value}\n" for option, value in options.items())
        page += [f"## {title}", f"::: posttrain.{name}\n    options:\n{listed}"]
    with mkdocs_gen_files.open("reference/losses.md", "w") as file:
        file.write("\n\n".join(page))


if __name__ == "<run_path>":  # gen-files runs it so; as a hook it is imported
    write()
