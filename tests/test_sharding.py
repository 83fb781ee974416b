"""Meshes of several devices, simulated on the CPU; the device count is fixed when JAX starts, hence the other process."""


def test_on_eight_devices(root, run_python):
    done = run_python("-m", "pytest", str(root / "tests/mesh_checks.py"), "-q", "-p", "no:cacheprovider", devices=8)
    assert done.returncode == 0, done.stdout + done.stderr
