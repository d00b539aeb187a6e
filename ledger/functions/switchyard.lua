#!lua name=switchyard
-- The ledger's functions: each one changes all it names, or nothing.
--
-- KEYS, for every function: 1 gate, 2 leases, 3 tenants, 4 windows, 5 references, 6 the job's row (ledger/keys.py).
-- ARGS[1] is always the job as `<tenant>/<job id>` ('' where no job is meant). Every answer begins {word, ARGS[1], ...}, so
-- that the caller can tell an answer to another's question. Numbers are integers below 2^53; names end with their
-- unit; time is Redis' own. Arguments are checked before the first write, since a failing function is not rolled back.

local ROW_PREFIX = '{switchyard}:job:'
local INTEGER_MAX = 9007199254740991
local PUT_MS_MIN = 3600000
local DECISION_BYTES_MAX = 65536
local TEXT_BYTES_MAX = 2048

local function text(number)
  return string.format('%.0f', number)
end

local function refuse_unless(right, what)
  if not right then error({err = 'BADARG ' .. what}) end
end

local function integer(argument, what)
  local right = argument and string.match(argument, '^%d+$') and #argument <= 16
  refuse_unless(right and tonumber(argument) <= INTEGER_MAX, what)
  return tonumber(argument)
end

local function word(argument, what, bytes_max)
  refuse_unless(argument and #argument > 0 and #argument <= (bytes_max or TEXT_BYTES_MAX), what)
  return argument
end

local function member_of(argument)
  refuse_unless(argument and #argument <= 256 and string.match(argument, '^[a-z0-9-]+/.+$'), 'job')
  return argument
end

local function now_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- A server process has one run id and loads the library anew, so that it is asked once.
local known_run_id
local function run_id()
  known_run_id = known_run_id or string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  return known_run_id
end

-- {open, epoch} of this server's gate; nil for one that another server process left behind, or none.
local function gate(keys)
  local stored = redis.call('HMGET', keys[1], 'run_id', 'epoch', 'open')
  if not stored[2] or stored[1] ~= run_id() then return nil end
  return {open = stored[3] == '1', epoch = stored[2]}
end

local function open_gate(keys)
  local found = gate(keys)
  return found and found.open and found or nil
end

local function drop(key, field)
  if redis.call('HINCRBY', key, field, -1) <= 0 then redis.call('HDEL', key, field) end
end

local function take(keys, member, row)
  redis.call('ZADD', keys[2], row.lease_us, member)
  redis.call('HINCRBY', keys[3], string.match(member, '^[^/]+'), 1)
  redis.call('HINCRBY', keys[4], row.window, 1)
  redis.call('HINCRBY', keys[5], row.digest, 1)
end

-- End a lease: place, concurrency and reference together.
local function release(keys, member, row_key)
  redis.call('ZREM', keys[2], member)
  local row = redis.call('HMGET', row_key, 'held', 'window', 'digest')
  if row[1] ~= '1' then return end
  redis.call('HDEL', row_key, 'held')
  drop(keys[3], string.match(member, '^[^/]+'))
  drop(keys[4], row[2])
  drop(keys[5], row[3])
end

-- End the leases whose time is over, at most `count_max` of them: what is left counts as held, never the reverse.
local function sweep(keys, now, count_max)
  local over = redis.call('ZRANGE', keys[2], '-inf', text(now), 'BYSCORE', 'LIMIT', 0, count_max)
  for _, member in ipairs(over) do release(keys, member, ROW_PREFIX .. member) end
end

-- What an earlier call decided on a job; nil when nothing did.
local function remembered(row_key, member, body)
  local row = redis.call('HMGET', row_key, 'kind', 'body', 'ingress', 'decision', 'admitted_us', 'lease_us', 'epoch',
    'reason', 'message')
  local kind = row[1]
  if not kind then return nil end
  if kind == 'cancelled' then return {'taken_back', member} end
  if kind == 'settled' then return {'ended', member} end
  if row[2] ~= body then return {'differs', member} end
  if kind == 'refused' then return {'refused', member, row[8], row[9], row[3]} end
  return {'granted', member, row[4], row[3], row[5], row[6], row[7]}
end

-- admit: a lease, whole or not at all. KEYS[7]: the memory of a capacity refusal of this ingress record.
-- ARGS: job, tenant, body hash, ingress, interactive (0|1), digest, window, concurrency_max, window_max, expires_ms,
--   grace_ms, memory_ms, retry_after_ms, sweep_max, decision.
-- -> leased admitted_us lease_us epoch | granted decision ingress admitted_us lease_us epoch, as an earlier call was
--   | refused reason message ingress | differs | taken_back | ended | full resource retry_after_ms | expired | closed
local function admit(keys, args)
  local member, tenant = member_of(args[1]), word(args[2], 'tenant', 40)
  local found = open_gate(keys)
  if not found then return {'closed', member} end
  local body, ingress = word(args[3], 'body hash'), word(args[4], 'ingress')
  refuse_unless(args[5] == '0' or args[5] == '1', 'interactive')
  local digest, window = word(args[6], 'digest'), word(args[7], 'window')
  local concurrency_max, window_max = integer(args[8], 'concurrency_max'), integer(args[9], 'window_max')
  local expires_ms, grace_ms = integer(args[10], 'expires_ms'), integer(args[11], 'grace_ms')
  local memory_ms, retry_after_ms = integer(args[12], 'memory_ms'), integer(args[13], 'retry_after_ms')
  local sweep_max, decision = integer(args[14], 'sweep_max'), word(args[15], 'decision', DECISION_BYTES_MAX)
  local now, lease_us = now_us(), (expires_ms + grace_ms) * 1000
  refuse_unless(string.match(member, '^[^/]+') == tenant, 'tenant')
  refuse_unless(lease_us <= INTEGER_MAX, 'expires_ms')
  -- A row must outlive its lease, or what the lease holds could not be found again.
  refuse_unless(lease_us < now + memory_ms * 1000, 'memory_ms')

  local answer = remembered(keys[6], member, body)
  if answer then return answer end
  local refusal = redis.call('GET', keys[7])
  if refusal then
    local resource, wait_ms = string.match(refusal, '^(%l+) (%d+)$')
    return {'full', member, resource, wait_ms}
  end
  if now >= expires_ms * 1000 then return {'expired', member} end

  sweep(keys, now, sweep_max)
  local full
  if tonumber(redis.call('HGET', keys[3], tenant) or '0') >= concurrency_max then full = 'tenant' end
  if tonumber(redis.call('HGET', keys[4], window) or '0') >= window_max then full = 'window' end
  if full then
    if args[5] == '1' then redis.call('SET', keys[7], full .. ' ' .. text(retry_after_ms), 'PX', text(memory_ms)) end
    return {'full', member, full, text(retry_after_ms)}
  end

  local row = {digest = digest, window = window, lease_us = text(lease_us)}
  redis.call('HSET', keys[6], 'kind', 'admitted', 'body', body, 'ingress', ingress, 'decision', decision,
    'digest', digest, 'window', window, 'expires_ms', text(expires_ms), 'lease_us', row.lease_us,
    'admitted_us', text(now), 'epoch', found.epoch, 'held', '1')
  redis.call('PEXPIRE', keys[6], text(memory_ms))
  take(keys, member, row)
  return {'leased', member, text(now), row.lease_us, found.epoch}
end

-- refuse: remember a permanent refusal, unless something is remembered already.
-- ARGS: job, body hash, ingress, reason, message, memory_ms. -> as admit, without leased, full and expired
local function refuse(keys, args)
  local member = member_of(args[1])
  if not open_gate(keys) then return {'closed', member} end
  local body, ingress = word(args[2], 'body hash'), word(args[3], 'ingress')
  local reason, memory_ms = word(args[4], 'reason'), integer(args[6], 'memory_ms')
  refuse_unless(args[5] and #args[5] <= TEXT_BYTES_MAX and memory_ms > 0, 'message or memory_ms')
  local answer = remembered(keys[6], member, body)
  if answer then return answer end
  redis.call('HSET', keys[6], 'kind', 'refused', 'body', body, 'ingress', ingress, 'reason', reason,
    'message', args[5])
  redis.call('PEXPIRE', keys[6], text(memory_ms))
  return {'refused', member, reason, args[5], ingress}
end

-- An older life of the same transactional producer: its owner lost the partition and may not know it yet.
local function older(fence, than)
  local producer, epoch = string.match(fence, '^(%d+)%.(%d+)$')
  local other, other_epoch = string.match(than or '', '^(%d+)%.(%d+)$')
  return producer == other and tonumber(epoch) < tonumber(other_epoch)
end

-- begin: one more execution of a job, at its one place in the log.
-- ARGS: job, request coordinates, fence `<producer id>.<epoch>`.
-- -> begun attempt crashes remaining_ms | cancelled attempt | elsewhere coordinates | fenced | ended | unknown | closed
local function begin(keys, args)
  local member = member_of(args[1])
  if not open_gate(keys) then return {'closed', member} end
  local request, fence = word(args[2], 'request'), word(args[3], 'fence', 64)
  refuse_unless(string.match(fence, '^%d+%.%d+$'), 'fence')
  local row = redis.call('HMGET', keys[6], 'kind', 'ended', 'request', 'fence', 'attempt', 'crashes', 'running',
    'cancelled', 'expires_ms', 'restored')
  if row[1] == 'settled' or row[2] == '1' then return {'ended', member} end
  if row[1] ~= 'admitted' then return {'unknown', member} end
  if row[3] and row[3] ~= request then return {'elsewhere', member, row[3]} end
  if older(fence, row[4]) then return {'fenced', member} end
  -- A rebuild knows the attempts that wrote `Started`; one that had just begun may have been lost with the old ledger.
  local attempt = tonumber(row[5] or '0') + 1 + tonumber(row[10] or '0')
  -- The same life of the same producer did not crash: its last begin was answered into the void.
  local crashed = row[7] == '1' and row[4] ~= fence
  local crashes = tonumber(row[6] or '0') + (crashed and 1 or 0)
  redis.call('HSET', keys[6], 'request', request, 'fence', fence, 'attempt', text(attempt), 'crashes', text(crashes),
    'running', '1')
  redis.call('HDEL', keys[6], 'restored')
  if row[8] == '1' then return {'cancelled', member, text(attempt)} end
  local remaining_ms = math.max(0, tonumber(row[9]) - math.floor(now_us() / 1000))
  return {'begun', member, text(attempt), text(crashes), text(remaining_ms)}
end

-- hand_over: an execution ended in order; the next begin counts no crash.
-- ARGS: job, request coordinates, attempt. -> noted | stale | closed
local function hand_over(keys, args)
  local member = member_of(args[1])
  if not open_gate(keys) then return {'closed', member} end
  local request, attempt = word(args[2], 'request'), integer(args[3], 'attempt')
  local row = redis.call('HMGET', keys[6], 'request', 'attempt', 'running')
  if row[1] ~= request or row[2] ~= text(attempt) or row[3] ~= '1' then return {'stale', member} end
  redis.call('HDEL', keys[6], 'running')
  return {'noted', member}
end

-- cancel: flag an unfinished job, or remember the cancellation of one that has not arrived.
-- ARGS: job, memory_ms. -> flagged decision ingress | remembered | ended | closed
local function cancel(keys, args)
  local member = member_of(args[1])
  if not open_gate(keys) then return {'closed', member} end
  local memory_ms = integer(args[2], 'memory_ms')
  local row = redis.call('HMGET', keys[6], 'kind', 'ended', 'decision', 'ingress')
  if row[1] == 'admitted' and row[2] ~= '1' then
    redis.call('HSET', keys[6], 'cancelled', '1')
    return {'flagged', member, row[3], row[4]}
  end
  if row[1] and row[1] ~= 'cancelled' then return {'ended', member} end
  if not row[1] then
    redis.call('HSET', keys[6], 'kind', 'cancelled')
    redis.call('PEXPIRE', keys[6], text(memory_ms))
  end
  return {'remembered', member}
end

-- settle: end the lease of the job that came from `ingress`. What only an execution needs is forgotten.
-- ARGS: job, ingress, memory_ms. -> settled repeated(0|1) | closed
local function settle(keys, args)
  local member = member_of(args[1])
  if not open_gate(keys) then return {'closed', member} end
  local ingress, memory_ms = word(args[2], 'ingress'), integer(args[3], 'memory_ms')
  local row = redis.call('HMGET', keys[6], 'kind', 'ended', 'ingress')
  if row[1] == 'admitted' then
    -- Another ingress: the usage of an earlier job of this id, which the ledger has forgotten.
    if row[2] == '1' or row[3] ~= ingress then return {'settled', member, '1'} end
    release(keys, member, keys[6])
    redis.call('HSET', keys[6], 'ended', '1')
    redis.call('HDEL', keys[6], 'attempt', 'crashes', 'running', 'request', 'fence', 'restored', 'cancelled')
    return {'settled', member, '0'}
  end
  if row[1] == 'settled' or row[1] == 'refused' then return {'settled', member, '1'} end
  -- Admitted and finished around a loss of the ledger: remembered, so that a late copy does not begin.
  redis.call('HSET', keys[6], 'kind', 'settled', 'ingress', ingress)
  redis.call('PEXPIRE', keys[6], text(memory_ms))
  return {'settled', member, '0'}
end

-- Write a row from the log where none is. A cancellation that came meanwhile stands.
local function put(keys, row_key, member, forget_ms, fields)
  local kind = redis.call('HGET', row_key, 'kind')
  if kind and kind ~= 'cancelled' then return 0 end
  redis.call('HSET', row_key, unpack(fields))
  if kind then redis.call('HSET', row_key, 'cancelled', '1') end
  -- A row that is written is wanted: one whose time is over would be gone before it is read.
  redis.call('PEXPIREAT', row_key, text(math.max(forget_ms, math.floor(now_us() / 1000) + PUT_MS_MIN)))
  local row = redis.call('HMGET', row_key, 'held', 'lease_us', 'window', 'digest')
  if row[1] == '1' then take(keys, member, {lease_us = row[2], window = row[3], digest = row[4]}) end
  return 1
end

-- Parse rows: job, forget_ms, number of fields, field, value ... and again. All are checked before any is written.
local function parse_rows(args, first)
  local rows, at = {}, first
  while args[at] do
    local member, forget_ms = member_of(args[at]), integer(args[at + 1], 'forget_ms')
    local count, fields = integer(args[at + 2], 'fields'), {}
    refuse_unless(count > 0 and count <= 32 and args[at + 2 + 2 * count], 'fields')
    for i = 1, 2 * count do fields[i] = args[at + 2 + i] end
    rows[#rows + 1] = {member = member, forget_ms = forget_ms, fields = fields}
    at = at + 3 + 2 * count
  end
  return rows
end

-- adopt: know a job from its verified route, its lease having been lost.
-- ARGS: job, then one row as for restore. -> adopted written(0|1) | closed
local function adopt(keys, args)
  local member = member_of(args[1])
  if not open_gate(keys) then return {'closed', member} end
  local rows = parse_rows(args, 2)
  refuse_unless(#rows == 1 and rows[1].member == member, 'row')
  return {'adopted', member, text(put(keys, keys[6], member, rows[1].forget_ms, rows[1].fields))}
end

-- references: ARGS: '', digest, sweep_max. -> references count | closed
local function references(keys, args)
  if not open_gate(keys) then return {'closed', args[1]} end
  local digest, sweep_max = word(args[2], 'digest'), integer(args[3], 'sweep_max')
  sweep(keys, now_us(), sweep_max)
  return {'references', args[1], redis.call('HGET', keys[5], digest) or '0'}
end

-- status: ARGS: '', sweep_max. -> status open(0|1) epoch leases now_us [tenants] [windows] [references]
local function status(keys, args)
  local found, now = gate(keys) or {open = false, epoch = '0'}, now_us()
  if found.open then sweep(keys, now, integer(args[2], 'sweep_max')) end
  return {'status', args[1], found.open and '1' or '0', found.epoch, text(redis.call('ZCARD', keys[2])), text(now),
    redis.call('HGETALL', keys[3]), redis.call('HGETALL', keys[4]), redis.call('HGETALL', keys[5])}
end

-- raise: close the gate of this server process under a new epoch, above every one known.
-- ARGS: '', floor. -> raised epoch now_us
local function raise(keys, args)
  local floor = integer(args[2], 'floor')
  local epoch = math.max(floor, tonumber(redis.call('HGET', keys[1], 'epoch') or '0')) + 1
  redis.call('HSET', keys[1], 'run_id', run_id(), 'epoch', text(epoch), 'open', '0')
  return {'raised', args[1], text(epoch), text(now_us())}
end

-- Whether the gate is closed under this epoch, as a rebuild left it: another rebuild has raised it otherwise.
local function rebuilding(keys, epoch)
  local found = gate(keys)
  return found and not found.open and found.epoch == epoch
end

-- clear: forget what the ledger holds, one scan step at a time. ARGS: '', epoch, cursor, count.
-- -> cleared cursor (0 at the end) | closed
local function clear(keys, args)
  integer(args[3], 'cursor')
  if not rebuilding(keys, args[2]) then return {'closed', args[1]} end
  local page = redis.call('SCAN', args[3], 'MATCH', '{switchyard}:*', 'COUNT', integer(args[4], 'count'))
  for _, key in ipairs(page[2]) do
    if key ~= keys[1] then redis.call('UNLINK', key) end
  end
  return {'cleared', args[1], page[1]}
end

-- restore: write rows folded from the log. ARGS: '', epoch, rows. -> restored count | closed
local function restore(keys, args)
  if not rebuilding(keys, args[2]) then return {'closed', args[1]} end
  local written = 0
  for _, row in ipairs(parse_rows(args, 3)) do
    written = written + put(keys, ROW_PREFIX .. row.member, row.member, row.forget_ms, row.fields)
  end
  return {'restored', args[1], text(written)}
end

-- open: admit again. ARGS: '', epoch. -> opened | closed
local function open(keys, args)
  if not rebuilding(keys, args[2]) then return {'closed', args[1]} end
  redis.call('HSET', keys[1], 'open', '1')
  return {'opened', args[1]}
end

redis.register_function('switchyard_admit', admit)
redis.register_function('switchyard_refuse', refuse)
redis.register_function('switchyard_begin', begin)
redis.register_function('switchyard_hand_over', hand_over)
redis.register_function('switchyard_cancel', cancel)
redis.register_function('switchyard_settle', settle)
redis.register_function('switchyard_adopt', adopt)
redis.register_function('switchyard_references', references)
redis.register_function('switchyard_status', status)
redis.register_function('switchyard_raise', raise)
redis.register_function('switchyard_clear', clear)
redis.register_function('switchyard_restore', restore)
redis.register_function('switchyard_open', open)
