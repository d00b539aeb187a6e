"""The function library's text agrees with what Python says of it."""

import json
import re
from pathlib import Path

from ledger import answers, fairness, keys, tokens
from ledger.functions import calls
from ledger.rows import STORED, Kind

LUA = calls.library()
ACL = json.loads(Path(calls.__file__).with_name("acl.json").read_text())
# Rights of the connection, not of a function: calling it, loading it, and reading the rows for a check.
NOT_CALLED = {"fcall", "function|load"}


def test_the_users_together_may_call_exactly_what_the_functions_call() -> None:
    called = {name.lower() for name in re.findall(r"redis\.call\('(\w+)'", LUA)}
    granted = {right.removeprefix("+") for rights in ACL["users"].values() for right in rights}
    assert granted - NOT_CALLED == called


def test_no_process_may_empty_the_ledger_or_replace_its_functions() -> None:
    for role in ("router", "worker", "settler", "release"):
        assert not {"+scan", "+unlink", "+function|load"} & set(ACL["users"][role])


def test_every_function_says_its_arguments_and_its_answer() -> None:
    registered = re.findall(r"register_function\('switchyard_(\w+)', (\w+)\)", LUA)
    assert len(registered) == 14
    for name, function in registered:
        assert name == function
        header = re.search(rf"((?:-- .*\n)+)local function {name}\(keys, args\)", LUA)
        assert header is not None, name
        assert header[1].startswith(f"-- {name}:")
        assert "ARGS:" in header[1]
        assert "->" in header[1]


def test_every_key_lies_under_the_one_hash_tag_and_names_its_source() -> None:
    assert all(key.startswith(keys.PREFIX) for key in keys.SOURCES)
    assert set(keys.BOOKS) <= set(keys.SOURCES)
    assert re.findall(r"'(\{switchyard\}:[^']*)'", LUA) == [keys.PREFIX, keys.PATTERN]
    derived = {keys.PREFIX + name for name in re.findall(r"= PREFIX \.\. '([a-z:]+)'", LUA)}
    assert derived == {keys.JOB_PREFIX, keys.SPENT, keys.ASKED_PREFIX}
    assert ACL["keys"] == [f"~{keys.PATTERN}"]


def test_every_field_the_functions_write_is_a_field_of_a_row() -> None:
    written = re.findall(r"redis\.call\('HSET', (?:keys\[5\]|row_key), ([^)]*(?:\([^)]*\)[^)]*)*)\)", LUA)
    named = {field for call in written for field in re.findall(r"'([a-z]\w*)', ", call)}
    assert {"kind", "body", "ended", "request"} <= named <= {*STORED, *Kind}


def test_the_limits_are_the_same_on_both_sides() -> None:
    assert f"local DECISION_BYTES_MAX = {answers.DECISION_BYTES_MAX}" in LUA
    for name in (
        "OUTPUT_COST, LOAD_COST_PER_MS, WEIGHT_UNIT",
        "PERIOD_US, PERIODS, ACTIVE_US",
        "SEEN_US, WAITING_US, HEADROOM_PART",
    ):
        values = ", ".join(str(getattr(fairness, part)) for part in name.split(", "))
        assert f"local {name} = {values}" in LUA
    assert f"local BUCKET_US, BUCKETS, DAY_US = {tokens.BUCKET_US}, {tokens.BUCKETS}, {tokens.DAY_US}" in LUA
    assert f"local INTEGER_MAX = {2**53 - 1}" in LUA
