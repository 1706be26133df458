"""Runs pip, and looks at the package, in an environment that is not this one."""

import json
import os
import subprocess
import sys
import textwrap

# Prints what a process sees of the package: which backends are ready, what warned, whether results are right.
PROBE = """
    import json, warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch, ckpt_ops
        x = torch.arange(1, 4097.0).reshape(32, 128)
        y = ckpt_ops.dropout(x, 0.5, seed=7)
        ckpt_ops.dropout(x, 0.5, seed=8)
    want = ckpt_ops.dropout(x, 0.5, seed=7, backend="reference")
    try:
        refused = not torch.equal(ckpt_ops.dropout(x, 0.5, seed=7, backend="cpu"), want)
    except RuntimeError as error:
        refused = str(error)
    import ckpt_ops.triton_kernels
    print(json.dumps({
        "file": ckpt_ops.__file__,
        "backends": ckpt_ops.backends(),
        "status": ckpt_ops.native.status(),
        "warnings": [str(w.message) for w in caught if "ckpt_ops" in str(w.message)],
        "equal": torch.equal(y, want),
        "refused": refused,
    }))
"""


def run(command, *, cwd, env=None):
    """Runs a command away from the clone; its output is shown if it fails."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CKPT_OPS_", "PYTHONPATH", "LD_PRELOAD"))}
    done = subprocess.run(command, cwd=cwd, env=clean | (env or {}), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def probe(python, cwd, **env):
    """PROBE's findings, as a dict, with its standard error under "stderr"."""
    done = run([str(python), "-c", textwrap.dedent(PROBE)], cwd=cwd, env=env)
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}


def pip_install(python, *arguments, cwd, **env):
    """pip of this environment, installing into another one. Dependencies are there already."""
    return run([sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", *arguments], cwd=cwd, env=env)


def check_reference_serves(found, reason):
    """One warning, the same reason everywhere, results of the reference, and a named backend that is refused."""
    assert reason in found["backends"]["cpu"]
    assert len(found["warnings"]) == 1
    assert reason in found["warnings"][0]
    assert found["equal"]
    assert reason in found["refused"]
