def test_host_modules_import_without_jax(run_python, root):
    """A grader or a data format can be tested where there is no accelerator library."""
    files = [file for folder in ("data", "rewards") for file in sorted((root / "jaxrl_llm" / folder).rglob("*.py"))]
    names = [".".join(file.relative_to(root).with_suffix("").parts) for file in files if file.name != "__init__.py"]
    # The package's own __init__ is its public face and may import more: an empty stand-in takes its place.
    code = (
        "import sys, types, importlib\n"
        "sys.modules['jax'] = sys.modules['flax'] = sys.modules['torch'] = None\n"
        "package = types.ModuleType('jaxrl_llm')\n"
        f"package.__path__ = [{str(root / 'jaxrl_llm')!r}]\n"
        "sys.modules['jaxrl_llm'] = package\n"
        f"for name in {names!r}: print(importlib.import_module(name).__name__)\n"
    )
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == names
