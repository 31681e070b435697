"""Inspection of a pickle of torch.save, which torch before 2.10 does not do (CVE-2026-24747)."""

import io
import pickle
from collections import Counter, OrderedDict
from functools import partial
from pickletools import genops, markobject
from typing import Any, BinaryIO, NoReturn

NUM_OLD_PICKLES = 5  # in a file of torch before 1.6; the last two: content, keys of storages
# What torch.save writes as calls. torch.load calls others with any arguments, such as the size of a
# tensor without values, another function, or a tensor of one value that is expanded and copied.
PARAMETERS = ("_rebuild_parameter", "_rebuild_parameter_with_state", "Parameter")
TENSORS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
CALLED = (*PARAMETERS, *TENSORS, "complex", "device", "_get_layout")
HASHING = {"OrderedDict": OrderedDict, "Counter": Counter, "set": set}
MAX_SHARING = 10  # times that a container or text occurs, on average
LARGE = 2**60  # many larger integers can have one hash, 2**61 - 1 being the modulus
MAX_NAMES = 10_000  # of classes and functions
MAX_LARGE = 500  # such integers, or tuples as keys; a dict takes the square of their number
MAX_CONTAINERS = 1_000_000  # of one byte each, they would take 300 times the memory
CONTAINERS = ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET", "DICT", "LIST")  # opcodes
COPYING = ("GET", "DUP")
NESTING = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET")
# Bytes of an element, by the name of the storage's class.
ITEM_SIZES = (
    dict.fromkeys(("ComplexDoubleStorage",), 16)
    | dict.fromkeys(("DoubleStorage", "LongStorage", "ComplexFloatStorage"), 8)
    | dict.fromkeys(("FloatStorage", "IntStorage", "QInt32Storage"), 4)
    | dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2)
)  # 1 for all others, which are bytes


class Placeholder:
    """An object of any class of a pickle. It takes attributes, but no items."""

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        self.extend([value])

    def extend(self, items: Any) -> None:
        raise _refusal(type(self))


class NotCalled(Placeholder):
    """A class or a function of which a pickle may hold the name alone."""

    def __new__(cls, *args: Any) -> NoReturn:  # type: ignore[misc]
        raise _refusal(cls)


def _refusal(kind: type) -> pickle.UnpicklingError:
    """Return an exception in torch's words."""
    return pickle.UnpicklingError(f"GLOBAL {kind.__module__}.{kind.__name__}")


def _hashed(kind: type, items: Any = ()) -> Any:
    """Return a dict or set of `items`, which no placeholder is, unless many can have one hash."""
    keys = [item[0] for item in items] if kind is OrderedDict else items
    if sum(isinstance(key, tuple | Placeholder) for key in keys) > MAX_LARGE:
        raise pickle.UnpicklingError("too many keys may have one hash")
    return kind(items)


def check_tuples(file: BinaryIO) -> None:
    """Check that the keys in the pickle at the position of `file` are hashed and compared quickly.

    Hashing a key of 60 tuples, each of which is twice in the next one, would take 2**60 steps. The
    opcodes are followed with numbers of elements in place of the objects.

    Raises RecursionError for such tuples, for many large integers or tuples as keys, which can all
    have one hash, and for too many containers; any exception if the pickle is altered otherwise.
    """
    stack: list[Any] = []  # elements of tuples, with the nested ones; 0: others; None: a mark
    memo: dict[Any, Any] = {}
    total = num_large = num_containers = 0
    for count, (opcode, argument, _) in enumerate(genops(file)):
        if opcode.name.endswith(("PUT", "MEMOIZE")):
            if argument is not None and argument > count:  # an array of this size would be made
                raise RecursionError
            memo[len(memo) if argument is None else argument] = stack[-1]
            continue
        items = [memo[argument]] if opcode.name.endswith("GET") else []
        operands = opcode.stack_before
        if markobject in operands:
            operands = operands[: operands.index(markobject)]
            while (item := stack.pop()) is not None:
                items.append(item)
        items += [stack.pop() for _ in operands]
        is_copied = opcode.name.endswith(COPYING)  # any object, such as the name of a moment
        elements = sum(items) if is_copied else 0
        if opcode.name.endswith(NESTING):
            elements = sum(items) + len(items)
        elif opcode.name in ("REDUCE", "NEWOBJ"):  # a complex number or a torch.Size, perhaps
            elements = 1
        total += (elements + is_copied) * len(opcode.stack_after)
        num_containers += opcode.name in CONTAINERS
        num_large += isinstance(argument, int) and abs(argument) >= LARGE
        if opcode.name.startswith(("SETITEM", "ADDITEMS")):  # last one first: value, key, …; dict
            num_large += sum(map(bool, items[1::2] if opcode.name[0] == "S" else items))
        is_large = num_large > MAX_LARGE or num_containers > MAX_CONTAINERS
        if is_large or total > MAX_SHARING * (1000 + count):
            raise RecursionError
        stack += [None if result is markobject else elements for result in opcode.stack_after]


def check_storages(pickled: bytes, records: dict[str, int]) -> None:
    """Check that tensors have values in the archive, and that only dicts and lists take items.

    Nothing of the pickle is imported or called: its objects are placeholders.

    Args:
        records: sizes of the archive's records, in bytes, by the storages' keys.

    Raises any exception if the pickle is altered.
    """
    inspector = _Inspector(io.BytesIO(pickled))
    inspector.load()
    if any(size > records[key] for key, size in inspector.sizes.items()):
        raise pickle.UnpicklingError("a storage is larger than its record")


def check_old_storages(content: bytes) -> None:
    """Check a file of torch before 1.6 as `check_storages` does, but for sizes, as torch does."""
    file = io.BytesIO(content)
    inspectors = [_Inspector(file) for _ in range(NUM_OLD_PICKLES)]
    *_, keys = [inspector.load() for inspector in inspectors]
    if not inspectors[-2].sizes.keys() <= set(keys):
        raise pickle.UnpicklingError("a storage is not in the file")


class _Inspector(pickle.Unpickler):
    """Unpickler of placeholders.

    Attributes:
        sizes: of the storages, in bytes, by their keys.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.sizes: dict[str, int] = {}
        self.num_names = 0

    def find_class(self, module: str, name: str) -> Any:
        self.num_names += 1
        if self.num_names > MAX_NAMES:
            raise pickle.UnpicklingError("too many names")
        if module in ("collections", "builtins", "__builtin__") and name in HASHING:
            return partial(_hashed, HASHING[name])
        if (module, name) == ("torch", "Size"):
            return tuple
        kind = Placeholder if name in CALLED else NotCalled
        return type(name, (kind,), {"__module__": module})

    def persistent_load(self, pid: Any) -> Placeholder:
        if pid[0] == "module":  # as in files of torch before 1.6
            raise _refusal(pid[1])
        _, kind, key, _, count, *_ = pid
        size = count * ITEM_SIZES.get(kind.__name__, 1)
        self.sizes[key] = max(size, self.sizes.get(key, 0))
        return Placeholder()
