"""What the tests of files share: the error that a file gets, and safetensors files made by hand."""

import json

import pytest

from shardrules import FileError


def message(call, source):
    """Of the FileError that the source must get; it starts with the source."""
    with pytest.raises(FileError) as info:
        call(str(source))
    assert str(info.value).startswith(str(source))
    return str(info.value)


def header_file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data
