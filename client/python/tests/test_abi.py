# SPDX-License-Identifier: Apache-2.0
"""The binding against the header: offsets by a compiler, names by reading."""

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import kvpack
import pytest
from kvpack import _abi, errors

TOP = Path(os.environ.get("KVP_TOP", Path(__file__).parents[3]))
HEADER = (TOP / "client/kvpack.h").read_text()

STRUCTS = [
    value
    for name, value in vars(_abi).items()
    if isinstance(value, type) and issubclass(value, ctypes.Structure) and name.startswith("kvp_")
]


def measured(tmp_path):
    """What a C compiler says: {(struct, field): (offset, size)}; field "" is the struct."""
    lines = ['#include <stdio.h>', '#include "client/kvpack.h"', "int main(void) {"]
    for struct in STRUCTS:
        name = f"struct {struct.__name__}"
        lines.append(f'printf("{struct.__name__} - 0 %zu\\n", sizeof({name}));')
        for field, *_ in struct._fields_:
            lines.append(
                f'printf("{struct.__name__} {field} %zu %zu\\n", offsetof({name}, {field}), '
                f"sizeof((({name} *)0)->{field}));"
            )
    lines.append("return 0; }")
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text("\n".join(lines))
    subprocess.run(["cc", f"-I{TOP}", "-o", program, source], check=True)
    text = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    found = {}
    for line in text.splitlines():
        struct, field, offset, size = line.split()
        found[struct, field.strip("-")] = int(offset), int(size)
    return found


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_struct_layouts(tmp_path):
    expected = {}
    for struct in STRUCTS:
        expected[struct.__name__, ""] = 0, ctypes.sizeof(struct)
        for field, *_ in struct._fields_:
            member = getattr(struct, field)
            expected[struct.__name__, field] = member.offset, member.size
    assert measured(tmp_path) == expected


def test_all_structs_and_fields_are_bound():
    for name, body in re.findall(r"^struct (kvp_\w+) \{(.*?)^\};", HEADER, re.M | re.S):
        body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
        names = [part.split("[")[0].split() for part in re.split("[;,]", body)]
        fields = [words[-1].strip("*") for words in names if words]
        bound = [field for field, *_ in getattr(_abi, name)._fields_]
        assert bound == fields, name


def test_all_functions_are_bound():
    symbols = (TOP / "client/libkvpack.sym").read_text()
    listed = set(re.findall(r"^\s+(kvp_\w+);", symbols, re.M))
    assert set(_abi.PROTOTYPES) == listed


def enumerators(prefix, header=HEADER):
    found = re.findall(rf"^\s+{prefix}(\w+) = (\d+),", header, re.M)
    return {name: int(value) for name, value in found}


def test_statuses_phases_classes_roles():
    statuses = {"OK": 0, **enumerators("KVP_STATUS_")}
    assert {status.name: status.value for status in kvpack.Status} == statuses
    phases = {k: v for k, v in enumerators("KVP_ROOM_").items()}
    assert {phase.name: phase.value for phase in kvpack.Phase} == phases
    for member in kvpack.EntryClass:
        assert re.search(rf"KVP_{member.name} = {member.value}\b", HEADER)
    for member in kvpack.Role:
        assert re.search(rf"KVP_ROLE_{member.name} = {member.value}\b", HEADER)
    for what in ("READY", "TERMINAL", "RELEASED"):
        assert re.search(rf"KVP_WAIT_{what} = {getattr(_abi, 'WAIT_' + what)}\b", HEADER)


def test_status_names_are_those_of_the_library():
    for status in kvpack.Status:
        assert _abi.lib().kvp_status_name(status).decode() == status.name.lower()


def test_an_exception_class_for_each_status():
    assert len(errors.BY_STATUS) == len(kvpack.Status) - 1
    for status, cls in errors.BY_STATUS.items():
        error = errors.error_of(status, "why", retry=True)
        assert type(error) is cls and error.status is status and error.retry
        assert isinstance(error, kvpack.KvpackError) and str(error) == "why"
        assert cls.__name__ in kvpack.__all__
    assert type(errors.error_of(999, "new")) is kvpack.KvpackError
