"""The rules for verl's agent loops: tools, and turns."""

import ast
from pathlib import Path

from jaxrl_llm.tools.migrate.draft import Draft

ROLLOUT = "actor_rollout_ref.rollout"


def tools(draft: Draft) -> None:
    """Set the tools of the tool agent, whose turns and calls have no limit of their own there."""
    turns, loops = f"{ROLLOUT}.multi_turn", ("agent_loop_config_path", "default_agent_loop")
    enable = f"{turns}.enable"
    files, classes = ([f"{at}.{key}" for at in (turns, "data")] for key in ("function_tool_path", "tool_config_path"))
    for key in (f"{ROLLOUT}.agent.{name}" for name in loops):
        if (loop := draft.get(key)) not in (None, "single_turn_agent", "tool_agent"):
            draft.check(
                f"{key} = {loop}: a loop of your own is an environment (environment.name), or an agent that talks to "
                "the endpoint of the run (environment.agent); docs/environments.md and docs/agents.md say how"
            )
        draft.use(key)
    path, schemas = draft.first(*files), draft.first(*classes)
    if not (path or schemas or draft.get(enable)):
        draft.use(enable)
        return
    if path:
        functions, renamed = _function_tools(str(path))
        draft.set("environment.tools", tuple(f"{path}:{name}" for name in functions) or None, *files)
        if not functions:
            draft.check(f"{path} is not here: name its functions one by one in environment.tools, {path}:NAME")
        if renamed:
            draft.check(
                f"{path}: {', '.join(renamed)} have another name or schema there; here a tool has its function's"
            )
    if schemas:
        draft.use(*classes)
        draft.check(
            f"the tools in {schemas} are classes of verl: write each as a function with types and a docstring, and "
            "name it in environment.tools (docs/environments.md)"
        )
    draft.check(
        "verl answers the first calls of a turn alone (multi_turn.max_parallel_calls, 1 by default), and shows so many "
        "characters of a result (max_tool_response_length, 256); here all are answered and shown whole"
    )
    if "environment.max_turns" not in draft.values:  # a turn has a token at least
        draft.set("environment.max_turns", draft.values["rollout.max_completion_length"], enable)
    draft.set_none("environment.timeout", enable)


def _function_tools(path: str) -> tuple[list[str], list[str]]:
    """Return the functions with `@function_tool` in a file, none where it cannot be read, and which have options."""
    try:
        tree = ast.parse(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return [], []
    tools = {
        node.name: isinstance(mark, ast.Call) and bool(mark.args or mark.keywords)
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for mark in node.decorator_list
        if ast.unparse(mark).partition("(")[0].endswith("function_tool")
    }
    return list(tools), [name for name, has_options in tools.items() if has_options]
