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
@pytest.mark.parametrize(
    "checks",
    [
        *(f"the_{what}_of and {model}" for what in ("update", "samples") for model in ("dense", "experts")),
        "not the_update_of and not the_samples_of",
    ],
)
def test_every_mesh_of_eight_devices(root, run_python, checks):
    """All sizes of the five axes that multiply to 8, and the slow checks that are made on a few of them."""
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
