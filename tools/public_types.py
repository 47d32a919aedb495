"""Is the type of every public name known to whoever imports it? Asks pyright, prints the score, fails below 100 %.

What trainers call is left out: its base classes have no types where the trainers are not installed, as here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

LEFT_OUT = "surefoot.integrations."


def main() -> int:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # pyright asks the first `python` for torch
    command = [sys.executable, "-m", "pyright", "--verifytypes", "surefoot", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        sys.exit(f"pyright did not run: {done.stdout}{done.stderr}")
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    public = [each for each in symbols if each["isExported"] and not each["name"].startswith(LEFT_OUT)]
    unknown = [each for each in public if not each["isTypeKnown"] or each["isTypeAmbiguous"]]
    for symbol in unknown:
        print(symbol["name"], *(f"  {each['message']}" for each in symbol["diagnostics"]), sep="\n")
    print(f"{len(public) - len(unknown)} of {len(public)} public names have a known type")
    return 1 if unknown or not public else 0


if __name__ == "__main__":
    sys.exit(main())
