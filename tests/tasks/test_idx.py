import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.embed import encode_idx

from anyfleet.errors import MissingData
from anyfleet.tasks.idx import read_idx

ARRAY = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("ending", "compress"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)]
)
def test_plain_and_compressed_files_read_alike(tmp_path: Path, ending: str, compress: type) -> None:
    (tmp_path / f"a{ending}").write_bytes(compress(encode_idx(ARRAY)))
    read = read_idx(tmp_path, "a")
    assert read.dtype == np.uint8
    assert np.array_equal(read, ARRAY)


def test_header_is_the_published_one() -> None:
    # The MNIST page: two zero bytes, 0x08 for bytes, number of dimensions, sizes big-endian.
    assert encode_idx(ARRAY)[:16] == bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="images"):
        read_idx(tmp_path, "images")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x00\x00",
        b"\x00\x00\x0d\x01\x00\x00\x00\x00",  # floats
        encode_idx(ARRAY)[:-1],
        encode_idx(ARRAY) + b"x",
        b"\x00\x00\x08\x03\x00\x00",  # header cut short
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a").write_bytes(raw)
    with pytest.raises(ValueError, match="fetch it again"):
        read_idx(tmp_path, "a")


def test_damaged_compression_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(encode_idx(ARRAY))
    for number, raw in enumerate([b"no gzip", whole[:-9], whole[:12] + b"\xff\xff" + whole[14:]]):
        (tmp_path / f"{number}.gz").write_bytes(raw)
        with pytest.raises(ValueError, match="fetch it again"):
            read_idx(tmp_path, str(number))
    (tmp_path / "x.xz").write_bytes(b"no xz")
    with pytest.raises(ValueError, match="fetch it again"):
        read_idx(tmp_path, "x")


@given(raw=st.binary(max_size=40))
def test_any_bytes_are_read_or_refused_with_a_reason(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "any").write_bytes(raw)
    try:
        array = read_idx(folder, "any")
    except ValueError as error:
        assert "fetch it again" in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert encode_idx(array) == raw
