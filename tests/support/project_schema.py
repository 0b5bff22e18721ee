"""The JSON schema of project files for editors: `python -m tests.support.project_schema` writes it."""

from __future__ import annotations

import json

from shardrules._cli.project import parameters, types_of
from tests.support.folders import ROOT

SCHEMA = ROOT / "docs" / "shardrules.schema.json"
_OF_TYPE = {
    str: {"type": "string", "minLength": 1},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    list: {"type": "array"},
    dict: {"type": "object"},
}


def schema():
    keys = {}
    for key, parameter in parameters().items():
        forms = [_OF_TYPE[kind] for kind in dict.fromkeys(types_of(parameter))]
        keys[key] = {
            **(forms[0] if len(forms) == 1 else {"anyOf": forms}),
            "description": parameter.help,
        }
    some = {"type": "object", "minProperties": 1}
    job = {"type": "object", "additionalProperties": False, "properties": keys}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "shardrules.toml, or [tool.shardrules] of pyproject.toml",
        "type": "object",
        "additionalProperties": False,
        "required": ["jobs"],
        "properties": {**keys, "jobs": {**some, "additionalProperties": job}},
    }


def written():
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(written(), encoding="utf-8")
