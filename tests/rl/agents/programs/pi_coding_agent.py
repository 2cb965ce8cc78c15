"""pi, a coding agent from npm: it writes a file with its own tools."""

import json
import os
import subprocess
import sys
from pathlib import Path

home = Path("pi")
home.mkdir()
provider = {
    "baseUrl": os.environ["OPENAI_BASE_URL"],
    "api": "openai-completions",
    "apiKey": "OPENAI_API_KEY",
    "models": [{"id": os.environ["OPENAI_MODEL"]}],
}
(home / "models.json").write_text(json.dumps({"providers": {"posttrain": provider}}))
pi = Path(sys.prefix, "node_modules", ".bin", "pi")
options = ["--print", "--offline", "--no-session", "--provider", "posttrain", "--model", os.environ["OPENAI_MODEL"]]
subprocess.run(
    [pi, *options, "Write the sum of 2 and 3 into sum.txt."],
    env=os.environ | {"PI_CODING_AGENT_DIR": str(home.resolve())},
    stdout=subprocess.DEVNULL,
    check=True,
)
print(float(Path("sum.txt").read_text() == "5\n"))
