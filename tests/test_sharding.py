"""Meshes of several simulated CPU devices, in a process of their own: JAX fixes the device count when it starts."""


def test_on_eight_devices(root, run_python):
    done = run_python("-m", "pytest", str(root / "tests/mesh_checks.py"), "-q", devices=8)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_failing_check_fails_here(root, run_python):
    """On one device the checks cannot pass: the exit status does carry their result."""
    done = run_python("-m", "pytest", str(root / "tests/mesh_checks.py"), "-qk", "eight_devices")
    assert done.returncode == 1
    assert "1 failed" in done.stdout
