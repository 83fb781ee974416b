"""Meshes of several simulated CPU devices, in a process of their own: JAX fixes the device count when it starts."""

import pytest


def test_on_eight_devices(root, run_python):
    done = run_python("-m", "pytest", str(root / "tests/distributed/mesh_checks.py"), "-q", devices=8, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_failing_check_fails_here(root, run_python):
    """On one device the checks cannot pass: the exit status does carry their result."""
    done = run_python("-m", "pytest", str(root / "tests/distributed/mesh_checks.py"), "-qk", "eight_devices")
    assert done.returncode == 1
    assert "1 failed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("what", ["update", "samples"])
def test_every_mesh_of_eight_devices(root, run_python, what, model):
    """All sizes of the five axes that multiply to 8."""
    checks = f"the_{what} and {model}"
    done = run_python(
        "-m",
        "pytest",
        str(root / "tests/distributed/mesh_checks.py"),
        "-q",
        "-mslow",
        "-k",
        checks,
        devices=8,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
