"""Reads YAML from standard input, holds each object to its schema where asked to, and prints all of them as JSON.

Kubernetes' own objects are held to the strict schemas of the version named below, in which an unknown field is a fault;
those of others to the schemas in this folder.
"""

import json
import pathlib
import sys

import jsonschema
import kubernetes_validate
import yaml

VERSION = "1.37"
SCHEMAS = pathlib.Path(__file__).parent / "schemas"


def faults(data):
    """What is wrong with an object, a line each."""
    group, _, _ = data["apiVersion"].rpartition("/")
    name = f"{data['kind']} {data['metadata']['name']}"
    own = SCHEMAS / f"{group}.{data['kind']}.json"
    if own.exists():
        validator = jsonschema.Draft202012Validator(json.loads(own.read_text()))
        for fault in validator.iter_errors(data):
            yield f"{name}: {'.'.join(map(str, fault.path))}: {fault.message}"
        return
    try:
        kubernetes_validate.validate(data, VERSION, strict=True)
    except kubernetes_validate.ValidationError as fault:
        yield f"{name}: {'.'.join(map(str, fault.path))}: {fault.message}"
    except kubernetes_validate.SchemaNotFoundError as fault:
        yield f"{name}: {fault.message}, nor is there {own.name}"


objects = [data for data in yaml.safe_load_all(sys.stdin) if data is not None]
found = [fault for data in objects for fault in faults(data)] if "--validate" in sys.argv else []
if found:
    sys.exit("\n".join(found))
json.dump(objects, sys.stdout)
