"""Inspection of a pickle of torch.save, which torch before 2.10 does not do (CVE-2026-24747)."""

import io
import pickle
from collections import OrderedDict
from pickletools import genops, markobject
from typing import Any, BinaryIO

MAX_SHARING = 10  # times that a container occurs, on average
LARGE = 2**60  # many larger integers can have one hash, 2**61 - 1 being the modulus
MAX_LARGE = 500  # integers in a pickle; a dict takes the square of their number to build
NESTING = ("GET", "DUP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET")  # opcodes
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
        # As torch words its refusal of a class.
        raise pickle.UnpicklingError(f"GLOBAL {type(self).__module__}.{type(self).__name__}")


def check_tuples(file: BinaryIO) -> None:
    """Check that the keys in the pickle that `file` is at can be hashed and compared soon.

    To hash a key of 60 tuples, each of which is twice in the next one, would take for ever. This
    follows the opcodes with numbers of elements in place of the objects. It raises RecursionError
    for such tuples, and for many large integers; any exception if the pickle is altered otherwise.
    """
    stack: list[Any] = []  # elements of tuples, with the nested ones; 0: others; None: a mark
    memo: dict[Any, Any] = {}
    total = num_large = 0
    for count, (opcode, argument, _) in enumerate(genops(file)):
        if opcode.name.endswith(("PUT", "MEMOIZE")):
            memo[len(memo) if argument is None else argument] = stack[-1]
            continue
        items = [memo[argument]] if opcode.name.endswith("GET") else []
        operands = opcode.stack_before
        if markobject in operands:
            operands = operands[: operands.index(markobject)]
            while (item := stack.pop()) is not None:
                items.append(item)
        items += [stack.pop() for _ in operands]
        elements = sum(items) + len(items) if opcode.name.endswith(NESTING) else 0
        total += elements * len(opcode.stack_after)
        num_large += isinstance(argument, int) and abs(argument) >= LARGE
        if total > MAX_SHARING * (1000 + count) or num_large > MAX_LARGE:
            raise RecursionError
        stack += [None if result is markobject else elements for result in opcode.stack_after]


def check_storages(pickled: bytes, records: dict[str, int]) -> None:
    """Check that each storage is as large as its record, and that only dicts and lists take items.

    Nothing of the pickle is imported or called: its objects are placeholders.

    Args:
        records: sizes of the archive's records, in bytes, by the storages' keys.

    Raises any exception if the pickle is altered.
    """
    _Inspector(pickled, records).load()


class _Inspector(pickle.Unpickler):
    def __init__(self, pickled: bytes, records: dict[str, int]) -> None:
        super().__init__(io.BytesIO(pickled))
        self.records = records

    def find_class(self, module: str, name: str) -> type:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return type(name, (Placeholder,), {"__module__": module})

    def persistent_load(self, pid: Any) -> Placeholder:
        _, kind, key, _, count = pid
        if count * ITEM_SIZES.get(kind.__name__, 1) > self.records[key]:
            raise pickle.UnpicklingError(f"storage {key} is larger than its record")
        return Placeholder()
