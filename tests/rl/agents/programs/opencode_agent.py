"""opencode, a coding agent from npm: it writes a file with its own tools."""

import json
import os
import subprocess
import sys
from pathlib import Path

model = os.environ["OPENAI_MODEL"]
provider = {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": os.environ["OPENAI_BASE_URL"], "apiKey": os.environ["OPENAI_API_KEY"]},
    "models": {model: {"limit": {"context": 32768, "output": 512}}},
}
settings = {
    "provider": {"posttrain": provider},
    "model": f"posttrain/{model}",
    "tools": {"*": False, "write": True},
    "agent": {"build": {"prompt": "You write files."}},
    "autoupdate": False,
}
home = str(Path("home").resolve())  # settings, sessions and caches of this episode alone
subprocess.run(
    [
        Path(sys.prefix, "node_modules", ".bin", "opencode"), "run", "--pure", "--auto", "--title", "sum",
        "Write the sum of 2 and 3 into sum.txt.",
    ],
    env=os.environ
    | {"OPENCODE_CONFIG_CONTENT": json.dumps(settings), "OPENCODE_DISABLE_MODELS_FETCH": "1", "HOME": home}
    | {f"XDG_{kind}_HOME": home for kind in ("CONFIG", "DATA", "STATE", "CACHE")},
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    check=True,
)  # fmt: skip
print(float(Path("sum.txt").read_text() == "5\n"))
