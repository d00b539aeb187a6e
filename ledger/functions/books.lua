-- The ledger from the operator's side: rows from the log, what is held, and the gate.

-- Count a row that is written; `counted` holds the sums of each tenant until all of its rows are.
local function count_row(keys, counted, tenant, stored, now)
  local sums, admitted = counted[tenant] or read_sums(tenant, now), tonumber(stored.admitted_us)
  counted[tenant] = sums
  count(sums, admitted, tonumber(stored.tokens or '0'), tonumber(stored.cost or '0'), now)
  note_admitted(keys, tenant, sums, admitted)
end

-- Write rows from the log where none are. A cancellation that came meanwhile stands. Returns how many were written.
local function put_all(keys, rows, now)
  local written, counted = 0, {}
  for _, row in ipairs(rows) do
    local row_key, stored = ROW_PREFIX .. row.member, row.stored
    local kind = redis.call('HGET', row_key, 'kind')
    if not kind or kind == 'cancelled' then
      if kind then redis.call('PERSIST', row_key) end
      redis.call('HSET', row_key, unpack(row.fields))
      if kind then redis.call('HSET', row_key, 'cancelled', '1') end
      if stored.held == '1' then
        take(keys, row.member, stored.lease_us, stored.window, stored.digest)
      else
        -- A row that is written is wanted: one whose time is over would be gone before it is read.
        forget_later(row_key, text(math.max(row.forget_ms, math.floor(now / 1000) + PUT_MS_MIN)))
      end
      if stored.admitted_us then count_row(keys, counted, tenant_of(row.member), stored, now) end
      written = written + 1
    end
  end
  for tenant, sums in pairs(counted) do write_sums(tenant, sums) end
  return written
end

-- Parse rows: job, forget_ms, a JSON object of texts, and again. All are checked before any is written.
local function parse_rows(args, first)
  local rows, at = {}, first
  while args[at] do
    local member, forget_ms = member_of(args[at]), integer(args[at + 1], 'forget_ms')
    local right, stored = pcall(cjson.decode, args[at + 2])
    refuse_unless(right and type(stored) == 'table', 'row')
    local fields = {}
    for field, value in pairs(stored) do
      refuse_unless(type(field) == 'string' and type(value) == 'string', 'fields')
      fields[#fields + 1], fields[#fields + 2] = field, value
    end
    refuse_unless(#fields > 0 and #fields <= 64, 'fields')
    for _, name in ipairs({'lease_us', 'admitted_us', 'tokens', 'cost'}) do integer(stored[name] or '0', name) end
    refuse_unless(stored.held ~= '1' or (stored.lease_us and stored.window and stored.digest), 'held')
    rows[#rows + 1] = {member = member, forget_ms = forget_ms, fields = fields, stored = stored}
    at = at + 3
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
  return {'adopted', member, text(put_all(keys, rows, now_us()))}
end

-- references: ARGS: '', digest, sweep_max. -> references count | closed
local function references(keys, args)
  if not open_gate(keys) then return {'closed', args[1]} end
  local digest, sweep_max = word(args[2], 'digest'), integer(args[3], 'sweep_max')
  sweep(keys, now_us(), sweep_max)
  return {'references', args[1], redis.call('HGET', keys[3], 'r|' .. digest) or '0'}
end

-- {tenant, minute, day, counter ...} of the tenants whose last admission is after that.
local function spent_since(keys, since, now)
  local flat = {}
  each_recent(keys, since, now, function(tenant, sums)
    for _, value in ipairs({tenant, text(minute_of(sums, now)), text(day_of(sums, now)), text(counter_of(sums, now))}) do
      flat[#flat + 1] = value
    end
  end)
  return flat
end

-- status: ARGS: '', sweep_max. -> status open(0|1) epoch leases now_us [counts] [tenant minute day counter ...]
local function status(keys, args)
  local found, now = gate(keys) or {open = false, epoch = '0'}, now_us()
  if found.open then sweep(keys, now, integer(args[2], 'sweep_max')) end
  return {'status', args[1], found.open and '1' or '0', found.epoch, text(redis.call('ZCARD', keys[2])), text(now),
    redis.call('HGETALL', keys[3]), spent_since(keys, 0, now)}
end

-- fairness: the same of tenants that were admitted something in the last minute. ARGS: ''. -> fairness [...] | closed
local function fairness(keys, args)
  if not open_gate(keys) then return {'closed', args[1]} end
  local now = now_us()
  return {'fairness', args[1], spent_since(keys, now - ACTIVE_US, now)}
end

-- raise: close the gate of this server process under a new epoch, above every one known; or not, where another did so
-- less than `patience_ms` ago and has not opened it. ARGS: '', floor, patience_ms. -> raised epoch now_us | busy
local function raise(keys, args)
  local floor, patience_ms = integer(args[2], 'floor'), integer(args[3], 'patience_ms')
  local found, now = gate(keys), now_us()
  local raised = redis.call('HGET', keys[1], 'raised_us')
  if found and not found.open and raised and now < tonumber(raised) + patience_ms * 1000 then
    return {'busy', args[1]}
  end
  local epoch = math.max(floor, tonumber(redis.call('HGET', keys[1], 'epoch') or '0')) + 1
  redis.call('HSET', keys[1], 'run_id', run_id(), 'epoch', text(epoch), 'open', '0', 'raised_us', text(now))
  return {'raised', args[1], text(epoch), text(now)}
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
  return {'restored', args[1], text(put_all(keys, parse_rows(args, 3), now_us()))}
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
redis.register_function('switchyard_fairness', fairness)
redis.register_function('switchyard_raise', raise)
redis.register_function('switchyard_clear', clear)
redis.register_function('switchyard_restore', restore)
redis.register_function('switchyard_open', open)
