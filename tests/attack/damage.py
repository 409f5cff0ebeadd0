"""Files damaged by accident: flipped bits, lost, doubled, swapped and foreign bytes."""

import struct
from random import Random


def damaged(original: bytes, chance: Random) -> bytes:
    """Damage a file once, sometimes twice, in its header or its data."""
    result = original
    for _ in range(chance.choice([1, 1, 1, 2])):
        result = chance.choice(KINDS)(result, chance) if result else result
    return result


def flip(data: bytes, chance: Random) -> bytes:
    result = bytearray(data)
    start, stop = _region(data, chance)
    for _ in range(chance.choice([1, 1, 1, 2, 8])):
        result[chance.randrange(start, stop)] ^= 1 << chance.randrange(8)
    return bytes(result)


def cut(data: bytes, chance: Random) -> bytes:
    at = chance.randrange(*_region(data, chance))
    return chance.choice([data[:at], data[:at], data[at:]])


def insert(data: bytes, chance: Random) -> bytes:
    at = chance.randrange(*_region(data, chance))
    return data[:at] + chance.randbytes(_length(chance)) + data[at:]


def append(data: bytes, chance: Random) -> bytes:
    return data + chance.choice([b"\0", b" ", chance.randbytes(64)]) * chance.choice([1, 8, 100])


def remove(data: bytes, chance: Random) -> bytes:
    at = chance.randrange(*_region(data, chance))
    return data[:at] + data[at + _length(chance) :]


def double(data: bytes, chance: Random) -> bytes:
    at, length = chance.randrange(*_region(data, chance)), _length(chance)
    return data[: at + length] + data[at:]


def swap(data: bytes, chance: Random) -> bytes:
    start, stop = _region(data, chance)
    length = min(_length(chance), (stop - start) // 2)
    one = chance.randrange(start, stop - 2 * length + 1)
    other = chance.randrange(one + length, stop - length + 1)
    first, second = data[one : one + length], data[other : other + length]
    return data[:one] + second + data[one + length : other] + first + data[other + length :]


def overwrite(data: bytes, chance: Random) -> bytes:
    at, length = chance.randrange(*_region(data, chance)), _length(chance)
    other = chance.choice([bytes(length), b"\xff" * length, chance.randbytes(length), b" " * length])
    return data[:at] + other[: len(data) - at] + data[at + length :]


KINDS = (flip, flip, cut, insert, append, remove, double, swap, overwrite)


def _region(data: bytes, chance: Random) -> tuple[int, int]:
    """Choose where: in the length of the header, in the header, in the data, or anywhere."""
    length = len(data)
    header = 8 + struct.unpack("<Q", data[:8].ljust(8, b"\0"))[0]
    regions = [(0, min(8, length)), (0, length)]
    if 8 < header < length:
        regions += [(8, header), (8, header), (header, length), (header, length)]
    return chance.choice(regions)


def _length(chance: Random) -> int:
    return chance.choice([1, 1, 2, 8, 64, 1000])
