"""Make the virtual environment and install SpanTrain with its development tools into it."""

import subprocess
import sys
import venv
from pathlib import Path

MINIMUM = (3, 11)
ROOT = Path(__file__).resolve().parent.parent


def main(target: str) -> None:
    """Create `target` where it is missing, then install; pip says what it does."""
    if sys.version_info < MINIMUM:
        wanted = ".".join(map(str, MINIMUM))
        sys.exit(
            f"Python {wanted} or newer is needed, this is {sys.version.split()[0]}; "
            f"run: make PYTHON=python{wanted} setup"
        )
    folder = ROOT / target
    if not (folder / "bin" / "python").exists():
        sys.stderr.write(f"Making the virtual environment {target}\n")
        venv.create(folder, with_pip=True)
    sys.stderr.write("Installing SpanTrain (a minute or two the first time)\n")
    command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", "constraints.txt"]
    command += ["-e", ".[dev]", "-e", "studies"]
    subprocess.run([*map(str, command)], cwd=ROOT, check=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".venv")
