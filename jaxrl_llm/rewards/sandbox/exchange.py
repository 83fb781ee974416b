"""The two jailed processes of a test: one holds the program and answers calls, the other holds the tests and calls.

Nothing but lines of JSON goes between them: requests, answers, and values as data. A value of a plain type is copied;
any other object stays where it is, and the other side gets a `Remote` of it. So whatever a program does to its own
interpreter, its answers reach the tests as fresh objects of exact builtin types, and no expected value reaches it.
Standard library only: jail.py and the jailed interpreter run it without this package.

`python -s -P exchange.py READ WRITE [GUARD FOLDER]` is the program's side, of `program.py` in the working folder.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import json
import operator
import os
import sys
import threading
import types

TYPE_CHECKING = False
if TYPE_CHECKING:  # a jailed interpreter starts sooner without
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

LONGEST = 2**26  # bytes of a line
CONTAINERS = (tuple, list, dict, set, frozenset)
# Types that are copied, besides None, bool, int, float, str and list: the plain arguments that make an equal value.
PARTS: dict[str, Callable[[Any], Sequence[Any]]] = {
    "builtins.complex": lambda value: (value.real, value.imag),
    "builtins.bytes": lambda value: (list(value),),
    "builtins.bytearray": lambda value: (list(value),),
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "builtins.tuple": lambda value: (list(value),),
    "builtins.set": lambda value: (list(value),),
    "builtins.frozenset": lambda value: (list(value),),
    "builtins.dict": lambda value: (list(map(list, value.items())),),
    "collections.OrderedDict": lambda value: (list(map(list, value.items())),),
    "collections.Counter": lambda value: (dict(value),),
    "collections.deque": lambda value: (list(value), value.maxlen),
    "decimal.Decimal": lambda value: (str(value),),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "datetime.date": lambda value: (value.year, value.month, value.day),
    "datetime.time": lambda value: (value.hour, value.minute, value.second, value.microsecond, value.tzinfo),
    "datetime.datetime": lambda value: (*value.timetuple()[:6], value.microsecond, value.tzinfo),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
    "datetime.timezone": lambda value: (value.utcoffset(None),),
    "numpy.array": lambda value: (value.tolist(), value.dtype.str),
}


class Gone(BaseException):
    """The other process ended or sent what is no answer; no `except Exception` of a test takes it for an error."""


class Peer:
    """One side of the exchange; `perform(operation, *values)` does what the other side asks for.

    `trusts` says whether the other side may name any builtin function, and not types alone.
    """

    def __init__(self, read: int, write: int, perform: Callable[..., Any], trusts: bool):
        self.reader, self.writer = os.fdopen(read, "rb"), os.fdopen(write, "wb")
        self.perform, self.trusts = perform, trusts
        self.lock, self.is_gone = threading.RLock(), False
        self.exported: list[Any] = []  # own objects that the other side knows by their index
        self.numbers: dict[int, int] = {}  # the index of an exported object by its id
        self.remotes: dict[int, Any] = {}  # the other side's objects by their index there

    def send(self, *message: Any) -> None:
        try:
            self.writer.write(json.dumps(message).encode() + b"\n")
            self.writer.flush()
        except OSError:
            raise self.gone() from None

    def gone(self) -> Gone:
        self.is_gone = True
        return Gone()

    def receive(self) -> list[Any]:
        line = self.reader.readline(LONGEST)
        try:
            kind, *content = json.loads(line)
            if kind not in ("load", "ready", "ask", "give", "raise"):
                raise ValueError(kind)
        except (ValueError, TypeError, RecursionError):
            raise self.gone() from None
        return [kind, *content]

    def ask(self, operation: str, *values: Any) -> Any:
        """Have the other side perform an operation; its requests are served meanwhile. Raises its errors.

        Lists, dicts and sets among the values are changed like the operation changed their copies.
        """
        with self.lock:
            self.send("ask", operation, self.encode(list(values)))
            while True:
                kind, *content = self.receive()
                if kind == "ask":
                    self.answer(*content)
                elif kind == "give":
                    result, changed = content
                    if changed is not None:
                        update(list(values[1:]), self.decode(changed))
                    return self.decode(result)
                else:
                    raise self.decode_error(*content)

    def answer(self, operation: str, encoded: Any) -> None:
        """Perform what the other side asks for, and send the result or the error."""
        try:
            values = self.decode(encoded)
            result = self.encode(self.perform(operation, *values))
            arguments = ["list", *encoded[2:]]
            after = self.encode(values[1:]) if operation == "call" else arguments
            message = ["give", result, None if after == arguments else after]
        except Gone:
            raise
        except BaseException as error:
            message = ["raise", *self.encode_error(error)]
        self.send(*message)

    def encode_error(self, error: BaseException) -> list[Any]:
        """An error as data, `[class, arguments, itself]`, each as `encode` makes it; a RuntimeError with the name of
        its class where that fails."""
        try:
            return [self.encode(type(error)), self.encode(list(error.args)), self.encode(error)]
        except BaseException:
            return [["builtin", "RuntimeError"], ["list", type(error).__name__], None]

    def decode_error(self, kind: Any, arguments: Any, itself: Any) -> BaseException:
        """The error that `encode_error` made this data of, with a reference to it on the other side."""
        made, remote = self.decode(kind), self.decode(itself)
        if not (isinstance(made, type) and issubclass(made, BaseException)):
            raise self.gone()
        try:
            error = made(*self.decode(arguments))
        except Exception:
            error = RuntimeError(made.__name__)
        error.__dict__["_remote"] = remote
        return error

    def encode(self, value: Any) -> Any:
        """A value as JSON: scalars are themselves, the rest is [type, ...]."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return ["list", *map(self.encode, value)]
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in PARTS:
            return [name, *map(self.encode, PARTS[name](value))]
        if isinstance(value, Remote):
            return ["yours", value._number]
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            if value.ndim == 0:
                return self.encode(value.item())
            if value.dtype.kind in "biufcU":
                return ["numpy.array", *map(self.encode, PARTS["numpy.array"](value))]
        for base, plain in ((int, int.__int__), (float, float.__float__), (str, str.__str__)):
            if base in kind.__mro__:
                return plain(value)
        label = getattr(value, "__name__", None)
        if isinstance(label, str) and getattr(builtins, label, None) is value:
            return ["builtin", label]
        if isinstance(value, types.ModuleType):
            raise TypeError(f"the module {label} belongs to the program")
        number = self.numbers.setdefault(id(value), len(self.exported))
        if number == len(self.exported):
            self.exported.append(value)
        error = None
        if BaseException in getattr(value, "__mro__", ()):  # tests may catch it: `except` needs a class of their own
            error = [label, next(base.__name__ for base in value.__mro__ if base.__module__ == "builtins")]
        return ["mine", number, any(base in kind.__mro__ for base in CONTAINERS), error]

    def decode(self, data: Any) -> Any:
        """The value that `encode` made JSON of. Raises ValueError or TypeError for what it did not make."""
        if type(data) is not list:
            return data
        name, *rest = data
        if name == "list":
            return [self.decode(each) if type(each) is list else each for each in rest]
        if name in PARTS:
            module, _, attribute = name.rpartition(".")
            return getattr(importlib.import_module(module), attribute)(*map(self.decode, rest))
        if name == "yours" and rest[0] in range(len(self.exported)):
            return self.exported[rest[0]]
        if name == "builtin" and (self.trusts or isinstance(getattr(builtins, rest[0]), type)):
            return getattr(builtins, rest[0])
        if name == "mine":
            number, has_data, error = rest
            if number not in self.remotes:
                self.remotes[number] = _error_class(*error) if error else Remote(self, int(number), bool(has_data))
            return self.remotes[number]
        raise ValueError(f"no value: {name!r}")


def _error_class(name: str, base: str) -> type:
    """A class for the other side's errors of one class; their attributes are asked for there."""
    parent = getattr(builtins, base)
    if not issubclass(parent, BaseException):
        raise TypeError(base)
    return type(name, (parent,), {"__getattr__": lambda self, key: getattr(_of(self), key)})


def _of(error: BaseException) -> Any:
    if not isinstance(error.__dict__.get("_remote"), Remote):
        raise AttributeError(type(error).__name__)
    return error.__dict__["_remote"]


def update(old: Any, new: Any) -> Any:
    """`new`, with the containers of `old` in the place of equal types, which are filled with the new contents."""
    if type(old) is not type(new):
        return new
    if isinstance(old, dict):
        items = {key: update(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(items)
    elif type(old) in (list, tuple):
        items = [update(*pair) for pair in zip(old, new, strict=False)] + list(new[len(old) :])
        if type(old) is list:
            old[:] = items
    elif type(old) is bytearray:
        old[:] = new
    elif type(old) is set:
        old.clear()
        old.update(new)
    elif f"{type(old).__module__}.{type(old).__qualname__}" == "collections.deque":
        old.clear()
        old.extend(new)
    else:
        return new
    return old


class Remote:
    """An object of the other process; what is done to it is done there.

    It equals no plain value, unless its class is derived from a container: then the copy of that container is compared
    here. Its operators take other objects of its process alone: the plain operand might be what a test expects.
    """

    _peer: Peer
    _number: int
    _has_data: bool

    def __init__(self, peer: Peer, number: int, has_data: bool):
        self.__dict__.update(_peer=peer, _number=number, _has_data=has_data)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._peer.ask("call", self, list(arguments), options)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._peer.ask("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._peer.ask("delitem", self, key)

    def __eq__(self, other: object) -> Any:
        if isinstance(other, Remote):
            return self is other or self._peer.ask("eq", self, other) is True
        return self._peer.ask("plain", self) == other if self._has_data else NotImplemented

    def __contains__(self, value: Any) -> bool:
        return any(each is value or each == value for each in self)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and self._peer.ask("isinstance", value, self) is True

    def __enter__(self) -> Any:
        return self._peer.ask("getattr", self, "__enter__")()

    def __exit__(self, *error: Any) -> Any:
        return self._peer.ask("getattr", self, "__exit__")(*(None for _ in error))


def _unary(name: str) -> Callable[[Remote], Any]:
    return lambda self: self._peer.ask(name, self)


def _binary(name: str) -> Callable[[Remote, Any], Any]:
    return lambda self, other: self._peer.ask(name, self, other) if isinstance(other, Remote) else NotImplemented


UNARY = ("len", "iter", "next", "bool", "str", "repr", "hash", "abs", "neg", "int", "float", "reversed")
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lt", "le", "gt",
          "ge")  # fmt: skip
for _name in UNARY:
    setattr(Remote, f"__{_name}__", _unary(_name))
for _name in BINARY:
    setattr(Remote, f"__{_name.strip('_')}__", _binary(_name))


# --- the program's side -----------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    return next(base(value) for base in CONTAINERS if isinstance(value, base))


def serve(read: int, write: int, guard: Sequence[str] = ()) -> None:
    """Run program.py as a module of its own, and answer calls of what it defines until the tests are over.

    The first message of the tests has the names that a program of their kind may use without importing them, as
    `bring_in` takes them, or None.
    """
    sys.set_int_max_str_digits(0)
    # Not __main__: what a program does when it is run as a script is not asked for.
    module = types.ModuleType("program")
    sys.modules["program"] = module
    space = vars(module)

    def name(key: str) -> Any:
        if key not in space:
            raise NameError(f"name {key!r} is not defined")
        return space[key]

    def function(key: str) -> Any:
        """The function of this name, or the method of the class Solution, as LeetCode asks for it."""
        return space[key] if key in space or "Solution" not in space else getattr(space["Solution"](), key)

    own = {"name": name, "function": function, "plain": _plain, "call": lambda f, given, named: f(*given, **named)}
    operations = {**vars(operator), **vars(builtins), **own}
    peer = Peer(read, write, lambda operation, *values: operations[operation](*values), trusts=True)
    with open("program.py", "rb") as file:  # noqa: PTH123
        source = file.read()
    sys.argv = ["program.py"]
    if guard:
        path, folder = guard
        hook: dict[str, Any] = {"__name__": "guard"}
        with open(path, "rb") as file:  # noqa: PTH123
            exec(compile(file.read(), path, "exec"), hook)
        hook["guard"](folder)
    _, given = peer.receive()
    if given is not None:
        sys.setrecursionlimit(50_000)  # as LiveCodeBench has it
        bring_in(space, given)
    with contextlib.suppress(SystemExit):  # what it has defined until then is there
        exec(compile(source, "program.py", "exec", dont_inherit=True), space)
    peer.send("ready")
    while True:
        peer.answer(*peer.receive()[1:])


def bring_in(space: dict[str, Any], names: Mapping[str, str]) -> None:
    """Put modules ("math") and attributes of modules ("math:inf") into a namespace, those that are installed."""
    for name, origin in names.items():
        module, _, attribute = origin.partition(":")
        with contextlib.suppress(ImportError):
            found = importlib.import_module(module)
            space[name] = getattr(found, attribute) if attribute else found


# --- the tests' side --------------------------------------------------------------------------------------------------


class Names(dict):
    """The builtins of tests; a name that is unknown is the program's, and one of `shadowed` if the program has it.

    What is of the `library` is not, also where it is not installed: the program would judge itself.
    """

    def __init__(self, peer: Peer, shadowed: Sequence[str], library: Iterable[str]):
        super().__init__(vars(builtins))
        self.peer, self.shadowed = peer, {name: self.pop(name) for name in shadowed}
        self.library = frozenset(library)

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or name in self.library:
            raise KeyError(name)
        return self.of_program(name)

    def of_program(self, name: str) -> Any:
        try:
            value = self.peer.ask("name", name)
        except NameError:
            if name not in self.shadowed:
                raise
            return self.shadowed[name]
        if isinstance(value, type) and issubclass(AssertionError, value):
            raise TypeError(f"{name} is {value.__name__}: `except {name}` would catch a failed assertion")
        return value


class LatePackages:
    """Finds installed packages when one is first imported: `site`, which takes milliseconds, runs then."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        sys.meta_path.remove(self)
        importlib.import_module("site").main()
        return importlib.import_module("importlib.util").find_spec(name)


def run_tests(job: Mapping[str, Any], read: int, write: int, passed: Callable[[int], None]) -> None:
    """Run the tests of a job, and call `passed` with the index of each that passes; with `whole`, up to a failure.

    A test is Python code, or a mapping with `function`, `arguments` and `results`, each of which is right. `uncalled`
    names functions and classes that tests define and do not use: those of pytest and unittest are run. `library` has
    the modules and attributes of modules that tests use without importing them, `given` those that the program may use
    so (`serve`), `shadowed` the builtins that the program may define.
    """
    sys.set_int_max_str_digits(0)
    sys.meta_path.append(LatePackages())
    module, solution = types.ModuleType("__main__"), types.ModuleType("solution")  # for unittest.main(); for KodCode
    sys.modules.update(__main__=module, solution=solution)
    space, sys.argv = vars(module), ["tests"]

    def perform(operation: str, value: Any, *rest: Any) -> Any:
        """The result of an operation on an object of a test that a program may do: a call, iteration, ...."""
        if id(value) not in peer.numbers:  # of builtins too, `type` could make it an answer that equals everything
            raise AttributeError(f"{operation} of what the tests did not give")
        is_own = type(value).__module__ == "__main__"
        if operation == "call" and callable(value):
            return value(*rest[0], **rest[1])
        if operation in ("iter", "next") and hasattr(value, "__next__"):
            return next(value) if operation == "next" else value
        if is_own and operation in ("getattr", "setattr") and not str(rest[0]).startswith("_"):
            return getattr(builtins, operation)(value, *rest)
        if is_own and operation in ("len", "iter", "bool", "str", "repr", "hash"):
            return getattr(builtins, operation)(value)
        if is_own and operation in ("eq", "lt", "getitem", "setitem"):
            return getattr(operator, operation)(value, *rest)
        raise AttributeError(f"{operation} of an object of the tests")

    peer = Peer(read, write, perform, trusts=False)
    try:
        peer.send("load", job["given"])
        if peer.receive() != ["ready"]:
            return
    except BaseException:  # a program that ends while it is loaded passes nothing
        return
    names = space["__builtins__"] = Names(peer, job["shadowed"], job["library"])

    def imported(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return names.of_program(name)

    vars(solution)["__getattr__"] = imported
    bring_in(space, job["library"])
    for index, test in enumerate(job["tests"]):
        try:
            if isinstance(test, dict):
                answer = peer.ask("call", peer.ask("function", test["function"]), test["arguments"], {})
                holds = any((as_lists(answer) == as_lists(result)) is True for result in test["results"])
            else:
                before = dict(space)
                exec(compile(test, "test", "exec", dont_inherit=True), space)
                for name in job["uncalled"]:
                    if name in space and space[name] is not before.get(name):
                        run_defined(name, space[name])
                holds = True
        except SystemExit as end:  # of unittest.main(), but not of the program
            holds = "_remote" not in vars(end) and isinstance(end.code, int | None) and not end.code
        except BaseException:
            holds = False
        if holds and not peer.is_gone:
            passed(index)
        elif job["whole"]:
            return


def run_defined(name: str, value: Any) -> None:
    """Run what pytest or unittest would run: a test function, the test methods of a class."""
    if isinstance(value, types.FunctionType) and name.startswith("test"):
        value()
    elif isinstance(value, type):
        unittest = sys.modules.get("unittest")
        if unittest is not None and issubclass(value, unittest.TestCase):
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result)
            if not result.wasSuccessful():
                raise AssertionError(name)
        elif name.startswith("Test"):
            for method in filter(lambda key: key.startswith("test"), vars(value)):
                instance = value()
                if (setup := getattr(instance, "setup_method", None)) is not None:
                    setup(*[getattr(instance, method)][: setup.__code__.co_argcount - 1])
                getattr(instance, method)()


def as_lists(value: Any) -> Any:
    """A value with lists in place of its tuples, which JSON does not have."""
    if isinstance(value, Remote) and value._has_data:
        value = value._peer.ask("plain", value)
    if type(value) in (list, tuple):
        return [as_lists(each) for each in value]
    return {key: as_lists(each) for key, each in value.items()} if type(value) is dict else value


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
