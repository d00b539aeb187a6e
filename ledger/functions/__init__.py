"""The Redis function library `switchyard` and the commands each Redis user may call (acl.json)."""
