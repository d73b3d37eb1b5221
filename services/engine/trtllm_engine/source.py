"""Python source, read without running it: which parameters a function has, which fields a class.

Knows nothing of TensorRT-LLM. Invariant: nothing is imported or evaluated but literals.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from services.engine.trtllm_engine.contract import NO_DEFAULT, Parameter


class Source:
    """One parsed file. Raises OSError, and ValueError for what is no Python."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8")
        try:
            self._tree = ast.parse(self.text)
        except (SyntaxError, RecursionError, MemoryError) as error:  # the last two of too many brackets
            raise ValueError(f"{path.name} is no Python: {error}") from None
        self._classes = {node.name: node for node in ast.walk(self._tree) if isinstance(node, ast.ClassDef)}

    def assigned(self, name: str) -> Any:
        """The literal that the module gives `name` last; None when there is none."""
        found = None
        for node in self._tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and name in map(ast.unparse, targets):
                found = literal(node.value)
        return found

    def has_class(self, name: str) -> bool:
        return name in self._classes

    def bases(self, name: str) -> tuple[str, ...]:
        """Names of a class's bases; of `module.Name` the last part."""
        found = self._classes.get(name)
        return () if found is None else tuple(ast.unparse(base).split(".")[-1] for base in found.bases)

    def family(self, name: str) -> list[str]:
        """The class and, as far as they are in this file, its bases, nearest first, each once."""
        found, left = [], [name]
        while left:
            one = left.pop(0)
            if one in self._classes and one not in found:  # `class LLM(other.LLM)` is its own base by name
                found.append(one)
                left = [*self.bases(one), *left]
        return found

    def fields(self, name: str) -> tuple[Parameter, ...]:
        """Annotated fields of the class, those of bases in this file included, its own last."""
        found: dict[str, Parameter] = {}
        for one in reversed(self.family(name)):
            for node in self._classes[one].body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found[node.target.id] = Parameter(node.target.id, _field_default(node.value))
        return tuple(found.values())

    def method(self, name: str, method: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """The method as the class or its nearest base defines it."""
        for one in self.family(name):
            for node in self._classes[one].body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == method:
                    return node
        return None

    def members(self, name: str) -> frozenset[str]:
        """Methods, properties and attributes that the class or its bases set on `self`."""
        found: set[str] = set()
        for one in self.family(name):
            for node in ast.walk(self._classes[one]):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(node.name)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                    found.add(node.attr)
        return frozenset(found)

    def dataclass_options(self, name: str) -> dict[str, Any]:
        """Keywords of the class's `@dataclass(...)`."""
        for decorator in self._classes[name].decorator_list if name in self._classes else ():
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).split(".")[-1] == "dataclass":
                return {word.arg: literal(word.value) for word in decorator.keywords if word.arg}
        return {}


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[Parameter, ...]:
    """Its parameters in order, without self, * and **."""
    positional = [*function.args.posonlyargs, *function.args.args]
    missing = len(positional) - len(function.args.defaults)
    defaults = [NO_DEFAULT] * missing + [literal(node) for node in function.args.defaults]
    keyword = [NO_DEFAULT if node is None else literal(node) for node in function.args.kw_defaults]
    pairs = [*zip(positional, defaults, strict=True), *zip(function.args.kwonlyargs, keyword, strict=True)]
    return tuple(Parameter(argument.arg, default) for argument, default in pairs if argument.arg != "self")


def literal(node: ast.expr) -> Any:
    """The value of a literal; of anything else its text."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):  # no literal, or one that cannot be, such as {[]: 0}
        return ast.unparse(node)


def _field_default(node: ast.expr | None) -> Any:
    """Of a plain value, or of `Field(...)` (pydantic) and `field(...)` (dataclasses)."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func).split(".")[-1] not in ("Field", "field"):
        return NO_DEFAULT if node is None else literal(node)
    given = {word.arg: word.value for word in node.keywords}
    if "default_factory" in given:
        made = ast.unparse(given["default_factory"])
        return {"list": "[]", "dict": "{}"}.get(made, f"{made}()")
    default = given.get("default", node.args[0] if node.args else None)
    return NO_DEFAULT if default is None or (isinstance(default, ast.Constant) and default.value is ...) else literal(default)
