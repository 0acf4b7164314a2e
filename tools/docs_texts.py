"""Lists the texts that the program may print, from the syntax trees of `edgekit/`, so that the list is never outdated.

`…` stands where the program puts a name or a number: f"there is no file '{path}'" is read as "there is no file '…'".
"""

import ast
import functools
import importlib
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path

import msgspec

import edgekit
from edgekit import errors

PACKAGE = Path(edgekit.__file__).parent

_ANY = "…"
_CALLS: Mapping[str, str] = {
    "suggest_name": "it names the nearest valid name, or lists all of them",
    "spell_install": "the command that it prints installs the package, for pip, pipx or uv",
}
_ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
_MAKERS = {
    **{name: (name, 0) for name in _ERRORS},
    "refuse": ("UsageError", 1),
    "__init__": ("ModelError", 0),
    "PipelineError": ("DataError", 0),
}
"""The functions that create an error, by name: the error's class, and the position of the argument with the message."""
_REASON = ast.Constant(": …")
_MAX_VARIANTS = 24
_MAX_DEPTH = 6


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A text that the program may print; `kind` and `hint` are those of an error, "" for a sentence of a report."""

    room: str
    text: str
    kind: str = ""
    hint: str = ""


class Raised(msgspec.Struct, frozen=True, kw_only=True):
    """An error in the source: the name of its class, and the expressions of message and hint."""

    kind: str
    message: ast.expr
    hint: ast.expr


@functools.cache
def list_messages() -> tuple[Message, ...]:
    """Returns each message of the program once, in the order of the source."""
    found: dict[Message, None] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).parts
        if "standalone" in parts:
            continue  # These programs run in another process, and edgekit quotes their texts in its own messages.
        room = parts[0] if len(parts) > 1 else ""
        has_sentences = room not in {"cli", ""} and "pages" not in parts
        found.update(dict.fromkeys(read_module(file.read_text(), room, has_sentences=has_sentences)))
    for file in sorted(PACKAGE.rglob("findings.toml")):
        findings = tomllib.loads(re.sub(r"\{\w+\}", _ANY, file.read_text()))["findings"]
        texts = (text for finding in findings for text in finding.values() if _is_sentence(text))
        found.update((Message(room=file.relative_to(PACKAGE).parts[0], text=text), None) for text in texts)
    return tuple(found)


def read_module(source: str, room: str = "", *, has_sentences: bool = True) -> list[Message]:
    """Returns the errors that a module raises, then its other sentences."""
    module = _Module(ast.parse(source))
    raised = list(dict.fromkeys(_list_errors(module, room)))
    known = {text for message in raised for text in (message.text, message.text.removesuffix(": …"))}
    sentences = _list_sentences(module) if has_sentences else ()
    return [*raised, *(Message(room=room, text=text) for text in dict.fromkeys(sentences) if text not in known)]


def walk(tree: ast.AST) -> list[ast.AST]:
    """Returns the nodes of a tree in the order of `ast.walk`, in a third of the time; without the contexts of names."""
    nodes = [tree]
    for node in nodes:
        for name, value in vars(node).items():
            if isinstance(value, list):
                nodes += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and name != "ctx":
                nodes.append(value)
    return nodes


def _walk_block(block: ast.Module | ast.FunctionDef) -> list[ast.AST]:
    """Returns the nodes of a block, statement by statement."""
    return [block, *(node for statement in block.body for node in walk(statement))]


def _find_raises(nodes: Sequence[ast.AST]) -> Iterator[Raised]:
    """Yields each error in a part of a module: calls with a message and a keyword `hint`."""
    worded, quoting = dict(_list_worded(nodes)), set(_list_quoting(nodes))
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        hint = next((given.value for given in node.keywords if given.arg == "hint"), None)
        name = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
        if name == "reading":
            what, made, hint = node.args
            yield Raised(kind=ast.unparse(made), message=_add(ast.Constant("cannot read "), what, _REASON), hint=hint)
        elif hint is not None and name in _MAKERS:
            kind, place = _MAKERS[name]
            message = worded.get(id(node.args[place]), node.args[place])
            yield Raised(kind=kind, message=_add(message, _REASON) if id(node) in quoting else message, hint=hint)


def _add(first: ast.expr, *others: ast.expr) -> ast.expr:
    """Returns the expression that joins texts."""
    return functools.reduce(lambda left, right: ast.BinOp(left=left, op=ast.Add(), right=right), others, first)


def _list_quoting(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Yields the id of each error, made in place or before, that `reraised` raises with the message of its cause."""
    bindings = _list_bindings(nodes)
    for node in nodes:
        if isinstance(node, ast.Call) and any(given.arg == "quote" for given in node.keywords):
            error = node.args[1]
            yield from map(id, bindings.get(error.id, ()) if isinstance(error, ast.Name) else [error])


def _list_worded(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, ast.expr]]:
    """Yields the id of each name that is the message of an error, and what the statement before its `raise` assigns.

    A function may so give one name to the messages of several errors, each of which has its own hint.
    """
    holders = (node for node in nodes if not isinstance(node, ast.expr))
    blocks = (getattr(node, name, None) for node in holders for name in ("body", "orelse", "finalbody"))
    for before, after in (pair for block in blocks if isinstance(block, list) for pair in pairwise(block)):
        made = after.exc if isinstance(after, ast.Raise) and isinstance(before, ast.Assign) else None
        if isinstance(made, ast.Call) and any(given.arg == "hint" for given in made.keywords):
            named = {target.id for target in before.targets if isinstance(target, ast.Name)}
            names = (given for given in made.args if isinstance(given, ast.Name) and given.id in named)
            yield from ((id(name), before.value) for name in names)


def _list_errors(module: "_Module", room: str) -> Iterator[Message]:
    calls = (node for node in module.nodes if isinstance(node, ast.Call))
    hinted = [call.lineno for call in calls if _has_hint(call)]
    for function in module.all_functions:
        if not any(function.lineno <= line <= (function.end_lineno or 0) for line in hinted):
            continue
        nodes = _walk_block(function)
        made = sorted(_find_raises(nodes), key=lambda raised: raised.hint.lineno)
        scope = _Scope(module, function, nodes)
        for raised in made:
            hint = " / ".join(text for text in scope.spell(raised.hint) if re.search(r"\w", text))
            for text in scope.spell(raised.message):
                if re.search(r"\w", text):
                    yield Message(room=room, text=text, kind=raised.kind, hint=hint)


class _Module:
    """A module's functions and calls by name, and the expressions that its names may have."""

    def __init__(self, tree: ast.Module) -> None:
        self.nodes = _walk_block(tree)
        self.all_functions = [node for node in self.nodes if isinstance(node, ast.FunctionDef)]
        self.functions = {node.name: node for node in self.all_functions}
        self.names = {**_list_imported_texts(tree), **_list_bindings(self.nodes)}
        self.calls: dict[str, list[ast.Call]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                self.calls.setdefault(node.func.id, []).append(node)


class _Scope:
    """The names that a function of a module sees."""

    def __init__(self, module: _Module, function: ast.FunctionDef | None = None, nodes: Sequence[ast.AST] = ()) -> None:
        self._module = module
        self._local = _list_bindings(nodes)
        if function:
            for name, given in _list_given(module.calls.get(function.name, []), function):
                self._local.setdefault(name, []).append(given)

    def spell(self, node: ast.expr, depth: int = 0) -> tuple[str, ...]:
        """Returns the texts that an expression may give."""
        deeper = depth + 1
        match node:
            case _ if deeper > _MAX_DEPTH:
                texts: tuple[str, ...] = (_ANY,)
            case ast.Constant(value=str(text)):
                texts = (re.sub(r"\{\w*\}", _ANY, text),)
            case ast.JoinedStr(values=parts):
                texts = _join([self._spell_part(part, deeper) for part in parts])
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                texts = _join([self.spell(left, deeper), self.spell(right, deeper)])
            case ast.BinOp(left=left, op=ast.Mult()):
                texts = ("", *self.spell(left, deeper))
            case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
                texts = (_CALLS[name],)
            case _:
                texts = self._spell_all(self._find(node, deeper), deeper)
        return texts

    def _spell_all(self, nodes: Sequence[ast.expr], depth: int) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for node in nodes for text in self.spell(node, depth))) or (_ANY,)

    def _spell_part(self, part: ast.expr, depth: int) -> tuple[str, ...]:
        """Returns the texts of a part of an f-string: `…` for a value, unless all its possible values are known."""
        if not isinstance(part, ast.FormattedValue):
            return self.spell(part, depth)
        if not isinstance(part.value, (ast.Name, ast.Subscript)):
            return (_ANY,)
        texts = self.spell(part.value, depth)
        is_known = all(_ANY not in text or " " in text for text in texts) and len(texts) <= _MAX_VARIANTS
        return texts if is_known else (_ANY,)

    def _find(self, node: ast.expr, depth: int) -> Sequence[ast.expr]:
        """Returns the expressions that an expression may be: those of a name, or the results of a function."""
        found: Sequence[ast.expr] = ()
        match node:
            case ast.Name(id=name):
                found = self._local.get(name) or self._module.names.get(name) or ()
            case ast.IfExp(body=first, orelse=second):
                found = (first, second)
            case ast.BoolOp(values=values):
                found = values
            case ast.Call(func=ast.Name(id="next"), args=[inner, *_]):
                found = (inner,)
            case ast.Call(func=ast.Name(id=name)) if name in self._module.functions:
                found = _list_results(self._module.functions[name])
            case ast.Subscript(value=value, slice=key):
                found = list(self._pick(value, key, depth))
            case _:
                pass
        return found

    def _pick(self, value: ast.expr, key: ast.expr, depth: int) -> Iterator[ast.expr]:
        """Yields the possible values of an expression's item: an element of a tuple, any value of a mapping."""
        match value, key:
            case ast.Tuple(elts=elements), ast.Constant(value=int(place)) if place < len(elements):
                yield elements[place]
            case ast.Dict(values=values), _:
                yield from values
            case _ if depth < _MAX_DEPTH:
                for node in self._find(value, depth + 1):
                    yield from self._pick(node, key, depth + 1)
            case _:
                return


def _list_bindings(nodes: Iterable[ast.AST]) -> dict[str, list[ast.expr]]:
    """Returns the names that nodes assign, with their possible values; `…` for a loop variable."""
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    _bind(target, value, found)
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                _bind(target, value, found)
            case ast.For(target=target) | ast.comprehension(target=target):
                _bind(target, ast.Constant(_ANY), found)
            case _:
                pass
    return found


def _bind(target: ast.expr, value: ast.expr, found: dict[str, list[ast.expr]]) -> None:
    if isinstance(target, ast.Name):
        found.setdefault(target.id, []).append(value)
    elif isinstance(target, ast.Tuple):
        for place, inner in enumerate(target.elts):
            _bind(inner, ast.Subscript(value=value, slice=ast.Constant(place)), found)


def _list_imported_texts(module: ast.Module) -> dict[str, list[ast.expr]]:
    """Returns the texts that a module imports from other modules of the package, by their names here."""
    found: dict[str, list[ast.expr]] = {}
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("edgekit"):
            for alias in node.names:
                value = getattr(importlib.import_module(node.module), alias.name, None)
                if isinstance(value, str):
                    found[alias.asname or alias.name] = [ast.Constant(value)]
    return found


def _list_given(calls: Sequence[ast.Call], function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """Yields the parameters of a function, with the arguments that calls in its module give for them."""
    places = [given.arg for given in function.args.args]
    names = {*places, *(given.arg for given in function.args.kwonlyargs)}
    for call in calls:
        yield from zip(places, call.args, strict=False)
        yield from ((given.arg, given.value) for given in call.keywords if given.arg in names and given.arg)


def _list_results(function: ast.FunctionDef) -> list[ast.expr]:
    given = (node.value for node in walk(function) if isinstance(node, (ast.Return, ast.Yield)))
    return [value for value in given if value is not None]


def _join(parts: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Returns each combination of the parts; parts with too many texts become `…`."""
    if math.prod(map(len, parts)) > _MAX_VARIANTS:
        parts = [texts if len(texts) == 1 else (_ANY,) for texts in parts]
    joined = (re.sub(r"…(\s?…)+", _ANY, "".join(each)) for each in product(*parts))
    return tuple(dict.fromkeys(joined))


_PATTERN_CALLS = {"compile", "sub", "search", "execute"}
_PROGRAM = re.compile(r"[\n\\<{}$^#]|\|\||&&|SELECT |CREATE |import |__|\(\?|--minimal_build")


def _list_sentences(module: _Module) -> Iterator[str]:
    """Yields the texts of a module that read as a sentence, without docstrings, parts of errors and programs."""
    nodes = module.nodes
    silent = {id(inner) for node in nodes if _is_silent(node) for inner in walk(node)}
    parts = (part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values)
    worded = (value for _, value in _list_worded(nodes))
    silent.update(id(inner) for part in (*parts, *worded) for inner in walk(part))
    scope = _Scope(module)
    for node in nodes:
        is_text = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and is_text and id(node) not in silent:
            yield from (text for text in scope.spell(node) if _is_sentence(text))


def _is_silent(node: ast.AST) -> bool:
    """Whether no text below a node is printed as a sentence: docstrings, errors, patterns, options of a command."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Call(func=ast.Attribute(attr=name)) if name in _PATTERN_CALLS:
            return True
        case ast.Call():
            return _has_hint(node)
        case _:
            return False


def _has_hint(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "reading" or any(given.arg == "hint" for given in call.keywords)


def _is_sentence(text: str) -> bool:
    return len(re.findall(r"[A-Za-z'-]{2,}", text)) >= 4 and text[0] not in ",;:. |" and not _PROGRAM.search(text)
