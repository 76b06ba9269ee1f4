"""Reads what a report's page carries, as its script does."""

import base64
import json
import re
import zlib

import numpy as np


def unpacked(text):
    return zlib.decompress(base64.b64decode(text), -zlib.MAX_WBITS)


def columns_of(text):
    """(about, columns) of a section of columns."""
    line, _, rest = unpacked(text).partition(b"\n")
    header, at, found = json.loads(line), 0, {}
    for name, length, width in header["columns"]:
        planes = np.frombuffer(rest[at : at + length * width], dtype=np.uint8).reshape(width, length).astype(np.int64)
        found[name] = (planes * (256 ** np.arange(width, dtype=np.int64))[:, None]).sum(axis=0) - 1
        at += length * width
    assert at == len(rest)
    return header["about"], found


def sections_of(path):
    """The contents of a report's sections, by their ids."""
    found = re.findall(r'<script type="text/plain" id="([^"]+)">([^<]*)</script>', path.read_text(encoding="utf-8"))
    return dict(found)


def report_of(path):
    return json.loads(unpacked(sections_of(path)["report"]))
