"""Does a chat template iterate over content parts, or does it want text?

vLLM decides per template, by its syntax tree (vllm/renderers/hf.py, `_detect_content_format`); the decision
changes the prompt, so the same rules are kept here, their blind spots included.
"""

from collections import deque
from collections.abc import Iterator
from typing import Literal, TypeAlias

from jinja2 import nodes

ContentFormat: TypeAlias = Literal["string", "openai"]


def detect(tree: nodes.Template) -> ContentFormat:
    """ "openai" if the template loops over a message's content, else "string"."""
    try:
        return "openai" if _loops_over_content(tree) else "string"
    except _TupleTarget:
        return "string"


class _TupleTarget(Exception):
    """`for key, value in ...` over what may be messages: vLLM gives up there."""


def _loops_over_content(tree: nodes.Template) -> bool:
    # Evaluated in vLLM's order: a loop found counts even if a later one is not understood.
    messages = list(_message_names(tree))
    macro_parameters, macro_loops = _macros_given_content(tree, messages)
    for loop in tree.find_all(nodes.For):
        if any(_accesses(loop.iter, name, "content") for name in messages):
            _loop_name(loop)
            return True
        if not isinstance(loop.iter, nodes.Name):
            continue
        outside_macros = id(loop) not in macro_loops
        if loop.iter.name in macro_parameters.get(id(loop), ()) or (
            outside_macros and loop.iter.name == "content"
        ):
            _loop_name(loop)
            return True
    return False


def _message_names(tree: nodes.Template) -> Iterator[str]:
    """Names that stand for one message: targets of loops over `messages` or over a variable made from it."""
    lists = list(_aliases(tree, "messages"))
    for loop in tree.find_all(nodes.For):
        if any(_accesses(loop.iter, name) for name in lists):
            yield _loop_name(loop)


def _aliases(tree: nodes.Template, name: str) -> Iterator[str]:
    yield name
    seen = {name}
    pending = deque([name])
    while pending:
        known = pending.popleft()
        for assign in tree.find_all(nodes.Assign):
            if _accesses(assign.node, known):
                if not isinstance(assign.target, nodes.Name):
                    raise _TupleTarget
                if assign.target.name not in seen:
                    seen.add(assign.target.name)
                    pending.append(assign.target.name)
                    yield assign.target.name


def _macros_given_content(tree: nodes.Template, messages: list[str]) -> tuple[dict[int, set[str]], set[int]]:
    """Loops inside macros by identity -> the macro's parameters that are called with a message's content."""
    parameters: dict[int, set[str]] = {}
    loops: set[int] = set()

    def is_content(value: nodes.Node) -> bool:
        return any(_accesses(value, name, "content") for name in messages)

    for macro in tree.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        given: set[str] = set()
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                given |= {name for name, value in zip(names, call.args, strict=False) if is_content(value)}
                given |= {k.key for k in call.kwargs if k.key in names and is_content(k.value)}
        for loop in macro.find_all(nodes.For):
            loops.add(id(loop))
            if given:
                parameters[id(loop)] = given
    return parameters, loops


def _loop_name(loop: nodes.For) -> str:
    if not isinstance(loop.target, nodes.Name):
        raise _TupleTarget
    return loop.target.name


def _accesses(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether node is `name` (or `name[key]`, `name.key`), perhaps filtered, tested or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _accesses(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _accesses(node.node, name, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return (
            _accesses_exactly(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
        )
    return isinstance(node, nodes.Getattr) and _accesses_exactly(node.node, name) and node.attr == key


def _accesses_exactly(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
