"""The JSON schema of project files for editors: `python -m tests.support.project_schema` writes it."""

from __future__ import annotations

import json

from shardrules._cli.options import GROUP_OF, GROUPS
from shardrules._cli.project import forms
from shardrules._plan.files.project import ARGUMENTS
from tests.support.folders import ROOT

SCHEMA = ROOT / "docs" / "shardrules.schema.json"
_TEXT = {"type": "string"}
_LIST = {"type": "array", "items": _TEXT}
_TABLE = {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}
_OF_FORM = {
    "flag": {"type": "boolean"},
    "number": {"type": ["string", "integer"]},
    "text": _TEXT,
    "table": {"anyOf": [_TEXT, _TABLE]},
    "list": {"anyOf": [_TEXT, _LIST]},
    "tables": {"anyOf": [_TEXT, _LIST, _TABLE]},
    "lists": {"anyOf": [_TEXT, _LIST]},
}
_ABOUT = {
    "model": "The model that check and diff plan: a file, or package.module:function.",
    "function": "package.module:function, which prove compiles.",
    "before": "The lock or model that diff compares the model with.",
}


def schema():
    keys = {
        key: {"type": "string", "minLength": 1, "description": _ABOUT[key]} for key in ARGUMENTS
    }
    for key, form in forms().items():
        option = key.replace("-", "_")
        known = _OF_FORM.get(form) or {"enum": form[1:-1].split(",")}
        keys[key] = {**known, "description": GROUPS[GROUP_OF[option]][option][1]}
    has_either = {"anyOf": [{"required": ["model"]}, {"required": ["function"]}]}
    some = {"type": "object", "minProperties": 1}
    job = {"type": "object", "additionalProperties": False, "properties": keys}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "shardrules.toml, or [tool.shardrules] of pyproject.toml",
        "type": "object",
        "additionalProperties": False,
        "required": ["jobs"],
        "properties": {**keys, "jobs": {**some, "additionalProperties": job}},
        "anyOf": [
            *has_either["anyOf"],
            {"properties": {"jobs": {"additionalProperties": has_either}}},
        ],
    }


def written():
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(written(), encoding="utf-8")
