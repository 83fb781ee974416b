"""`python -m jaxrl_llm.data` is `python -m jaxrl_llm.preview`: see there."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jaxrl_llm.preview", run_name="__main__", alter_sys=True)
