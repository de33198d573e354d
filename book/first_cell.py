# @title Install the library (in Colab)
# In Colab this installs the library as it was when the notebook was written;
# elsewhere it says how to, if the library is missing. FASTWEIGHTS_SOURCE
# names something else to install: a folder or a requirement.
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile


def install(library, needs, triton):
    source = os.environ.get("FASTWEIGHTS_SOURCE")
    if not source:
        if importlib.util.find_spec("fastweights"):
            return
        if "google.colab" not in sys.modules:
            raise ModuleNotFoundError(
                "the library is not installed; this line installs it:\n"
                f'%pip install "fastweights[chapters] @ {library}"'
            )
        source = library
    kept = {}  # whatever pip installs, these stay as they are
    for name in ("numpy", "torch", "triton"):
        try:
            kept[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found = tuple(map(int, re.findall("[0-9]+", kept[name])[:2]))
        if found < needs.get(name, ()):
            least = ".".join(map(str, needs[name]))
            raise RuntimeError(
                f"the library needs {name} {least}, found {kept[name]}: "
                f"run %pip install --upgrade {name}, then restart"
            )
    wanted = [source]
    if "triton" not in kept and sys.platform == "linux":
        # A PyTorch for CPUs has none; another brings the one that fits it.
        wanted.append(f"triton=={triton}" if "torch" in kept else "triton")
    with tempfile.TemporaryDirectory() as folder:
        constraints = os.path.join(folder, "constraints.txt")
        with open(constraints, "w") as file:
            file.writelines(f"{name}=={kept[name]}\n" for name in kept)
        command = [sys.executable, "-m", "pip", "install", "--quiet"]
        command += ["--constraint", constraints, *wanted]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip says:\n{done.stderr}")


install(
    library="git+REPOSITORY@COMMIT",
    needs={"torch": "TORCH", "triton": "TRITON"},
    triton="PIN",
)
