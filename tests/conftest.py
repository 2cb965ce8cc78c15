"""One thread per worker, no network, and a throw-away cache: a test leaves nothing behind and waits for nobody."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

# Before transformers and datasets are imported, for they read these once. Workers inherit the folder of the first
# process.
if "POSTTRAIN_TEST_CACHE" not in os.environ:
    os.environ["POSTTRAIN_TEST_CACHE"] = tempfile.mkdtemp(prefix="posttrain-tests-")
    atexit.register(shutil.rmtree, os.environ["POSTTRAIN_TEST_CACHE"], ignore_errors=True)
os.environ["HF_HOME"] = os.environ["POSTTRAIN_TEST_CACHE"]
for name in ("HF_DATASETS_CACHE", "HF_HUB_CACHE", "HF_MODULES_CACHE", "HF_TOKEN"):
    os.environ.pop(name, None)
# Rewriting the assertions of all tests takes a worker ten seconds, and a program of a test compiles our packages: once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1"}

import pytest  # noqa: E402
import torch  # noqa: E402

from tests import rotation, versions  # noqa: E402

torch.set_num_threads(1)
# No test outlives a power cut: what it writes need not reach the disk, which can take longer than the test.
os.fsync = lambda descriptor: None


def pytest_addoption(parser):
    what = "of tests marked `rotated`, run the cases that COMMIT (default: HEAD) chooses, and tests/parity only if "
    what += "something has changed that it compares"
    parser.addoption("--rotate", nargs="?", const="HEAD", metavar="COMMIT", help=what)


def pytest_configure(config):
    option = config.option
    if hasattr(config, "workerinput"):
        option.rotate, option.parity = config.workerinput["rotated"]
        return
    if Path((option.rotate or "").partition("::")[0] or "no path").exists():
        raise pytest.UsageError(f"--rotate takes {option.rotate} as a commit. Put --rotate last, or say --rotate=HEAD.")
    option.rotate = rotation.commit() if option.rotate == "HEAD" else option.rotate
    asked = any("parity" in Path(name).parts for name in config.args)
    option.parity = "they were asked for" if option.rotate is None or asked else rotation.compares(rotation.changed())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Skip, with older versions of transformers, what the product refuses there by name: tp_size and ep_size."""
    report = yield
    needs = "needs transformers 5.23 or newer"
    if report.failed and not versions.IS_CURRENT and needs in str(call.excinfo.value):
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1], f"Skipped: it {needs}")
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    # The same for all workers, though a commit may be made meanwhile.
    node.workerinput["rotated"] = node.config.option.rotate, node.config.option.parity


def pytest_report_header(config):
    commit = config.getoption("rotate")
    if commit is None:
        return None
    parity = f"run, for {why}" if (why := config.option.parity) else "left out, for nothing that they compare changed"
    return [
        f"cases of tests marked `rotated`: --rotate={commit} runs these again",
        f"comparisons with other trainers, tests/parity: {parity}",
    ]


def pytest_ignore_collect(collection_path, config):
    return True if collection_path == rotation.PARITY and not config.option.parity else None


def pytest_collection_modifyitems(config, items):
    # What takes longest first, so that no worker is left with it: the files of several processes, then the largest.
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: ("distributed" not in item.path.parts, -tests[item.path], item.path))
    if config.getoption("rotate") is not None:
        config.hook.pytest_deselected(items=rotation.leave_out(items, config.getoption("rotate")))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish():
    # What is imported by now stays. Looking through it for garbage, again and again, took a tenth of all time.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def log_level_of_the_test():
    """A trainer sets the level of posttrain's messages: that of one test is not that of the next."""
    log, trackers = logging.getLogger("posttrain"), sys.modules.get("posttrain.core.logging.trackers")
    level, levels = log.level, getattr(trackers, "_levels", None)
    yield
    if log.level != level:  # it empties a cache of each logger of the program
        log.setLevel(level)
    if levels is not None:
        trackers._levels = levels
