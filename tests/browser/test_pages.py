"""The built site and the report of a run, as a visitor sees them at three widths.

Nothing runs off the page, the console holds no error, and the search finds the right page first. The screenshots are in
``out/screenshots``.
"""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from posttrain.cli import main
from tests import tiny
from tests.browser.chromium import PROGRAM, Chromium

#: Names of code in tables, up to 16 characters long, that take two lines.
CUT_NAMES = """
[...document.querySelectorAll('table:not([class]) code')].filter(code => /^[\\w.]{1,16}$/.test(code.textContent))
  .filter(code => {
    const range = document.createRange();
    range.selectNodeContents(code);
    return new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1;
  }).map(code => code.textContent)
"""
#: By how many pixels tables are wider than the page, where they are.
SCROLLED_TABLES = """
[...document.querySelectorAll('table:not([class])')].map(table => table.scrollWidth - table.clientWidth)
  .filter(more => more > 1)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed: apt-get install chromium"),
]

ROOT = Path(__file__).resolve().parents[2]
SCREENSHOTS = ROOT / "out" / "screenshots"
WIDTHS = (390, 800, 1280)
#: What people type into the search, and the page that should come first.
QUERIES = {
    "out of memory": "failures",
    "resume": "checkpoints",
    "resume from checkpoint": "checkpoints",
    "checkpoint": "checkpoints",
    "packing": "packing",
    "lora": "adapters",
    "qlora": "adapters",
    "quantization": "adapters",
    "dpo": "preference",
    "kto": "preference",
    "reward model": "preference",
    "grpo": "online-rl",
    "vllm": "engines",
    "reward function": "online-rl",
    "tools": "online-rl",
    "distillation": "distillation",
    "translation": "seq2seq",
    "chat template": "sft",
    "dataset formats": "sft",
    "mixture": "sft",
    "images": "images",
    "fsdp": "distributed",
    "deepspeed": "distributed",
    "ray": "scale-out",
    "install": "get-started",
    "recipes": "recipes",
    "migrate": "migrating",
    "custom loss": "write-an-algorithm",
    "export gguf": "after-training",
    "architecture": "architecture",
    "hyperparameter search": "sweeps",
    "multi gpu": "distributed",
    "learning rate": "arguments",
    "batch size": "arguments",
    "gradient accumulation": "arguments",
    "wandb": "arguments",
    "weight decay": "arguments",
    "custom dataset": "sft",
    "system prompt": "sft",
    "tokenizer": "sft",
    "train on cpu": "get-started",
    "tutorial": "tutorial",
    "vram": "failures",
    "sequence length": "long-context",
    "vision": "images",
    "chat": "after-training",
    "lora merge": "adapters",
    "save model": "checkpoints",
    "agent": "agents",
    "judge": "online-rl",
    "docker": "get-started",
    "tracker": "get-started",
}


@pytest.fixture(scope="module")
def browser():
    with Chromium() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the site, built and served from this machine."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()


def look(browser, address, name, width):
    """What is seen, with a screenshot kept; fails where something runs off the page or the console holds an error."""
    seen = browser.open(address, width)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    (SCREENSHOTS / f"{name}-{width}.png").write_bytes(seen.screenshot)
    assert seen.errors == [], f"{name} at {width} pixels"
    assert (seen.wide, seen.overflow) == ([], 0), f"{name} at {width} pixels"
    return seen


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_of_the_site_runs_off_the_window(browser, site, width):
    address, folder = site
    pages = sorted(path.parent.relative_to(folder).as_posix() for path in folder.rglob("index.html"))
    assert len(pages) > 80
    for page in pages:
        look(browser, f"{address}/{page}/", page.replace("/", "-").strip(".") or "home", width)
        assert browser.evaluate(CUT_NAMES) == [], f"{page} at {width} pixels"
        if width > WIDTHS[0]:  # on a phone, wide tables are scrolled
            assert browser.evaluate(SCROLLED_TABLES) == [], f"{page} at {width} pixels"


@pytest.mark.parametrize("query", QUERIES)
def test_the_search_finds_the_right_page_first(browser, site, query):
    address, _ = site
    browser.open(f"{address}/?q={query.replace(' ', '+')}", 1280)
    first = browser.evaluate(
        """new Promise(resolve => {
             const started = Date.now();
             (function look() {
               const link = document.querySelector('.md-search-result__link');
               if (link || Date.now() - started > 20000) resolve(link ? new URL(link.href).pathname : null);
               else setTimeout(look, 50);
             })();
           })"""
    )
    assert first is not None and first.strip("/").split("/")[0] == QUERIES[query]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """``{kind of run: its report}``."""
    from posttrain.core import Trainer, TrainingArguments
    from posttrain.rl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
    from posttrain.sft import SFTConfig, SFTTrainer

    base = tmp_path_factory.mktemp("runs")
    common = dict(max_steps=6, logging_steps=1, per_device_train_batch_size=4, save_strategy="no", use_cpu=True)
    common |= dict(eval_strategy="steps", eval_steps=2)
    texts = [{"text": text} for text in tiny.CORPUS[:16]]
    pairs = [{"prompt": "the cat", "chosen": " sat down", "rejected": " dog"}] * 16
    prompts = [{"prompt": "the cat"}, {"prompt": "a dog"}] * 8
    ids = [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}] * 16

    def make(name, trainer_class, config_class, rows, **others):
        extra = {"num_generations": 4, "max_completion_length": 64} if trainer_class is GRPOTrainer else {}
        extra |= {"log_trajectories": 8} if "agent" in others else {}
        args = config_class(output_dir=str(base / name), **common, **extra)
        trainer_class(model=tiny.causal_lm(), args=args, train_dataset=rows, eval_dataset=rows, **others).train()
        return base / name / "report.html"

    async def agent(episode, row):
        messages = [{"role": "user", "content": row["prompt"]}]
        said = (await episode.generate(messages, max_tokens=8))["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "once more"}]
        return float(len((await episode.generate(messages, max_tokens=8))["content"] or ""))

    tokenizer, talking = tiny.tokenizer(), tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS)

    def length(completions, **_):
        return [float(len(text)) for text in completions]

    return {
        "trainer": make("trainer", Trainer, TrainingArguments, ids),
        "sft": make("sft", SFTTrainer, SFTConfig, texts, processing_class=tokenizer),
        "dpo": make("dpo", DPOTrainer, DPOConfig, pairs, processing_class=tokenizer),
        "grpo": make("grpo", GRPOTrainer, GRPOConfig, prompts, processing_class=tokenizer, reward_funcs=length),
        "agent": make("agent", GRPOTrainer, GRPOConfig, prompts, processing_class=talking, agent=agent),
    }


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["trainer", "sft", "dpo", "grpo", "agent"])
def test_the_report_of_a_run_is_whole(browser, reports, kind, width):
    look(browser, reports[kind], f"report-{kind}", width)
    # Of each curve: how many pixels are drawn, and how many of them in its first column, where a label would be cut.
    drawn = browser.evaluate(
        """[...document.querySelectorAll('canvas')].map(canvas => {
             const {width, height} = canvas, pixels = canvas.getContext('2d').getImageData(0, 0, width, height).data;
             let all = 0, first = 0;
             for (let y = 0; y < height; y++)
               for (let x = 0; x < width; x++)
                 if (pixels[4 * (y * width + x) + 3]) { all++; if (x === 0) first++; }
             return [all, first];
           })"""
    )
    assert drawn and all(pixels > 100 and not cut for pixels, cut in drawn), drawn


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_of_trajectories_is_whole(browser, reports, width):
    assert main(["trajectories", str(reports["agent"].parent), "--page"]) == 0
    look(browser, reports["agent"].with_name("trajectories.html"), "trajectories", width)
    rows = browser.evaluate("document.querySelectorAll('table tr').length")
    shown = browser.evaluate("document.body.innerText")
    assert rows > 8 and "once more" in shown
