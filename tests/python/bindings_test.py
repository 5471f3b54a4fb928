"""The declarations in baton/_library.py against the headers: the same functions, with as many arguments, and structs
of the same fields."""
# Promise(python): Python's declarations of the library are those of its headers | a test reads both
import re
import sys

from baton import _library, _requests

HEADER = re.sub(r"//[^\n]*", "", "".join(open(name, encoding="utf8").read() for name in sys.argv[1:]))
DECLARED = {name: [] if arguments.strip() == "void" else arguments.split(",")
            for name, arguments in re.findall(r"\bbaton_([a-z0-9_]+)\(([^()]*)\);", HEADER)}
STRUCTS = {"error": _library.Error, "bytes": _library.Bytes, "agent_options": _library.Options,
           "agent_stats": _library.Stats, "telemetry": _library.Telemetry, "kv_model": _library.KvModel,
           "kv_group": _library.KvGroup, "kv_paged": _library.KvPaged, "kv_field": _library.KvField,
           "kv_share": _library.KvShare, "kv_plan_info": _library.KvPlanInfo,
           "kv_blocks": _library.KvBlocks,
           "kv_request": _library.KvRequest, "kv_connector_options": _library.KvConnectorOptions,
           "kv_connector_stats": _library.KvConnectorStats, "kv_load": _library.KvLoad, "kv_job": _library.KvJob,
           "kv_binding": _library.KvBinding, "kv_run": _library.KvRun,
           "kv_session_order": _library.KvOrder, "kv_loaded": _library.KvLoaded, "endpoint_options": _library.EndpointOptions, "place": _library.Place,
           "comm_options": _library.CommOptions, "comm_stats": _library.CommStats, "call": _library.Call,
           "experts_options": _library.ExpertsOptions, "expert_group": _library.ExpertGroup,
           "expert_rows": _library.ExpertRows, "stream": _library.Stream, "access": _library.Access}
complaints = [f"{name}: in one of the two only" for name in set(DECLARED) ^ set(_library._PROTOTYPES)]
for each, (_, types) in _library._PROTOTYPES.items():
    if len(types) != len(DECLARED.get(each, types)):
        complaints.append(f"{each}: {len(types)} arguments here, {len(DECLARED[each])} in the header")
for each, struct in STRUCTS.items():
    body = re.search(r"typedef struct baton_%s \{(.*?)\}" % each, HEADER, re.DOTALL).group(1)
    fields = re.findall(r"(\w+)\s*(?:\[\d+\])?\s*[,;]", body)
    if fields != [name for name, _ in struct._fields_]:
        complaints.append(f"{each}: {fields} in the header")
for each in ("IN_PROGRESS", "ERR_NOT_FOUND", "ERR_TIMEOUT"):
    number = int(re.search(r"BATON_%s = (-?\d+)" % each, HEADER).group(1))
    if number != getattr(_library, each.replace("ERR_", "")):
        complaints.append(f"{each} is {number} in the header")
for prefix, table in (("type", _requests.TYPES), ("reduction", _requests.OPS), ("call_kind", _requests.KINDS)):
    body = re.search(r"typedef enum baton_%s \{(.*?)\}" % prefix, HEADER, re.DOTALL).group(1)
    numbers = [int(number) for number in re.findall(r"= (\d+)", body)]
    if sorted(table.values()) != numbers:
        complaints.append(f"{prefix}: {table} here, {numbers} in the header")
print("\n".join(complaints) or f"{len(DECLARED)} functions and {len(STRUCTS)} structs: ok")
sys.exit(1 if complaints else 0)
