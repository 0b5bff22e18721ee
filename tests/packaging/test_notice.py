"""NOTICE names every project that the data of the package and of its tests come from."""

import gzip
import json
import re
import tomllib

from tests.support.folders import ROOT

NOTICE = (ROOT / "NOTICE").read_text()
DATA = ROOT / "tests" / "data"


def test_every_source_of_data_is_named():
    packed = [DATA / "rules.json.gz", *DATA.glob("manifests/*.gz")]
    texts = [json.dumps(json.loads(gzip.decompress(path.read_bytes()))) for path in packed]
    sources = [source for text in texts for source in re.findall(r'"source": "([^"]*)"', text)]
    assert len(sources) > 130
    projects = {name for source in sources for name in re.findall(r"github:([\w-]+/[\w-]+)", source)}
    assert len(projects) > 15
    assert [name for name in sorted(projects) if f"github.com/{name} " not in NOTICE] == []
    packages = {name for source in sources for name in re.findall(r"(\w+)==", source)}
    assert packages == {"transformers", "maxtext"}
    assert all(f"/{name} " in NOTICE for name in packages)


def test_data_of_the_examples_is_named():
    data = (ROOT / "examples" / "demo_data").iterdir()
    assert all(f"examples/demo_data/{path.name}\n" in NOTICE for path in data)


def test_the_wheel_has_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license-files"] == ["LICENSE", "NOTICE"]
